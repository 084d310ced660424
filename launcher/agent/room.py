"""A disk that is full: what is free, what a checkpoint takes, and room for the incident's bundle.

What an attempt has left half-written is of no use to anybody once its ranks are gone, and it is what fills the disk.
"""

from __future__ import annotations

import os
from pathlib import Path

from launcher.checkpoint.commit import clear_staging
from launcher.checkpoint.verify import list_checkpoints, verify_checkpoint
from launcher.preflight.finding import show_bytes


def make_room(output_dir: Path, generation: int) -> str:
    """Remove the unfinished checkpoints of `generation`, whose ranks must be gone, and of earlier ones; says how much
    was and is free, and how much a checkpoint takes. Never raises for a disk that does not answer."""
    try:
        before = os.statvfs(output_dir)
        clear_staging(output_dir, below=generation + 1)
        after = os.statvfs(output_dir)
        taken = _newest_bytes(output_dir)
    except OSError as error:
        return f"{output_dir}: {error}"
    free_bytes, total_bytes = before.f_bavail * before.f_frsize, before.f_blocks * before.f_frsize
    words = f"{output_dir}: {show_bytes(free_bytes)} of {show_bytes(total_bytes)} were free"
    if before.f_files and not before.f_favail:
        words += " and no inode (`df -i`)"
    words += f"; {show_bytes(after.f_bavail * after.f_frsize)} are, without the unfinished checkpoint"
    return words + (f"; a checkpoint takes {show_bytes(taken)}" if taken else "")


def _newest_bytes(output_dir: Path) -> int:
    manifests = (verify_checkpoint(path, step, hashes=False).manifest for step, path in list_checkpoints(output_dir))
    return next((manifest.total_bytes for manifest in manifests if manifest is not None), 0)
