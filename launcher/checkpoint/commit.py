"""Commit of a staged checkpoint: fsync everything, manifest last, one rename, fsync of the parent.

Invariants: under its final name a checkpoint is either whole or not there at all; a kill at any moment leaves at most a
staging folder, which a later generation removes. Every generation stages in a folder of its own, so that a node that
has been cut off and still writes can neither mix its files with those of the next generation nor commit them.
"""

from __future__ import annotations

import re
import secrets
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from launcher.checkpoint.choose import set_aside
from launcher.checkpoint.manifest import Manifest, fsync_path, iter_files, write_manifest
from launcher.checkpoint.verify import list_checkpoints, verify_checkpoint

STAGING_NAME = "ftlaunch/staging"
_GENERATION = re.compile(r"^gen-(\d+)$")


@dataclass(frozen=True)
class Committed:
    path: Path
    total_bytes: int


def staging_root(output_dir: Path, generation: int) -> Path:
    """Where this generation's checkpoints are written before they are committed: on the same file system, so that
    rename is one operation."""
    return output_dir / STAGING_NAME / f"gen-{generation}"


def clear_staging(output_dir: Path, below: int) -> None:
    """Remove what generations lower than `below` have left half-written, and what is of no generation (a removal that
    was cut short, a version that staged without).

    A rank of a lower generation may still be writing there (its node was cut off): its folder loses its name at once,
    so that the rank's commit fails, and is deleted under another.
    """
    folder = output_dir / STAGING_NAME
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        generation = _GENERATION.match(path.name)
        if generation is None:
            _remove(path)
        elif int(generation.group(1)) < below:
            doomed = path.with_name(f"cleared-{secrets.token_hex(4)}-{path.name}")
            try:
                path.rename(doomed)
            except FileNotFoundError:
                continue  # another node was faster
            _remove(doomed)


def commit_folder(
    staged: Path,
    final: Path,
    manifest: Manifest,
    *,
    replace: bool = False,
    may_commit: Callable[[], None] = lambda: None,
) -> Committed:
    """Make `staged` durable and give it its final name.

    A folder that already has that name is set aside first, or replaced with `replace` once the new one is durable.
    `may_commit` is called as late as possible, before any name is changed, and raises where this generation is over.
    """
    for name in iter_files(staged):
        fsync_path(staged / name)
    for folder in [path for path in staged.rglob("*") if path.is_dir()]:
        fsync_path(folder)  # the names in it
    write_manifest(staged, manifest)
    may_commit()
    replaced: Path | None = None
    if final.exists() and replace:
        replaced = staged.with_name(f"replaced-{final.name}")
        final.rename(replaced)
    elif final.exists():
        set_aside(final)
    staged.rename(final)
    fsync_path(final.parent)
    if replaced is not None:
        _remove(replaced)
    return Committed(final, manifest.total_bytes)


def prune(output_dir: Path, keep: int, generation: int) -> list[Path]:
    """Delete whole checkpoints beyond the newest `keep` whole ones; returns what was deleted.

    Sizes are compared, not hashes: they were hashed when they were written, and pruning runs beside the training.
    """
    whole = [path for step, path in list_checkpoints(output_dir) if verify_checkpoint(path, step, hashes=False).whole]
    surplus = whole[keep:]
    for path in surplus:
        # Renamed first, so that a kill in the middle leaves no folder that looks like a checkpoint.
        doomed = staging_root(output_dir, generation) / f"pruned-{path.name}"
        doomed.parent.mkdir(parents=True, exist_ok=True)
        path.rename(doomed)
        _remove(doomed)
    return surplus


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
