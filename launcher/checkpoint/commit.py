"""Commit of a staged checkpoint: fsync everything, manifest last, one rename, fsync of the parent.

Invariant: under its final name a checkpoint is either whole or not there at all; a kill at any moment leaves at most a
staging folder, which the next start removes.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from launcher.checkpoint.choose import set_aside
from launcher.checkpoint.manifest import Manifest, fsync_path, iter_files, write_manifest
from launcher.checkpoint.verify import list_checkpoints, verify_checkpoint

STAGING_NAME = "ftlaunch/staging"


@dataclass(frozen=True)
class Committed:
    path: Path
    total_bytes: int


def staging_root(output_dir: Path) -> Path:
    """Where checkpoints are written before they are committed: on the same file system, so that rename is one
    operation."""
    return output_dir / STAGING_NAME


def clear_staging(output_dir: Path) -> None:
    """Remove what an earlier attempt left half-written. Only ever called while no rank runs."""
    shutil.rmtree(staging_root(output_dir), ignore_errors=True)


def commit_folder(staged: Path, final: Path, manifest: Manifest, *, replace: bool = False) -> Committed:
    """Make `staged` durable and give it its final name.

    A folder that already has that name is set aside first, or replaced with `replace` once the new one is durable.
    """
    for name in iter_files(staged):
        fsync_path(staged / name)
    for folder in [path for path in staged.rglob("*") if path.is_dir()]:
        fsync_path(folder)  # the names in it
    write_manifest(staged, manifest)
    replaced: Path | None = None
    if final.exists() and replace:
        replaced = staged.with_name(f"replaced-{final.name}")
        final.rename(replaced)
    elif final.exists():
        set_aside(final)
    staged.rename(final)
    fsync_path(final.parent)
    if replaced is not None:
        shutil.rmtree(replaced, ignore_errors=True)
    return Committed(final, manifest.total_bytes)


def prune(output_dir: Path, keep: int) -> list[Path]:
    """Delete whole checkpoints beyond the newest `keep` whole ones; returns what was deleted.

    Sizes are compared, not hashes: they were hashed when they were written, and pruning runs beside the training.
    """
    whole = [path for step, path in list_checkpoints(output_dir) if verify_checkpoint(path, step, hashes=False).whole]
    surplus = whole[keep:]
    for path in surplus:
        # Renamed first, so that a kill in the middle leaves no folder that looks like a checkpoint.
        doomed = staging_root(output_dir) / f"pruned-{path.name}"
        doomed.parent.mkdir(parents=True, exist_ok=True)
        path.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)
    return surplus
