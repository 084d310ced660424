"""All that the checks may know, and whom a remedy is written for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal

from launcher.config.model_files import ModelFiles
from launcher.data.facts import DataFacts
from launcher.host.disk_speed import DiskSpeed
from launcher.host.facts import Disk, Gpu, HostFacts
from launcher.preflight.cluster_facts import ClusterFacts, StepNeeds


class Reader(Enum):
    """Where the reader can turn a knob: decides which remedy is shown."""

    DLC = "dlc"
    KUBERNETES = "kubernetes"
    SLURM = "slurm"
    CONTAINER = "container"
    BARE = "bare"


@dataclass(frozen=True)
class PreflightInputs:
    """Facts of one node and what the job asks of it. None means: not asked for, or not known; nothing is checked."""

    facts: HostFacts
    num_ranks: int  # on this node
    num_dataloader_workers: int  # of each rank
    device: Literal["cuda", "cpu"]
    interface: str = "auto"  # towards the other nodes; "auto": nobody named one
    interface_reason: str = ""  # why this one was taken
    master_addr: str = ""
    master_port: int | None = None
    port_free: bool | None = None  # None: this node does not listen there
    agent_port: int | None = None  # where the agents of several nodes meet
    agent_port_free: bool | None = None
    agent_here: str = ""  # this run's own agent, where it lives on this machine already
    disk_needed_bytes: int | None = None
    scratch: Disk | None = None  # this node's own disk, where checkpoints are made on an object mount
    scratch_needed_bytes: int | None = None
    tensorboard: bool = False  # event files below output_dir
    gpu_needed_bytes: int | None = None  # by a rank on its card, at the peak of a step
    gpu_states_bytes: int | None = None  # of these, what is there all the time
    memory_needed_bytes: int | None = None  # by the ranks of this node
    memory_tier_bytes: int | None = None  # by checkpoints in memory; None: switched off
    memory_tier_required: bool = False  # job.yaml asks for them, it does not leave it open
    env: Mapping[str, str] = field(default_factory=dict)  # what the user and the platform have set
    skip: tuple[str, ...] = ()
    num_nodes: int = 1
    method: Literal["lora", "qlora", "full"] | None = "lora"  # None: a trainer of the user's own (`command`)
    data: tuple[DataFacts, ...] = ()
    model_files: ModelFiles | None = None
    xids: tuple[tuple[str, int], ...] | None = None  # in the kernel log: PCI address, number; None: not readable
    disk_speed: DiskSpeed | None = None  # of output_dir
    checkpoint_bytes: int | None = None  # of one
    grace_s: float = 0.0  # spot.grace_seconds
    cluster: ClusterFacts | None = None  # found out together with the other nodes
    step_needs: StepNeeds | None = None
    platform: str = ""  # as `launcher/platforms` names it; empty: judged from `env` and `facts`

    @property
    def visible(self) -> tuple[Gpu, ...]:
        """The GPUs that ranks will get, in their order."""
        by_index = {gpu.index: gpu for gpu in self.facts.gpus}
        return tuple(by_index[index] for index in self.facts.visible_gpus if index in by_index)

    @property
    def reader(self) -> Reader:
        name = self.platform.lower()
        if "dlc" in name or "pai" in name:
            return Reader.DLC
        if "slurm" in name:
            return Reader.SLURM
        if "KUBERNETES_SERVICE_HOST" in self.env:
            return Reader.KUBERNETES
        return Reader.CONTAINER if self.facts.in_container else Reader.BARE
