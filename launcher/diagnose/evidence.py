"""What is known about a failed attempt: per rank its exit and the end of its log, per node what the kernel counted.

Readers never raise for a source that is missing or unreadable: the field is then None or empty.
"""

from __future__ import annotations

import os
import re
import signal as signals
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

NumberedLines = tuple[tuple[int, str], ...]

_CGROUP_ROOT = Path("/sys/fs/cgroup")
_ANSI = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b[@-Z\\-_]")
_MAX_LINE_CHARS = 8000


@dataclass(frozen=True)
class RankEvidence:
    """One rank's end. `rank` is -1 for a log whose rank nobody knows; `exited_at_s` is a Unix time."""

    rank: int
    node: str
    pid: int | None
    exit_code: int | None
    signal: int | None
    log_path: str
    tail: NumberedLines
    last_step: int | None
    killed_by_us: bool = False
    exited_at_s: float | None = None
    head: NumberedLines = ()  # how a long log began, for people: a cause stands at the end


@dataclass(frozen=True)
class NodeEvidence:
    """One node's facts since the attempt began: `cgroup_oom_kills` is the increase of the counter, not its value."""

    cgroup_oom_kills: int | None = None
    kernel_lines: tuple[str, ...] = ()
    shm_free_bytes: int | None = None
    shm_size_bytes: int | None = None
    node: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)  # what else was read of the node, for people


def clean_line(raw: str) -> str:
    """What a terminal would have shown: no colour codes, and of a redrawn progress bar only its last state.

    A line longer than _MAX_LINE_CHARS (a dumped tensor, binary data) loses its middle, so that matching stays fast.
    """
    line = _ANSI.sub("", raw.rstrip("\r\n")).rsplit("\r", 1)[-1].rstrip()
    if len(line) > _MAX_LINE_CHARS:
        return f"{line[: _MAX_LINE_CHARS // 2]} ... {line[-_MAX_LINE_CHARS // 4 :]}"
    return line


def number_lines(text: str, first_line: int = 1) -> NumberedLines:
    lines = text.split("\n")
    if lines and not lines[-1]:
        lines.pop()
    return tuple((first_line + i, clean_line(line)) for i, line in enumerate(lines))


def read_tail(path: str | os.PathLike[str], max_bytes: int = 262_144) -> NumberedLines:
    """The last `max_bytes` of a log as (line number in the file, text); empty when it cannot be read."""
    try:
        with open(path, "rb") as log:
            size = log.seek(0, os.SEEK_END)
            start = max(0, size - max_bytes)
            log.seek(0)
            skipped_lines, left = 0, start
            while left:
                chunk = log.read(min(left, 1 << 20))
                if not chunk:
                    break
                left -= len(chunk)
                skipped_lines += chunk.count(b"\n")
            data = log.read(max_bytes)
    except OSError:
        return ()
    return number_lines(data.decode("utf-8", errors="replace"), skipped_lines + 1)


def read_head(path: str | os.PathLike[str], tail: NumberedLines, max_bytes: int = 65_536) -> NumberedLines:
    """The first lines of a log of which `tail` is the end; empty where the tail is all of it."""
    first = tail[0][0] if tail else 1
    if first == 1:
        return ()
    try:
        with open(path, "rb") as log:
            data = log.read(max_bytes)
    except OSError:
        return ()
    head = tuple(line for line in number_lines(data.decode("utf-8", errors="replace")) if line[0] < first)
    return (*head, (head[-1][0] + 1, "... left out ...")) if head and head[-1][0] + 1 < first else head


def with_last_words(tail: NumberedLines, words: str) -> NumberedLines:
    """The log's end, completed with what the rank has said elsewhere: on a full disk a log ends in mid-sentence."""
    said = number_lines(words)
    if not said or said[-1][1] in (text for _, text in tail):
        return tail
    first = tail[-1][0] + 1 if tail else 1
    return tail + number_lines(f"(not in the log, the rank has told its agent)\n{words}", first)


def read_cgroup_oom_kills(root: Path = _CGROUP_ROOT, proc_cgroup: Path = Path("/proc/self/cgroup")) -> int | None:
    """How many processes of this cgroup the kernel has killed for memory since the cgroup exists (v2, then v1).

    Both counters include kills by the machine-wide OOM killer, so an unchanged counter rules memory out.
    """
    for path in _oom_counter_files(root, proc_cgroup):
        try:
            text = path.read_text()
        except OSError:
            continue
        if found := re.search(r"^oom_kill (\d+)$", text, re.MULTILINE):
            return int(found[1])
    return None


def _oom_counter_files(root: Path, proc_cgroup: Path) -> list[Path]:
    try:
        entries = [line.split(":", 2) for line in proc_cgroup.read_text().splitlines()]
    except OSError:
        entries = []
    files = []
    for _, controllers, path in (entry for entry in entries if len(entry) == 3):
        own = path.lstrip("/")
        if not controllers:
            files += [root / own / "memory.events", root / "unified" / own / "memory.events"]
        elif "memory" in controllers.split(","):
            files.append(root / "memory" / own / "memory.oom_control")
    return [*files, root / "memory.events", root / "memory" / "memory.oom_control"]


def read_shm(path: str = "/dev/shm") -> tuple[int | None, int | None]:
    """(free bytes, size in bytes) of the shared-memory file system."""
    try:
        stat = os.statvfs(path)
    except OSError:
        return None, None
    return stat.f_bavail * stat.f_frsize, stat.f_blocks * stat.f_frsize


def signal_number(exit_code: int | None, signal: int | None) -> int | None:
    """The signal that ended a process, from a wait status, Python's -n, a shell's 128+n or DeepSpeed's 256-n."""
    if signal:
        return signal
    if exit_code is None or exit_code == 0:
        return None
    if exit_code < 0:
        return -exit_code
    for number in (exit_code - 128, 256 - exit_code):
        if 2 <= number <= 31:
            return number
    return None


def name_exit(code: int | None, signal: int | None) -> str:
    """How a process ended, for people: `exit code 1`, `SIGKILL (exit code 137)`."""
    number = signal_number(code, signal)
    if number is None:
        return "still running or unknown" if code is None else f"exit code {code}"
    try:
        name = signals.Signals(number).name
    except ValueError:
        name = f"signal {number}"
    return name if code is None or code == -number else f"{name} (exit code {code})"
