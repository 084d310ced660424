"""A healthy node: eight A100, enough of everything. Each test spoils one thing."""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

import pytest

from launcher.config.model_files import ModelFiles
from launcher.data.facts import DataFacts
from launcher.host.disk_speed import DiskSpeed
from launcher.host.facts import Cpu, Disk, Gpu, GpuHealth, HostFacts, Memory, Mount, Nic, Shm, StorageKind, StorageProbe
from launcher.host.rdma import Gid, Rdma, RdmaPort
from launcher.preflight.inputs import PreflightInputs
from tests.nvml import nvml_folder
from tests.unit.host.namespaces import in_namespace

__all__ = ["in_namespace", "nvml_folder"]

GIB = 1 << 30


class NodeWith(Protocol):
    def __call__(self, facts: dict[str, Any] | None = None, **inputs: Any) -> PreflightInputs: ...


WELL = GpuHealth(0, False, False, "default", (), (12, 12))


def a100(index: int) -> Gpu:
    return Gpu(index, f"GPU-{index:08x}", "NVIDIA A100-SXM4-80GB", 80 * GIB, 0, (8, 0), health=WELL)


def rdma(*gids: Gid, active: bool = True, verbs: tuple[str, ...] = ("uverbs0",)) -> Rdma:
    return Rdma((RdmaPort("mlx5_0", 1, active, "Ethernet", "200 Gb/sec (4X HDR)", gids),), verbs)


ROCE = (
    Gid(0, "fe80:0000:0000:0000:0000:0000:0000:0005", "IB/RoCE v1", "eth0"),
    Gid(1, "fe80:0000:0000:0000:0000:0000:0000:0005", "RoCE v2", "eth0"),
    Gid(2, "0000:0000:0000:0000:0000:ffff:0a01:0005", "IB/RoCE v1", "eth0"),
    Gid(3, "0000:0000:0000:0000:0000:ffff:0a01:0005", "RoCE v2", "eth0"),
)


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
    rdma=("mlx5_0",),
    mount=Mount("/mnt/data", "nfs4", "nas:/", "rw"),
    disk=Disk("/mnt/data/run", 1000 * GIB, 900 * GIB, 1000, "ok"),
    versions={
        "python": "3.11.7",
        "glibc": "2.36",
        "torch": "2.12.0",
        "torch_cuda": "12.8",
        "nccl_built": "2.28.9",
        "nccl": "2.28.9",
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
    rdma_ports=rdma(*ROCE),
)


DATA = DataFacts(
    name="train",
    num_records=1000,
    num_looked_at=1000,
    is_everything=False,
    max_length=2048,
    num_measured=100,
    num_tokens=90_000,
    num_cut=2,
    num_tokens_cut=500,
    longest=2500,
    longest_at="/data/train.jsonl:7",
    largest_id=151_000,
    has_turns=True,
)
MODEL_FILES = ModelFiles(
    source="/models/qwen",
    folder="/models/qwen",
    vocab_size=151_936,
    max_positions=32_768,
    tokenizer_size=151_665,
    has_chat_template=True,
    tokenizer_file="/models/qwen/tokenizer.json",
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
            "data": (DATA,),
            "model_files": MODEL_FILES,
            "xids": (),
            "disk_speed": DiskSpeed(256 << 20, 2.0e9, 3.0e9),
            "checkpoint_bytes": 10 * GIB,
            "grace_s": 25.0,
            "platform": "dlc",
        }
        return PreflightInputs(facts=dataclasses.replace(HEALTHY, **(facts or {})), **asked | inputs)

    return build
