"""A folder of this node alone that belongs to an output folder: what an object mount cannot hold is written there."""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path


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
