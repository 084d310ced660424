"""What killed programs of this user have left in /dev/shm."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# torch (DataLoader workers), NCCL, Python's shared_memory, DeepSpeed's all-reduce on CPUs.
KNOWN_NAMES = re.compile(r"torch_\d+_|nccl-|psm_|deepspeed_|cuda\.shm\.")
YOUNG_S = 60.0  # one that was made just now may be mapped in a moment


@dataclass(frozen=True)
class Segment:
    name: str
    size_bytes: int


def find_stale(
    folder: Path = Path("/dev/shm"), proc: Path = Path("/proc"), now_s: float | None = None
) -> tuple[Segment, ...]:
    """Segments of this user with the name of a known library that no visible process holds. Largest first."""
    now_s = time.time() if now_s is None else now_s
    found = list(_candidates(folder, now_s))
    if not found:
        return ()
    held = set(_held(proc, str(folder)))
    stale = [segment for segment in found if segment.name not in held]
    return tuple(sorted(stale, key=lambda segment: -segment.size_bytes))


def _candidates(folder: Path, now_s: float) -> Iterator[Segment]:
    try:
        entries = list(os.scandir(folder))
    except OSError:
        return
    for entry in entries:
        try:
            stat = entry.stat(follow_symlinks=False)
        except OSError:
            continue
        if KNOWN_NAMES.match(entry.name) and stat.st_uid == os.geteuid() and now_s - stat.st_mtime > YOUNG_S:
            yield Segment(entry.name, stat.st_blocks * 512)


def _held(proc: Path, folder: str) -> Iterator[str]:
    """Names that are mapped or open in any process that can be looked into."""
    for process in proc.iterdir():
        if not process.name.isdigit():
            continue
        try:
            maps = (process / "maps").read_text("utf-8", "replace")
        except OSError:
            continue
        yield from re.findall(rf"{re.escape(folder)}/([^\s/]+)", maps)
        try:
            descriptors = list((process / "fd").iterdir())
        except OSError:
            continue
        for descriptor in descriptors:
            try:
                target = os.readlink(descriptor)
            except OSError:
                continue
            if target.startswith(f"{folder}/"):
                yield target.removeprefix(f"{folder}/").removesuffix(" (deleted)")
