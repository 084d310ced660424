"""How fast output_dir takes and gives large files: a private file, written, made durable, read back and removed."""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from dataclasses import dataclass
from pathlib import Path

from launcher.host.bounded import within
from launcher.host.storage import nearest_existing

BLOCK_BYTES = 4 << 20
BUDGET_S = 0.4  # of writing; what is buffered is made durable after that
MOST_BYTES = 256 << 20
ANSWER_WITHIN_S = 10.0
LEAST_FREE_BYTES = 4 * MOST_BYTES
PREFIX = ".ftlaunch-speed-"


@dataclass(frozen=True)
class DiskSpeed:
    """Bytes a second. `read` is None where the pages could not be taken out of memory first."""

    written_bytes: int
    write_bytes_per_s: float
    read_bytes_per_s: float | None


def measure_disk(output_dir: Path, *, most_bytes: int = MOST_BYTES, budget_s: float = BUDGET_S) -> DiskSpeed | None:
    """None where it cannot be written, has little room, or does not answer. `most_bytes`: no more than what is of
    interest is written, and never more than `MOST_BYTES`."""
    most_bytes = min(most_bytes, MOST_BYTES)
    try:
        return within(
            ANSWER_WITHIN_S,
            lambda: _measure(nearest_existing(output_dir), most_bytes, budget_s),
            "writing a large file",
        )
    except OSError:
        return None


def _measure(folder: Path, most_bytes: int, budget_s: float) -> DiskSpeed | None:
    stat = os.statvfs(folder)
    if stat.f_blocks and stat.f_bavail * stat.f_frsize < LEAST_FREE_BYTES:
        return None
    path = folder / (PREFIX + secrets.token_hex(6))
    block = secrets.token_bytes(BLOCK_BYTES)  # not zeros: some storage keeps no room for them
    try:
        began, written = time.monotonic(), 0
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            while written < most_bytes and time.monotonic() - began < budget_s:
                written += os.write(fd, block)
            with contextlib.suppress(OSError):  # object mounts have none: closing is what makes it durable
                os.fsync(fd)
        finally:
            os.close(fd)
        seconds = time.monotonic() - began
        return DiskSpeed(written, written / seconds, _read(path, budget_s))
    finally:
        path.unlink(missing_ok=True)


def _read(path: Path, budget_s: float) -> float | None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        except OSError:
            return None
        began, count = time.monotonic(), 0
        while time.monotonic() - began < budget_s and (part := os.read(fd, BLOCK_BYTES)):
            count += len(part)
        return count / max(time.monotonic() - began, 1e-6)
    finally:
        os.close(fd)
