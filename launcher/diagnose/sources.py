"""From paths to evidence, for `ftlaunch diagnose PATH...`: a log, a run folder, an incident bundle, an archive."""

from __future__ import annotations

import json
import re
import signal as signals
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

from launcher.diagnose.evidence import NodeEvidence, NumberedLines, RankEvidence, number_lines
from launcher.diagnose.logfiles import LogFile, TextStream, files_in
from launcher.diagnose.scan import scan
from launcher.errors import UserError

_RANK_LOG = re.compile(r"^rank-(\d+)\.log$")
_TORCHRUN_LOG = re.compile(r"attempt_(\d+)/(\d+)/std(?:out|err)\.log$")
_GENERATION = re.compile(r"(?:^|/)gen-(\d+)/[^/]+$")
_KERNEL_LOG = re.compile(r"^(?:kernel|dmesg|kern|syslog).*")
_LOG_SUFFIXES = {".log", ".txt", ".out", ".err"}
_WHOLE_BYTES = 4 * 2**20  # a log up to this size is read as it is
_EXPECTED = "Expected rank-<r>.log, *.log, *.txt, *.out, *.err (also .gz, .zst), or an output_dir."


@dataclass(frozen=True)
class Sources:
    """`left_out`: what could not be read, and why."""

    ranks: tuple[RankEvidence, ...]
    nodes: tuple[NodeEvidence, ...]
    left_out: tuple[str, ...] = ()


def read_sources(paths: Sequence[Path], on_read: Callable[[str, int, int | None], None] | None = None) -> Sources:
    """Evidence from files, folders and archives; of a run folder the latest generation. UserError for nothing to read.

    `on_read` hears while a log is read: its name, the bytes since the last call, its size (None: unknown).
    """
    ranks: list[RankEvidence] = []
    nodes: list[NodeEvidence] = []
    left_out: list[str] = []
    for path in paths:
        with files_in(path) as files:
            chosen = _choose(files) if path.is_dir() or len(files) != 1 else files
            if not chosen:
                raise UserError(f"{path}: no logs here{'' if files else ', it is empty'}. {_EXPECTED}")
            ends = _ends_of_latest_generation(files)
            for file in chosen:
                try:
                    lines, trouble = _read(file, on_read)
                except OSError as error:
                    lines, trouble = None, error.strerror or str(error)
                if trouble:
                    left_out.append(f"{file.shown}: {trouble}")
                if lines is None:
                    continue
                if _KERNEL_LOG.match(file.name.name):
                    nodes.append(NodeEvidence(kernel_lines=tuple(text for _, text in lines)))
                else:
                    ranks.append(_rank(file, lines, ends))
    if not ranks and not nodes:
        raise UserError(f"nothing could be read: {'; '.join(left_out)}")
    return Sources(tuple(ranks), tuple(nodes), tuple(left_out))


def _choose(files: Sequence[LogFile]) -> list[LogFile]:
    """The logs of a run's latest generation or of torchrun's latest attempt; else logs by rank; else all logs."""
    for pattern in (_GENERATION, _TORCHRUN_LOG):
        numbered = [(int(found[1]), file) for file in files if (found := pattern.search(str(file.name)))]
        if numbered:
            latest = max(number for number, _ in numbered)
            return [file for number, file in numbered if number == latest]
    by_rank = [f for f in files if _RANK_LOG.match(f.name.name) or _KERNEL_LOG.match(f.name.name)]
    if any(_RANK_LOG.match(file.name.name) for file in by_rank):
        return by_rank
    return [f for f in files if f.name.suffix in _LOG_SUFFIXES or _KERNEL_LOG.match(f.name.name)]


def _read(file: LogFile, on_read: Callable[[str, int, int | None], None] | None) -> tuple[NumberedLines | None, str]:
    """The lines that count, None where there are none; and what was not as it should be."""
    with file.open() as raw:
        stream = TextStream(raw)
        if not stream.is_text:
            return None, "not a text file"
        if file.num_bytes is not None and file.num_bytes <= _WHOLE_BYTES:
            data = b"".join(iter(lambda: stream.read(_WHOLE_BYTES), b""))
            lines = number_lines(data.decode("utf-8", errors="replace"))
        else:
            lines = scan(stream, lambda num: on_read(file.shown, num, file.num_bytes) if on_read else None)
        return lines, "cut short; what was before the cut has been read" if stream.is_cut_short else ""


def _rank_of(name: PurePosixPath) -> int:
    found = _RANK_LOG.match(name.name)
    torchrun = _TORCHRUN_LOG.search(str(name))
    return int(found[1]) if found else int(torchrun[2]) if torchrun else -1


def _rank(file: LogFile, lines: NumberedLines, ends: dict[int, dict[str, Any]]) -> RankEvidence:
    rank = _rank_of(file.name)
    blank = RankEvidence(rank, "", None, None, None, file.shown, lines, None)
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


def _ends_of_latest_generation(files: Iterable[LogFile]) -> dict[int, dict[str, Any]]:
    """The `worker_exited` events of the last generation, by rank. A line that is cut short is skipped."""
    ends: dict[int, dict[str, Any]] = {}
    latest = -1
    for event in _exit_events(files):
        generation, rank = _whole(event.get("gen")) or 0, _whole(event.get("rank"))
        if generation > latest:
            latest, ends = generation, {}
        if rank is not None and generation == latest:
            ends[rank] = event
    return ends


def _exit_events(files: Iterable[LogFile]) -> Iterator[dict[str, Any]]:
    for file in files:
        if file.name.suffix != ".jsonl" or file.name.parent.name != "events":
            continue
        with file.open() as stream:
            for line in stream:
                if b"worker_exited" not in line:
                    continue
                try:
                    event = json.loads(line)
                except ValueError:
                    continue
                if isinstance(event, dict) and event.get("event") == "worker_exited":
                    yield event
