"""What a node can tell of a failed attempt: kernel log, counters of cgroup, RDMA and GPUs, room on disks.

Every reader may be missing and every one may block (a dead mount, a driver that does not answer): all are asked at
once, and who has not answered in time is left behind. Counters are told as what they have grown by since the attempt
began.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from concurrent import futures
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launcher.diagnose.evidence import NodeEvidence, read_cgroup_oom_kills, read_shm
from launcher.host.cgroups import read_memory_counters
from launcher.host.gpus import read_gpu_health
from launcher.host.kernel_log import read_kernel_lines
from launcher.host.rdma_counters import read_rdma_counters

COLLECT_WITHIN_S = 7.0
_GAUGES = frozenset({"current", "peak", "limit", "state", "phys_state"})  # levels: they do not only grow


@dataclass(frozen=True)
class Counters:
    """Taken when an attempt begins; cheap reads only."""

    at_s: float = 0.0
    oom_kills: int | None = None
    memory: Mapping[str, int] = field(default_factory=dict)
    rdma: Mapping[str, Mapping[str, str | int]] = field(default_factory=dict)


def take_counters() -> Counters:
    return Counters(time.time(), read_cgroup_oom_kills(), read_memory_counters(), read_rdma_counters())


def collect(readers: Mapping[str, Callable[[], Any]], within_s: float) -> dict[str, Any]:
    """The answers of all readers, asked at the same time; of one that failed or did not answer, why there is none."""
    asked = {name: _ask(read, name) for name, read in readers.items()}
    futures.wait(asked.values(), within_s)
    answers: dict[str, Any] = {}
    for name, answer in asked.items():
        if not answer.done():
            answers[name] = Unanswered(f"no answer within {within_s:g} s")
        elif error := answer.exception():
            answers[name] = Unanswered(str(error) or type(error).__name__)
        else:
            answers[name] = answer.result()
    return answers


class Unanswered(str):
    """Why there is no answer."""


def _ask(read: Callable[[], Any], name: str) -> futures.Future[Any]:
    answer: futures.Future[Any] = futures.Future()

    def run() -> None:
        try:
            answer.set_result(read())
        except Exception as error:  # noqa: BLE001  # this thread's edge: told instead of an answer
            answer.set_exception(error)

    threading.Thread(target=run, name=f"collector: {name}", daemon=True).start()
    return answer


def node_evidence(
    before: Counters, node: str, disks: Mapping[str, Path], within_s: float = COLLECT_WITHIN_S
) -> NodeEvidence:
    """`disks`: name -> folder whose file system's room is told."""
    readers: dict[str, Callable[[], Any]] = {
        "kernel": lambda: read_kernel_lines(since_s=before.at_s),
        "oom_kills": read_cgroup_oom_kills,
        "memory": read_memory_counters,
        "shm": read_shm,
        "rdma": read_rdma_counters,
        "gpus": lambda: read_gpu_health(within_s),
        **{f"disk {name}": _disk_reader(folder) for name, folder in disks.items()},
    }
    told = collect(readers, within_s)
    kills = told["oom_kills"]
    both = isinstance(kills, int) and before.oom_kills is not None
    free, size = told["shm"] if isinstance(told["shm"], tuple) else (None, None)
    facts = {
        "memory": told["memory"],
        "memory_grown": _grown(before.memory, told["memory"]),
        "shm": {"free_bytes": free, "size_bytes": size},
        "rdma": told["rdma"],
        "rdma_grown": _grown_ports(before.rdma, told["rdma"]),
        "gpus": told["gpus"],
        "disks": {name.partition(" ")[2]: told[name] for name in told if name.startswith("disk ")},
        "unanswered": {name: str(answer) for name, answer in told.items() if isinstance(answer, Unanswered)},
    }
    return NodeEvidence(
        cgroup_oom_kills=kills - before.oom_kills if both else None,
        kernel_lines=told["kernel"] if isinstance(told["kernel"], tuple) else (),
        shm_free_bytes=free,
        shm_size_bytes=size,
        node=node,
        facts={name: value for name, value in facts.items() if value and not isinstance(value, Unanswered)},
    )


def _disk_reader(folder: Path) -> Callable[[], dict[str, int]]:
    def read() -> dict[str, int]:
        stat = os.statvfs(folder)
        return {
            "total_bytes": stat.f_blocks * stat.f_frsize,
            "free_bytes": stat.f_bavail * stat.f_frsize,
            "free_inodes": stat.f_favail,
        }

    return read


def _grown(before: Mapping[str, Any], now: Any) -> dict[str, int]:
    if not isinstance(now, Mapping):
        return {}
    numbers = {name: value for name, value in now.items() if isinstance(value, int) and name not in _GAUGES}
    return {name: value - before[name] for name, value in numbers.items() if value > before.get(name, value)}


def _grown_ports(before: Mapping[str, Mapping[str, Any]], now: Any) -> dict[str, dict[str, Any]]:
    """Ports whose error counters grew or whose state changed."""
    grown: dict[str, dict[str, Any]] = {}
    for port, values in now.items() if isinstance(now, Mapping) else ():
        earlier = before.get(port, {})
        changed: dict[str, Any] = dict(_grown(earlier, values))
        if earlier.get("state") not in (None, values.get("state")):
            changed["state"] = f"{earlier['state']} -> {values.get('state')}"
        if changed:
            grown[port] = changed
    return grown
