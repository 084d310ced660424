"""Folders on object mounts that have the name of a checkpoint and are none: files are put under their final name there,
and no folder can be renamed for certain.

Invariant: a folder without MANIFEST.json in which one of these two files lies is nobody's checkpoint. It is never
listed, judged or resumed from.
"""

from __future__ import annotations

import json
from pathlib import Path

from launcher.checkpoint.manifest import MANIFEST_NAME

UNFINISHED_NAME = "ftlaunch-unfinished.json"  # being written, or its writer has died; removed after MANIFEST.json
REJECTED_NAME = "ftlaunch-rejected.json"  # was not whole when a start looked at it; its manifest is in this file


def is_set_apart(folder: Path) -> bool:
    if (folder / MANIFEST_NAME).exists():
        return False
    return (folder / UNFINISHED_NAME).exists() or (folder / REJECTED_NAME).exists()


def is_unfinished(folder: Path) -> bool:
    """Begun here and never finished: nothing of it was ever worth anything."""
    if (folder / MANIFEST_NAME).exists() or (folder / REJECTED_NAME).exists():
        return False
    return (folder / UNFINISHED_NAME).exists()


def is_rejected(folder: Path) -> bool:
    return not (folder / MANIFEST_NAME).exists() and (folder / REJECTED_NAME).exists()


def set_apart(folder: Path, reason: str) -> None:
    """In place of a rename: the folder keeps name and files, and is a checkpoint no more. A kill in between leaves it
    as it was. One whose writer died over MANIFEST.json or before the first file is only unfinished. Raises OSError."""
    marker = folder / MANIFEST_NAME
    if (folder / UNFINISHED_NAME).exists():
        marker.unlink(missing_ok=True)
        return
    if not any(folder.iterdir()):
        (folder / UNFINISHED_NAME).write_text("{}", "utf-8")
        return
    try:
        manifest = marker.read_text("utf-8", "replace")
    except FileNotFoundError:
        manifest = ""
    text = json.dumps({"v": 1, "reason": reason, "manifest": manifest}, ensure_ascii=False)
    (folder / REJECTED_NAME).write_text(text, "utf-8")
    marker.unlink(missing_ok=True)
