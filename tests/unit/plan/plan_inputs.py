"""Hosts and jobs to plan for."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

from launcher.config.load import LoadedJob
from launcher.config.models import JobConfig
from launcher.host.facts import Cpu, Disk, Gpu, HostFacts, Memory, Nic, Shm

GIB = 1 << 30
CARDS = {"A100": (80, (8, 0)), "V100": (16, (7, 0)), "T4": (15, (7, 5)), "H100": (80, (9, 0))}
BASE: dict[str, Any] = {"output_dir": "/run", "model": {"path": "/m"}, "data": {"train": ["/a.jsonl"]}}


def host(cards: str = "none", **more: Any) -> HostFacts:
    """A node with cards such as `4xA100+4xV100`, all of them visible unless `visible_gpus` says otherwise."""
    gpus: list[Gpu] = []
    for count, name in re.findall(r"(\d+)x(\w+)", cards):
        gib, capability = CARDS[name]
        gpus += [Gpu(len(gpus) + i, f"GPU-{len(gpus) + i}", name, gib * GIB, 0, capability) for i in range(int(count))]
    facts = HostFacts(
        hostname="n0",
        gpus=tuple(gpus),
        nvml="ok" if gpus else "NVML is not installed",
        visible_gpus=tuple(range(len(gpus))),
        cpu=Cpu("Test CPU", 32, 16, flags_bf16=False),
        memory=Memory(512 * GIB, 400 * GIB, None, None),
        shm=Shm("/dev/shm", 64 * GIB, 64 * GIB),
        nics=(
            Nic("docker0", True, 1500, None, ("172.17.0.1",), (), "docker"),
            Nic("eth0", True, 1500, 25000, ("10.1.0.5",), (), "ethernet"),
            Nic("eth1", False, 1500, None, ("10.2.0.5",), (), "ethernet"),
            Nic("eth2", True, 1500, None, (), ("fe80::2",), "ethernet"),
            Nic("lo", True, 65536, None, ("127.0.0.1",), ("::1",), "loopback"),
        ),
        rdma=(),
        mount=None,
        disk=Disk("/run", 1000 * GIB, 900 * GIB, 1000, "ok"),
    )
    return dataclasses.replace(facts, **more)


def config(more: dict[str, Any] | None = None) -> JobConfig:
    return JobConfig.model_validate(BASE | (more or {}))


def loaded(more: dict[str, Any] | None = None) -> LoadedJob:
    return LoadedJob(config=config(more), path=Path("/jobs/job.yaml"), origin={}, text="", sha="0123456789abcdef")
