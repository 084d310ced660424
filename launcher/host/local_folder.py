"""A folder of this node alone that belongs to an output folder: what an object mount cannot hold is written there."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from pathlib import Path

SCRATCH_VARIABLE = "FTLAUNCH_SCRATCH"
RANK_PREFIX = "of-a-rank-"  # of names that ranks make there


def local_folder(output_dir: Path) -> Path:
    """Below TMPDIR (/tmp); the same at each start, so that nothing piles up.

    Made private to this user, and refused where somebody else was first (PermissionError): the name can be guessed, and
    checkpoints pass through it.
    """
    digest = hashlib.sha256(os.fsencode(os.path.realpath(output_dir))).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"ftlaunch-{os.geteuid()}" / digest
    for private in (folder.parent, folder):
        private.mkdir(mode=0o700, parents=True, exist_ok=True)
        if private.is_symlink() or private.lstat().st_uid != os.geteuid():
            raise PermissionError(f"{private} belongs to somebody else: remove it, or set TMPDIR to another folder")
    return folder


class Scratch:
    """Of one agent and its ranks, for what is needed for a moment. Who is killed leaves something there; so it is
    cleared when ranks are gone, and what a killed agent has left is cleared by its next start."""

    def __init__(self, output_dir: Path, node: str) -> None:
        self.path = local_folder(output_dir) / f"scratch-{node}"
        shutil.rmtree(self.path, ignore_errors=True)
        self.path.mkdir(mode=0o700)

    def clear_after_ranks(self) -> None:
        for left in self.path.glob(f"{RANK_PREFIX}*"):
            shutil.rmtree(left, ignore_errors=True)

    def close(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        for folder in (self.path.parent, self.path.parent.parent):
            try:
                folder.rmdir()
            except OSError:  # somebody else uses it
                return
