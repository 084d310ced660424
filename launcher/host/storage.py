"""`/dev/shm`, and the file system that holds the output folder. Nothing is written here (`storage_probe.py` does)."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from launcher.host.bounded import within

ROOT = Path("/")
ANSWER_WITHIN_S = 10.0  # a dead NFS server answers never


class StorageKind(str, Enum):
    """How files get their names there. OBJECT: no atomic rename of folders, files are written in one pass."""

    POSIX = "posix"
    OBJECT = "object"


@dataclass(frozen=True)
class Shm:
    path: str
    size_bytes: int
    free_bytes: int


@dataclass(frozen=True)
class Disk:
    """The nearest existing folder at or above the output folder. Sizes are None where the file system did not say."""

    path: str
    total_bytes: int | None
    free_bytes: int | None
    free_inodes: int | None  # None also on file systems that do not count them (object stores, btrfs)
    writable: str  # "ok", or why not


@dataclass(frozen=True)
class Mount:
    path: str
    fstype: str
    source: str
    options: str


def read_shm(path: Path = Path("/dev/shm")) -> Shm | None:
    """None where there is no such folder."""
    try:
        stat = os.statvfs(path)
    except OSError:
        return None
    return Shm(str(path), stat.f_blocks * stat.f_frsize, stat.f_bavail * stat.f_frsize)


def nearest_existing(folder: Path) -> Path:
    """The folder itself, or the first above it that is there."""
    return next(path for path in (folder, *folder.parents) if path.exists())


def read_disk(output_dir: Path, timeout_s: float = ANSWER_WITHIN_S) -> Disk:
    try:
        return within(timeout_s, lambda: _read_disk(output_dir), f"the file system of {output_dir}")
    except OSError as error:
        return Disk(str(output_dir), None, None, None, str(error))


def find_mount(path: Path, root: Path = ROOT) -> Mount | None:
    """The mount that holds `path` (absolute, need not exist), from `/proc/self/mounts`, whose last match is on top."""
    try:
        lines = (root / "proc/self/mounts").read_text(errors="surrogateescape").splitlines()
    except OSError:
        return None
    best: Mount | None = None
    for line in lines:
        fields = line.split(" ")
        if len(fields) < 4:
            continue
        mount = Mount(_unescape(fields[1]), fields[2], _unescape(fields[0]), fields[3])
        if path.is_relative_to(mount.path) and (best is None or len(mount.path) >= len(best.path)):
            best = mount
    return best


# Known to ask the server for flock. Others may: then a warning is one too many, and nothing is lost.
_FUSE_WITH_SHARED_LOCKS = frozenset({"fuse.juicefs", "fuse.glusterfs", "fuse.ceph", "fuse.ceph-fuse"})
_LOCAL_LOCK_OPTIONS = frozenset({"nolock", "local_lock=all", "local_lock=flock", "localflock", "noflock", "nobrl"})
_LOCKS_OF_ONE_MACHINE = frozenset({"9p", "virtiofs", "beegfs", "fuse"})  # by default, or all that is known


def why_locks_stay_here(mount: Mount | None) -> str:
    """Why a flock on this mount may be unknown to other machines that have it mounted; "" where they know of it.

    A file system on a disk of this machine is not seen by others at all: "".
    """
    if mount is None:
        return ""
    fstype = mount.fstype.lower()
    if fstype in _LOCKS_OF_ONE_MACHINE or (fstype.startswith("fuse.") and fstype not in _FUSE_WITH_SHARED_LOCKS):
        return f"{mount.fstype} at {mount.path}"
    local = sorted(_LOCAL_LOCK_OPTIONS & set(mount.options.split(",")))
    return f"{mount.fstype} at {mount.path} with {', '.join(local)}" if local else ""


def _read_disk(output_dir: Path) -> Disk:
    folder = nearest_existing(output_dir)
    stat = os.statvfs(folder)
    return Disk(
        path=str(folder),
        total_bytes=stat.f_blocks * stat.f_frsize or None,  # some FUSE file systems say 0 and mean "no idea"
        free_bytes=stat.f_bavail * stat.f_frsize if stat.f_blocks else None,
        free_inodes=stat.f_favail if stat.f_files else None,
        writable=_why_not_writable(folder, read_only=bool(stat.f_flag & os.ST_RDONLY)),
    )


def _why_not_writable(folder: Path, *, read_only: bool) -> str:
    if not folder.is_dir():
        return f"{folder} is a file, not a folder"
    if read_only:
        return f"the file system of {folder} is mounted read-only"
    if not os.access(folder, os.W_OK | os.X_OK):
        return f"user id {os.geteuid()} may not write in {folder}"
    return "ok"


def _unescape(text: str) -> str:
    r"""Undo the octal escapes of /proc/mounts: a space is written `\040`."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match.group(1), 8)), text)
