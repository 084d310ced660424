"""A healthy node: eight A100, enough of everything. Each test spoils one thing."""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

import pytest

from launcher.host.facts import Cpu, Disk, Gpu, HostFacts, Memory, Mount, Nic, Shm, StorageKind, StorageProbe
from launcher.preflight.inputs import PreflightInputs
from tests.nvml import nvml_folder
from tests.unit.host.namespaces import in_namespace

__all__ = ["in_namespace", "nvml_folder"]

GIB = 1 << 30


class NodeWith(Protocol):
    def __call__(self, facts: dict[str, Any] | None = None, **inputs: Any) -> PreflightInputs: ...


def a100(index: int) -> Gpu:
    return Gpu(index, f"GPU-{index:08x}", "NVIDIA A100-SXM4-80GB", 80 * GIB, 0, (8, 0))


HEALTHY = HostFacts(
    hostname="n0",
    gpus=tuple(a100(index) for index in range(8)),
    nvml="ok",
    visible_gpus=tuple(range(8)),
    cpu=Cpu("Test CPU", 64, 64, flags_bf16=True),
    memory=Memory(512 * GIB, 400 * GIB, 256 * GIB, 16 * GIB),
    shm=Shm("/dev/shm", 64 * GIB, 64 * GIB),
    nics=(
        Nic("docker0", True, 1500, None, ("172.17.0.1",), (), "docker"),
        Nic("eth0", True, 1500, 25000, ("10.1.0.5",), ("fe80::5",), "ethernet"),
        Nic("eth1", False, 1500, None, ("10.2.0.5",), (), "ethernet"),
        Nic("eth2", True, 1500, None, ("169.254.3.4",), (), "link-local"),
        Nic("lo", True, 65536, None, ("127.0.0.1",), ("::1",), "loopback"),
    ),
    rdma=(),
    mount=Mount("/mnt/data", "nfs4", "nas:/", "rw"),
    disk=Disk("/mnt/data/run", 1000 * GIB, 900 * GIB, 1000, "ok"),
    versions={
        "torch": "2.9.1",
        "torch_cuda": "12.8",
        "transformers": "5.24.0",
        "accelerate": "1.15.0",
        "deepspeed": "0.19.8",
        "peft": "0.21.0",
        "bitsandbytes": "0.49.0",
        "driver": "570.124.06",
        "cuda_driver": "12.8",
    },
    nofile_limit=1 << 20,
    nofile_hard_limit=1 << 20,
    gpu_device_files=tuple(f"/dev/nvidia{index}" for index in range(8)),
    storage=StorageProbe(StorageKind.POSIX, "nfs4"),
)


@pytest.fixture
def node_with() -> NodeWith:
    def build(facts: dict[str, Any] | None = None, **inputs: Any) -> PreflightInputs:
        asked: dict[str, Any] = {
            "num_ranks": 8,
            "num_dataloader_workers": 4,
            "device": "cuda",
            "interface": "eth0",
            "master_addr": "10.1.0.5",
            "master_port": 29500,
            "port_free": True,
            "agent_port": 29430,
            "agent_port_free": True,
            "disk_needed_bytes": 100 * GIB,
            "gpu_needed_bytes": 12 * GIB,
            "gpu_states_bytes": 8 * GIB,
            "memory_needed_bytes": 64 * GIB,
            "memory_tier_bytes": 32 * GIB,
            "env": {"NCCL_SOCKET_IFNAME": "eth", "GLOO_SOCKET_IFNAME": "eth0"},
            "num_nodes": 2,
            "platform": "dlc",
        }
        return PreflightInputs(facts=dataclasses.replace(HEALTHY, **(facts or {})), **asked | inputs)

    return build
