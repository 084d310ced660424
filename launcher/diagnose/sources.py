"""From paths to evidence, for `ftlaunch diagnose PATH...`: a log, a run folder, an incident bundle, a folder."""

from __future__ import annotations

import json
import re
import signal as signals
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from launcher.diagnose.evidence import NodeEvidence, RankEvidence, read_tail
from launcher.errors import UserError

_TAIL_BYTES = 8 * 2**20
_RANK_LOG = re.compile(r"^rank-(\d+)\.log$")
_KERNEL_LOG = re.compile(r"^(?:kernel|dmesg|kern|syslog).*")
_LOG_SUFFIXES = {".log", ".txt", ".out", ".err"}


@dataclass(frozen=True)
class Sources:
    ranks: tuple[RankEvidence, ...]
    nodes: tuple[NodeEvidence, ...]


def read_sources(paths: Sequence[Path]) -> Sources:
    """Evidence from files and folders; of a run folder the latest generation. UserError where there is nothing."""
    ranks: list[RankEvidence] = []
    nodes: list[NodeEvidence] = []
    for path in paths:
        if not path.exists():
            raise UserError(f"{path}: no such file or folder. Give a log, an output_dir, or an incident folder.")
        files = list(_logs_in(path)) if path.is_dir() else [path]
        if not files:
            raise UserError(
                f"{path}: no logs here. Expected rank-<r>.log, *.log, *.txt, *.out, *.err, or an output_dir."
            )
        ends = _ends_of_latest_generation(path) if path.is_dir() else {}
        for file in files:
            if _KERNEL_LOG.match(file.name):
                nodes.append(NodeEvidence(kernel_lines=tuple(text for _, text in read_tail(file, _TAIL_BYTES))))
            else:
                ranks.append(_rank(file, ends))
    return Sources(tuple(ranks), tuple(nodes))


def _logs_in(folder: Path) -> Iterable[Path]:
    generations = sorted(
        [*folder.glob("ftlaunch/logs/gen-*"), *folder.glob("logs/gen-*"), *folder.glob("gen-*")], key=_generation
    )
    folder = generations[-1] if generations else folder
    by_rank = [file for file in folder.iterdir() if _RANK_LOG.match(file.name) or _KERNEL_LOG.match(file.name)]
    return sorted(by_rank or (file for file in folder.iterdir() if file.is_file() and file.suffix in _LOG_SUFFIXES))


def _generation(folder: Path) -> int:
    found = re.search(r"gen-(\d+)$", folder.name)
    return int(found[1]) if found else -1


def _rank(file: Path, ends: dict[int, dict[str, Any]]) -> RankEvidence:
    found = _RANK_LOG.match(file.name)
    rank = int(found[1]) if found else -1
    blank = RankEvidence(rank, "", None, None, None, str(file), read_tail(file, _TAIL_BYTES), None)
    end = ends.get(rank)
    if end is None:
        return blank
    return replace(
        blank,
        node=str(end.get("node", "")),
        pid=_whole(end.get("pid")),
        exit_code=_whole(end.get("exit_code")),
        signal=_signal(end.get("signal")),
        last_step=_whole(end.get("last_step")),
        killed_by_us=bool(end.get("killed_by_us", False)),
    )


def _signal(value: object) -> int | None:
    """Events name signals ("SIGKILL"); a number is taken as it is."""
    if isinstance(value, str) and value in signals.Signals.__members__:
        return int(signals.Signals[value])
    return _whole(value)


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _ends_of_latest_generation(folder: Path) -> dict[int, dict[str, Any]]:
    """The `worker_exited` events of the last generation, by rank. A line that is cut short is skipped."""
    ends: dict[int, dict[str, Any]] = {}
    latest = -1
    for file in sorted(folder.glob("ftlaunch/events/*.jsonl")):
        for _, text in read_tail(file, _TAIL_BYTES):
            try:
                event = json.loads(text)
            except ValueError:
                continue
            if not isinstance(event, dict) or event.get("event") != "worker_exited":
                continue
            generation, rank = _whole(event.get("gen")) or 0, _whole(event.get("rank"))
            if generation > latest:
                latest, ends = generation, {}
            if rank is not None and generation == latest:
                ends[rank] = event
    return ends
