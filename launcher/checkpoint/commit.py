"""Commit of a staged checkpoint: fsync everything, manifest last, one rename, fsync of the parent.

Invariants: under its final name a checkpoint is either whole or not there at all; a kill at any moment leaves at most a
staging folder, which a later generation removes. Every generation stages in a folder of its own, so that a node that
has been cut off and still writes can neither mix its files with those of the next generation nor commit them.

A folder that has the final name already is moved INTO the staged one first. That fails where the staged one has been
cleared away: a rank of a lost generation that wakes up after it was allowed to commit takes nothing from the next one.
What a kill leaves in there (`DISPLACED_NAME`) is given back, or set aside, when a later generation clears the staging.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from launcher.checkpoint.choose import set_aside
from launcher.checkpoint.manifest import Manifest, fsync_path, iter_files, write_manifest
from launcher.checkpoint.verify import list_checkpoints, verify_checkpoint

STAGING_NAME = "ftlaunch/staging"
DISPLACED_NAME = ".displaced"
FENCE_NAME = "writing"  # on object mounts, see publish.py: while it is there its generation may write
FINAL_NAME = "final"
_GENERATION = re.compile(r"^gen-(\d+)$")
_GENERATION_CLEARED = re.compile(r"^cleared-[0-9a-f]+-gen-(\d+)$")
_COMMITTED = re.compile(rf"^(checkpoint-\d+|{FINAL_NAME})$")


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
            _remove_staged(path, output_dir)
        elif int(generation.group(1)) < below:
            if (path / FENCE_NAME).exists():  # all there is of a generation on an object mount
                (path / FENCE_NAME).unlink(missing_ok=True)
                remove_tree(path)
                continue
            doomed = path.with_name(f"cleared-{secrets.token_hex(4)}-{path.name}")
            try:
                path.rename(doomed)
            except FileNotFoundError:
                continue  # another node was faster
            _remove_staged(doomed, output_dir)
    for committed in [path for _, path in list_checkpoints(output_dir)] + [output_dir / FINAL_NAME]:
        _clear_displaced(committed)


def highest_staged(output_dir: Path) -> int:
    """The highest number of a generation that has staged, and of which anything is left; 0 where none is."""
    folder = output_dir / STAGING_NAME
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    found = [_GENERATION.match(name) or _GENERATION_CLEARED.match(name) for name in names]
    return max((int(match[1]) for match in found if match), default=0)


def commit_folder(
    staged: Path,
    final: Path,
    manifest: Manifest,
    *,
    replace: bool = False,
    may_commit: Callable[[], None] = lambda: None,
) -> Committed:
    """Make `staged` durable and give it its final name.

    A folder that already has that name is set aside, or with `replace` removed once the new one is durable.
    `may_commit` is called as late as possible, before any name is changed, and raises where this generation is over.
    Raises FileNotFoundError where `staged` has been cleared away; what has the final name keeps it.
    """
    for name in iter_files(staged):
        fsync_path(staged / name)
    for folder in [path for path in staged.rglob("*") if path.is_dir()]:
        fsync_path(folder)  # the names in it
    write_manifest(staged, manifest)
    may_commit()
    if os.path.lexists(final):  # a link to nothing has the name as well
        _displace(final, staged / DISPLACED_NAME)
    try:
        staged.rename(final)
    except OSError:
        _give_back(staged / DISPLACED_NAME, final)
        raise
    fsync_path(final.parent)
    _clear_displaced(final, replace=replace)
    return Committed(final, manifest.total_bytes)


def prune(output_dir: Path, keep: int, generation: int) -> list[Path]:
    """Delete whole checkpoints beyond the newest `keep` whole ones; returns what was deleted.

    Sizes are compared, not hashes: they were hashed when they were written, and pruning runs beside the training.
    Nothing more is deleted once the generation's staging folder, in which it has committed, is cleared away: the
    generation is over, and the next one may have found the newer ones damaged.
    """
    whole = [path for step, path in list_checkpoints(output_dir) if verify_checkpoint(path, step, hashes=False).whole]
    deleted: list[Path] = []
    for path in whole[keep:]:
        # Renamed first, so that a kill in the middle leaves no folder that looks like a checkpoint.
        doomed = staging_root(output_dir, generation) / f"pruned-{path.name}"
        try:
            path.rename(doomed)
        except FileNotFoundError:
            continue
        remove_tree(doomed)
        deleted.append(path)
    return deleted


def _displace(final: Path, displaced: Path) -> None:
    try:
        final.rename(displaced)
    except FileNotFoundError:
        if displaced.parent.is_dir():
            return  # `final` itself has gone in this moment: the name is free
        raise


def _give_back(displaced: Path, final: Path) -> None:
    """`final` gets its name again, or is kept beside the one that has it by now. Others may be doing the same."""
    try:
        try:
            if not final.exists():
                displaced.rename(final)
                return
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        set_aside(displaced, like=final)
    except FileNotFoundError:
        pass  # there is none, or another process was faster


def _clear_displaced(committed: Path, *, replace: bool | None = None) -> None:
    """Move what had the name before out of the folder that has it now, or remove it. Unless `replace` is given: as
    the one that was killed meant to (only final/ is ever replaced)."""
    displaced = committed / DISPLACED_NAME
    if not os.path.lexists(displaced):
        return
    if replace if replace is not None else committed.name == FINAL_NAME:
        remove_tree(displaced)
        return
    with suppress(FileNotFoundError):  # another process was faster
        set_aside(displaced, like=committed)


def _remove_staged(path: Path, output_dir: Path) -> None:
    """`path`: the folder of a generation. What was moved there, by a commit that did not come to its end, is kept."""
    for displaced in path.glob(f"*/{DISPLACED_NAME}"):
        if _COMMITTED.match(displaced.parent.name):
            _give_back(displaced, output_dir / displaced.parent.name)
    remove_tree(path)


def remove_tree(path: Path) -> None:
    """As far as that goes."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
