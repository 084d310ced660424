"""Which agents of a run live, seen from outside and without getting in their way.

Invariant: the run's lock is left alone while agents of several nodes share it. A start takes it alone to learn whether
anybody lives, and would take our hold for somebody's life. Each agent has a lock of its own, which is asked instead.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from launcher.agent.run_lock import AGENTS_NAME, CLUSTER_NAME, epoch_in, lives_here, process_identity
from launcher.cluster.codec import from_json
from launcher.cluster.model import Generation

_SEAT = re.compile(r"(?P<node>.+?)(-[0-9a-f]{16})?")  # `n0`, or `n0-<incarnation>` where the memory of n0 is elsewhere
_HOLDER = re.compile(r"pid (\d+) on (\S+)")
_EPOCH = re.compile(r"epoch-(\d{1,18})")


class Life(Enum):
    ALIVE = "alive"
    GONE = "gone"
    UNKNOWN = "unknown"  # this file system has no locks, or they do not reach other machines


@dataclass(frozen=True)
class Agent:
    """An agent that has been in the epoch. `holder`: `pid 7 on host (...)`, or empty when it has just come."""

    node: str
    life: Life
    holder: str

    @property
    def pid(self) -> int | None:
        return _pid_in(self.holder)

    @property
    def host(self) -> str | None:
        found = _HOLDER.match(self.holder)
        return found[2] if found else None


def life_of_lock(output_dir: Path, locks_stay_here: str = "") -> Agent | None:
    """Who holds, or held, the lock of a run on one node; None when there is no lock."""
    path = output_dir / "ftlaunch" / "lock"
    if not path.exists():
        return None
    text = _read(path)
    return Agent("n0", _life(path, locks_stay_here if text else ""), text)


def epoch_of(output_dir: Path, latest_start: Mapping[str, Any]) -> int | None:
    """The number of the epoch, where the run's latest start is of several nodes. `latest_start`: its `run_started`."""
    text = _read(output_dir / "ftlaunch" / "lock")
    if text:
        return epoch_in(text)
    # Nobody, after a run on one node; or a file system without locks, where nobody writes into the lock.
    found = (_EPOCH.fullmatch(path.name) for path in (output_dir / "ftlaunch" / CLUSTER_NAME).glob("epoch-*"))
    newest = max((int(match[1]) for match in found if match), default=None)
    if newest is None:
        return None
    pids = {_pid_in(_read(path)) for path in _seats(output_dir, newest, str(latest_start.get("node")))}
    return newest if latest_start.get("agent_pid") in pids - {None} else None


def agents_of(output_dir: Path, epoch: int, locks_stay_here: str) -> list[Agent]:
    """One for each node that has been in the epoch, and every one that is alive.

    locks_stay_here: why other machines may not see this one's locks (`host.storage.why_locks_stay_here`), or "".
    """
    nodes: dict[str, list[tuple[float, Agent]]] = {}
    for path in _seats(output_dir, epoch):
        match = _SEAT.fullmatch(path.name)
        assert match is not None  # a file has a name
        try:
            taken_at = path.stat().st_mtime
        except OSError:
            continue  # the epoch is being removed
        agent = Agent(match["node"], _life(path, locks_stay_here), _read(path))
        nodes.setdefault(agent.node, []).append((taken_at, agent))
    found: list[Agent] = []
    for node in sorted(nodes, key=_in_order):
        agents = [agent for _, agent in sorted(nodes[node], key=lambda seat: seat[0])]
        found += [agent for agent in agents if agent.life is Life.ALIVE] or agents[-1:]
    return found


def first_generation(output_dir: Path, epoch: int) -> int | None:
    """The number with which the epoch's generations begin; None before there is one."""
    path = output_dir / "ftlaunch" / CLUSTER_NAME / f"epoch-{epoch}" / "claims" / "0.json"
    try:
        return from_json(Generation, json.loads(path.read_bytes())).number
    except (OSError, ValueError):
        return None


def _seats(output_dir: Path, epoch: int, node: str = "") -> list[Path]:
    folder = output_dir / "ftlaunch" / CLUSTER_NAME / f"epoch-{epoch}" / AGENTS_NAME
    return [path for path in folder.glob("*") if not node or path.name == node or path.name.startswith(f"{node}-")]


def _in_order(node: str) -> tuple[int, str]:
    """n10 comes after n9."""
    digits = node.removeprefix("n")
    return (int(digits) if digits.isdecimal() else 0, node)


def _life(path: Path, locks_stay_here: str = "") -> Life:
    text = _read(path)
    if lives_here(text):
        return Life.ALIVE
    try:
        with path.open("rb") as stream:
            fcntl.flock(stream, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return Life.ALIVE
    except FileNotFoundError:
        return Life.GONE
    except OSError:
        return Life.UNKNOWN
    return Life.UNKNOWN if locks_stay_here and not _was_here(text) else Life.GONE


def _was_here(holder: str) -> bool:
    """Whether its processes would be seen from here: same boot, same PID namespace."""
    here = (process_identity(os.getpid()) or "").rpartition(",")[0]
    return bool(here) and f"({here}," in holder


def _pid_in(holder: str) -> int | None:
    found = _HOLDER.match(holder)
    return int(found[1]) if found else None


def _read(path: Path) -> str:
    try:
        return path.read_bytes()[:256].decode("utf-8", "replace").strip()
    except OSError:
        return ""
