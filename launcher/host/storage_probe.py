"""Which kind of storage holds the output folder: found by the very operations that a run needs, in a private folder
that is removed again.

Operations alone do not tell everything: s3fs renames a folder, object by object, and whoever looks in the middle sees
half of it. So what is known of a type of mount counts as well. Sources:
- JindoFuse: table of operations in its guide (docs/user/en/jindofuse of github.com/aliyun/alibabacloud-jindodata)
- ossfs: "limitations" in the FAQ of github.com/aliyun/ossfs; help.aliyun.com/en/oss/developer-reference/ossfs-2-0
- s3fs: "limitations" in the README of github.com/s3fs-fuse/s3fs-fuse
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from launcher.host.bounded import within
from launcher.host.storage import Mount, StorageKind, nearest_existing

PROBE_WITHIN_S = 30.0  # an object mount answers some twenty requests in about a second; a dead one never
VISIBLE_WITHIN_S = 5.0
PROBE_PREFIX = ".ftlaunch-probe-"

# Names of types of mounts without `fuse.`, all without atomic rename of folders.
_OBJECT_MOUNTS = frozenset(
    {"s3fs", "ossfs", "ossfs2", "cosfs", "obsfs", "bosfs", "tosfs", "goofys", "geesefs", "mountpoint-s3", "gcsfuse"}
    | {"rclone", "blobfuse", "blobfuse2"}
)
# What staging and one rename are made of. A hard link is not: but no object mount has them, and other FUSE systems do.
_NEEDED_ON_POSIX = ("rename folder", "rename over", "truncate", "write in the middle", "append", "fsync file", "O_EXCL")
_NEEDED_ANYWHERE = ("create", "read back", "rename file", "rename over")


@dataclass(frozen=True)
class Failure:
    """An operation that a run may want, and what came of it."""

    operation: str
    error: str


@dataclass(frozen=True)
class StorageProbe:
    """`reasons`: why it is OBJECT, empty for POSIX. `not_tried`: why the operations could not be tried (no right to
    write, no answer); then the kind is a guess by the type of the mount."""

    kind: StorageKind
    fstype: str  # "fuse.ossfs", "ext4", ...; empty where it is not known
    reasons: tuple[str, ...] = ()
    failures: tuple[Failure, ...] = ()
    seconds: float = 0.0
    not_tried: str = ""

    @property
    def unusable(self) -> str:
        """What even a run on an object mount needs and this folder lacks, or ""."""
        lacking = [f"{f.operation} ({f.error})" for f in self.failures if f.operation in _NEEDED_ANYWHERE]
        return ", ".join(lacking)

    def can(self, operation: str) -> bool:
        return all(failure.operation != operation for failure in self.failures)


def probe_storage(output_dir: Path, mount: Mount | None, *, timeout_s: float = PROBE_WITHIN_S) -> StorageProbe:
    """Of the nearest folder that exists. Never raises for what the storage does; takes at most `timeout_s`."""
    fstype = mount.fstype if mount else ""
    began = time.monotonic()
    try:
        failures = within(timeout_s, lambda: _try_all(nearest_existing(output_dir)), "the file system of output_dir")
    except OSError as error:  # TimeoutError, too
        kind, reasons = judge(fstype, ())
        return StorageProbe(kind, fstype, reasons, seconds=_since(began), not_tried=str(error))
    kind, reasons = judge(fstype, failures)
    return StorageProbe(kind, fstype, reasons, failures, _since(began))


def judge(fstype: str, failures: Iterable[Failure]) -> tuple[StorageKind, tuple[str, ...]]:
    """The kind, and for OBJECT the reasons."""
    failed = {failure.operation: failure.error for failure in failures}
    reasons = [f"{operation}: {failed[operation]}" for operation in _NEEDED_ON_POSIX if operation in failed]
    kind, _, subtype = fstype.lower().partition(".")
    if kind == "fuse":
        if subtype in _OBJECT_MOUNTS:
            reasons.insert(0, f"{fstype} renames folders object by object")
        elif "hard link" in failed:
            reasons.append(f"hard link: {failed['hard link']}, on a FUSE file system whose renames are not known")
    return (StorageKind.OBJECT if reasons else StorageKind.POSIX), tuple(reasons)


def _since(began: float) -> float:
    return round(time.monotonic() - began, 3)


def _try_all(parent: Path) -> tuple[Failure, ...]:
    """Raises OSError where not even a folder can be made."""
    folder = parent / (PROBE_PREFIX + secrets.token_hex(6))
    folder.mkdir()
    try:
        return _try_in(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        with suppress(OSError):
            folder.rmdir()  # some mounts keep an empty folder for a moment after its last file


def _try_in(folder: Path) -> tuple[Failure, ...]:
    failures: list[Failure] = []

    def attempt(operation: str, call: Callable[[], str | None]) -> bool:
        try:
            wrong = call()
        except OSError as error:
            wrong = f"{errno.errorcode.get(error.errno or 0, 'error')} ({error.strerror})"
        if wrong:
            failures.append(Failure(operation, wrong))
        return not wrong

    if not attempt("create", lambda: _write(folder / "first", b"first")) or not attempt(
        "read back", lambda: _expect(folder / "first", b"first")
    ):
        return tuple(failures)  # nothing else can be known
    attempt("fsync file", lambda: _fsync_new(folder / "synced"))
    attempt("fsync folder", lambda: _fsync(folder, os.O_DIRECTORY))
    attempt("rename file", lambda: _rename(folder / "first", folder / "renamed"))
    attempt("rename over", lambda: _rename_over(folder))
    attempt("rename folder", lambda: _rename_folder(folder))
    attempt("write anew", lambda: _make(folder / "synced", b"anew"))
    attempt("append", lambda: _change(folder / "append", os.O_APPEND, lambda fd: os.write(fd, b"!"), b"0123456789!"))
    attempt(
        "write in the middle", lambda: _change(folder / "middle", 0, lambda fd: os.pwrite(fd, b"!", 4), b"0123!56789")
    )
    attempt("truncate", lambda: _change(folder / "short", 0, lambda fd: os.ftruncate(fd, 4), b"0123"))
    attempt("O_EXCL", lambda: _exclusive(folder / "exclusive"))
    attempt("hard link", lambda: os.link(folder / "exclusive", folder / "linked"))
    attempt("flock", lambda: _lock(folder / "exclusive", lambda fd: fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)))
    attempt(
        "fcntl lock", lambda: _lock(folder / "exclusive", lambda fd: fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB))
    )
    return tuple(failures)


def _write(path: Path, data: bytes) -> None:
    path.write_bytes(data)


def _make(path: Path, data: bytes) -> None:
    """Returns when the file is complete, which on some mounts is a moment after close."""
    path.write_bytes(data)
    if wrong := _expect(path, data):
        raise OSError(errno.EIO, wrong)


def _expect(path: Path, data: bytes) -> str | None:
    """What is there instead."""
    deadline = time.monotonic() + VISIBLE_WITHIN_S
    while True:
        try:
            found = path.read_bytes()
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.EIO):
                raise
            found = b""
        if found == data:
            return None
        if time.monotonic() >= deadline:
            return f"{len(found)} bytes came back, not what was written"
        time.sleep(0.01)


def _fsync_new(path: Path) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        os.write(fd, b"synced")
        os.fsync(fd)
    finally:
        os.close(fd)


def _fsync(path: Path, flags: int) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | flags)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _rename(path: Path, target: Path) -> str | None:
    path.rename(target)
    return "the old name is still there" if path.exists() else _expect(target, b"first")


def _rename_over(folder: Path) -> str | None:
    _make(folder / "new", b"new")
    _make(folder / "old", b"old")
    (folder / "new").replace(folder / "old")
    return _expect(folder / "old", b"new")


def _rename_folder(folder: Path) -> str | None:
    (folder / "from").mkdir()
    _make(folder / "from" / "file", b"inside")
    (folder / "from").rename(folder / "to")
    return _expect(folder / "to" / "file", b"inside")


def _change(path: Path, flags: int, change: Callable[[int], object], wanted: bytes) -> str | None:
    _make(path, b"0123456789")
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC | flags)
    try:
        change(fd)
    finally:
        os.close(fd)
    return _expect(path, wanted)


def _exclusive(path: Path) -> str | None:
    for expected in (True, False):
        try:
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644))
        except FileExistsError:
            if expected:
                raise
            return None
    return "a file that was there was created a second time"


def _lock(path: Path, take: Callable[[int], object]) -> None:
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        take(fd)
    finally:
        os.close(fd)
