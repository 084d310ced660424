"""What this node is, read once into frozen data. Each reader may fail alone: its field then says so, nothing raises."""

from __future__ import annotations

import os
import resource
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from launcher.host.compute import Cpu, Memory, read_cpu, read_memory
from launcher.host.gpu_health import GpuHealth, GpuProcess
from launcher.host.gpus import Gpu, gpu_device_files, read_gpus, select_visible
from launcher.host.nics import Nic, NicKind, read_nics, read_rdma
from launcher.host.rdma import Rdma, read_rdma_ports
from launcher.host.shm_segments import Segment, find_stale
from launcher.host.software import Copies, read_conflicts, read_copies, read_nccl_libraries, read_versions
from launcher.host.storage import Disk, Mount, Shm, StorageKind, find_mount, read_disk, read_shm
from launcher.host.storage_probe import StorageProbe, probe_storage

__all__ = [
    "UNLIMITED",
    "Copies",
    "Cpu",
    "Disk",
    "Gpu",
    "GpuHealth",
    "GpuProcess",
    "HostFacts",
    "Memory",
    "Mount",
    "Nic",
    "NicKind",
    "Shm",
    "StorageKind",
    "StorageProbe",
    "read_host_facts",
]

UNLIMITED = 2**63 - 1  # what `nofile_limit` says for RLIM_INFINITY


@dataclass(frozen=True)
class HostFacts:
    """Facts of one node. JSON-able with `dataclasses.asdict`."""

    hostname: str
    gpus: tuple[Gpu, ...]
    nvml: str  # "ok", or why NVML is not there
    visible_gpus: tuple[int, ...]  # indices after CUDA_VISIBLE_DEVICES, in its order
    cpu: Cpu
    memory: Memory | None
    shm: Shm | None
    nics: tuple[Nic, ...]
    rdma: tuple[str, ...]
    mount: Mount | None  # the one that holds output_dir
    disk: Disk  # of output_dir
    versions: dict[str, str] = field(default_factory=dict)  # no entry: not installed, or not known
    nofile_limit: int = UNLIMITED  # soft limit of open files
    nofile_hard_limit: int = UNLIMITED
    in_container: bool = False
    missing_gpus: tuple[str, ...] = ()  # entries of CUDA_VISIBLE_DEVICES that name no card
    lost_gpus: tuple[str, ...] = ()  # cards that NVML counts but cannot read, each with the reason
    gpu_device_files: tuple[str, ...] = ()
    copies: tuple[Copies, ...] = ()  # of packages that are installed more than once
    conflicts: tuple[str, ...] = ()  # between packages, by their own metadata
    nccl_libraries: tuple[str, ...] = ()  # in front of the one that came with torch
    rdma_ports: Rdma | None = None
    shm_stale: tuple[Segment, ...] = ()
    memlock_limit: int = UNLIMITED  # soft limit of locked memory, bytes
    storage: StorageProbe | None = None  # of output_dir; None: not tried

    @property
    def storage_kind(self) -> StorageKind:
        return self.storage.kind if self.storage else StorageKind.POSIX

    def nic(self, name: str) -> Nic | None:
        return next((nic for nic in self.nics if nic.name == name), None)


def read_host_facts(output_dir: Path, environ: Mapping[str, str]) -> HostFacts:
    """Look at this node. Takes well under a second, on an object mount a few; bounded even where the output
    folder's server is dead. A private folder is made beside or in the output folder, and removed."""
    reading = read_gpus()
    visible = select_visible(environ.get("CUDA_VISIBLE_DEVICES"), reading.gpus)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    absolute = Path(os.path.abspath(output_dir))
    mount = find_mount(absolute)
    return HostFacts(
        hostname=socket.gethostname(),
        gpus=reading.gpus,
        nvml=reading.nvml,
        visible_gpus=visible.indices,
        cpu=read_cpu(),
        memory=read_memory(),
        shm=read_shm(),
        nics=read_nics(),
        rdma=read_rdma(),
        mount=mount,
        disk=read_disk(absolute),
        versions=read_versions() | _driver_versions(reading.driver, reading.cuda_driver),
        nofile_limit=_limit(soft),
        nofile_hard_limit=_limit(hard),
        in_container=is_in_container(environ),
        missing_gpus=visible.missing,
        lost_gpus=reading.lost,
        gpu_device_files=gpu_device_files(),
        copies=read_copies(sys.path),
        conflicts=read_conflicts(),
        nccl_libraries=read_nccl_libraries(environ),
        rdma_ports=read_rdma_ports(),
        shm_stale=find_stale(),
        memlock_limit=_limit(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]),
        storage=probe_storage(absolute, mount),
    )


def is_in_container(environ: Mapping[str, str], root: Path = Path("/")) -> bool:
    """Docker and Podman leave a file, Kubernetes its variables, systemd-nspawn and LXC the variable `container`."""
    if any((root / marker).exists() for marker in (".dockerenv", "run/.containerenv")):
        return True
    return bool(environ.get("KUBERNETES_SERVICE_HOST") or environ.get("container"))


def _driver_versions(driver: str | None, cuda_driver: str | None) -> dict[str, str]:
    known = {"driver": driver, "cuda_driver": cuda_driver}
    return {name: version for name, version in known.items() if version}


def _limit(value: int) -> int:
    return UNLIMITED if value == resource.RLIM_INFINITY else value
