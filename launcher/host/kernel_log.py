"""The kernel's messages: `/dev/kmsg` where it may be read, else `dmesg`, else nothing."""

from __future__ import annotations

import os
import re
import subprocess
import time
from pathlib import Path

KMSG = Path("/dev/kmsg")
_DMESG_WAIT_S = 5.0
_RECORD_BYTES = 8192  # the kernel gives one whole record a read
_MAX_RECORDS = 200_000


def read_kernel_lines(since_s: float | None = None, max_lines: int = 2000, kmsg: Path = KMSG) -> tuple[str, ...]:
    """Messages not older than `since_s` (Unix time), as `dmesg` writes them: `[seconds since boot] text`."""
    lines = read_kmsg(kmsg)
    if lines is None:
        lines = _dmesg()
    if since_s is not None:
        lines = lines_since(lines, since_s - (time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)))
    return tuple(lines[-max_lines:])


def read_kmsg(kmsg: Path = KMSG) -> list[str] | None:
    """None where it may not be read (most containers)."""
    try:
        fd = os.open(kmsg, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    lines: list[str] = []
    try:
        for _ in range(_MAX_RECORDS):
            try:
                record = os.read(fd, _RECORD_BYTES)
            except BrokenPipeError:  # this record was overwritten while we read; the next one is the oldest there is
                continue
            if not record:
                break
            lines += parse_record(record.decode("utf-8", errors="replace"))
    except OSError:  # BlockingIOError: that was the last one; others: no more than this
        pass
    finally:
        os.close(fd)
    return lines


def parse_record(record: str) -> list[str]:
    """`priority,sequence,microseconds,flags;text`, then lines of properties that begin with a blank."""
    fields, semicolon, text = record.partition(";")
    numbers = fields.split(",")
    if not semicolon or len(numbers) < 3 or not numbers[2].isdigit():
        return []
    own = [line for line in text.split("\n") if line and not line.startswith(" ")]
    return [f"[{int(numbers[2]) / 1e6:12.6f}] {line}" for line in own]


def _dmesg() -> list[str]:
    try:
        done = subprocess.run(["dmesg"], capture_output=True, timeout=_DMESG_WAIT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return done.stdout.decode("utf-8", errors="replace").splitlines()


def lines_since(lines: list[str], uptime_s: float) -> list[str]:
    """The lines stamped `[seconds since boot]` at or after `uptime_s`; an unstamped line goes with the one before."""
    kept, inside = [], False
    for line in lines:
        if stamp := re.match(r"(?:<\d+>)?\[\s*(\d+\.\d+)\]", line):
            inside = float(stamp[1]) >= uptime_s
        if inside:
            kept.append(line)
    return kept
