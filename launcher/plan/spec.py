"""What one generation's ranks are told: everything they need, as plain JSON, decided before they start."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from launcher.host.storage import StorageKind


@dataclass(frozen=True)
class Drill:
    """A rehearsed fault: rank `rank` sends itself `signal`, or hangs as `hang` says, at place `at` of optimizer step
    `step` (see docs/drills.md); `batch` counts from 1. `number` identifies it."""

    number: int
    rank: int
    step: int
    signal: str = "SIGKILL"
    at: str = "step_end"
    batch: int = 1
    hang: str | None = None


@dataclass(frozen=True)
class RankSpec:
    """The same for every rank of a generation; rank numbers come from DeepSpeed's environment variables.

    `config` is the resolved job.yaml; `global_batch_size` the samples of an optimizer step over all ranks, the same for
    the whole life of a run; `resume_from` a folder that the agent has verified, of tier `resume_tier`;
    `resume_snapshots`: what each node has to put together for that (a `WholeStep`); `identity` goes into manifests;
    `memory_every`: optimizer steps between two snapshots in memory, 0 for as often as the budget allows, None for none
    at all; `peers`: they are kept on the next node, too; `num_faults` in `trained_s` seconds of training: what this run
    has seen so far.
    """

    output_dir: str
    run_id: str
    generation: int
    config: Mapping[str, Any]
    config_sha: str
    device: str
    precision: str
    zero_stage: int
    gradient_checkpointing: bool
    lora_target_modules: str | tuple[str, ...] | None
    ds_config: Mapping[str, Any]
    identity: Mapping[str, Any]
    global_batch_size: int
    num_nodes: int = 1
    resume_from: str | None = None
    resume_tier: str = "disk"
    resume_snapshots: Mapping[str, Any] | None = None
    peers: bool = False
    memory_every: int | None = None
    num_faults: int = 0
    trained_s: float = 0.0
    shares_model: bool = True  # the template may hold it for all ranks, where all would load the same
    storage_kind: StorageKind = StorageKind.POSIX  # of output_dir
    drills: tuple[Drill, ...] = field(default=())

    def to_json(self) -> str:
        return json.dumps(asdict(self), ensure_ascii=False)

    @staticmethod
    def from_json(text: str) -> RankSpec:
        raw = json.loads(text)
        raw["storage_kind"] = StorageKind(raw["storage_kind"])
        raw["drills"] = tuple(Drill(**drill) for drill in raw["drills"])
        if isinstance(raw["lora_target_modules"], list):
            raw["lora_target_modules"] = tuple(raw["lora_target_modules"])
        return RankSpec(**raw)

    @property
    def output_path(self) -> Path:
        return Path(self.output_dir)


def global_batch_of(training: Mapping[str, Any], num_ranks: int) -> int:
    """Samples of an optimizer step when `num_ranks` ranks train as the `training` section says (defaults are those of
    TrainingArguments). `num_ranks`: of the full size of the job, however many nodes there are at the moment."""
    per_device = int(training.get("per_device_train_batch_size", 8))
    return per_device * int(training.get("gradient_accumulation_steps", 1)) * num_ranks
