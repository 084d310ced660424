"""Processor and main memory, as far as this process may use them (affinity and cgroups, not the bare machine)."""

from __future__ import annotations

import math
import os
import platform
from dataclasses import dataclass
from pathlib import Path

from launcher.host.cgroups import read_cpu_quota, read_memory_limit

ROOT = Path("/")
MEMORY_TIGHT = 0.9  # share of the usable memory that a plan may count on: the rest is for what no forecast knows
BF16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})  # the last one is ARM's


@dataclass(frozen=True)
class Cpu:
    model: str
    num_logical: int
    num_usable: int  # after affinity and the cgroup's quota, at least 1
    flags_bf16: bool  # arithmetic on bf16 in hardware


@dataclass(frozen=True)
class Memory:
    """The cgroup's figures are None where it sets no limit, or tells nothing."""

    total_bytes: int
    available_bytes: int
    cgroup_limit_bytes: int | None
    cgroup_used_bytes: int | None  # without file pages that the kernel can drop

    @property
    def usable_bytes(self) -> int:
        """What this process can still take before the machine or its cgroup runs out."""
        if self.cgroup_limit_bytes is None:
            return self.available_bytes
        return min(self.available_bytes, max(0, self.cgroup_limit_bytes - (self.cgroup_used_bytes or 0)))


def read_cpu(root: Path = ROOT) -> Cpu:
    fields = _cpuinfo(root)
    num_usable = len(os.sched_getaffinity(0))
    quota = read_cpu_quota(root)
    if quota is not None:
        num_usable = min(num_usable, math.ceil(quota))
    flags = fields.get("flags") or fields.get("Features") or ""
    return Cpu(
        model=fields.get("model name") or platform.machine(),
        num_logical=os.cpu_count() or 1,
        num_usable=max(1, num_usable),
        flags_bf16=not BF16_FLAGS.isdisjoint(flags.split()),
    )


def read_memory(root: Path = ROOT) -> Memory | None:
    """None where `/proc/meminfo` cannot be read."""
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    kib = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines) if rest.strip()}
    if "MemTotal" not in kib:
        return None
    limit = read_memory_limit(root)
    return Memory(
        total_bytes=kib["MemTotal"] * 1024,
        available_bytes=kib.get("MemAvailable", kib.get("MemFree", 0)) * 1024,
        cgroup_limit_bytes=limit.limit_bytes,
        cgroup_used_bytes=limit.used_bytes,
    )


def _cpuinfo(root: Path) -> dict[str, str]:
    """Fields of the first processor in `/proc/cpuinfo`; empty where it cannot be read."""
    try:
        first, _, _ = (root / "proc/cpuinfo").read_text().partition("\n\n")
    except OSError:
        return {}
    return {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in first.splitlines())}
