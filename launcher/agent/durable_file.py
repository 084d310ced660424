"""Small files that other machines rely on: whole or not there, and durable before the call returns.

`replace_file` for one writer, `write_once` for many, of whom exactly one has its way.
"""

from __future__ import annotations

import errno
import os
import secrets
from pathlib import Path

_NO_HARD_LINKS = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK})
_NO_FSYNC_OF_FOLDERS = frozenset({errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS, errno.EBADF})


def replace_file(path: Path, data: bytes) -> None:
    """`path` gets the content `data`; whoever is last has his way. Raises OSError."""
    temporary = _temporary(path)
    try:
        _write_durably(temporary, data, 0o644)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    fsync_folder(path.parent)


def write_once(path: Path, data: bytes, *, writer: str, mode: int = 0o644) -> bytes:
    """`path` gets the content `data` unless it has one already; returns the one it has, which never changes again.

    The link to the final name decides: it fails where there is a file, and what it names is whole. Where the file
    system has no hard links, exclusive creation of `<name>.taken` decides: a writer that dies right after it leaves
    the name taken, which only a writer of the same name (`writer`) may end. Others get an OSError that says so.
    """
    try:
        there = path.read_bytes()
    except FileNotFoundError:
        temporary = _temporary(path)
        try:
            _write_durably(temporary, data, mode)
            _give_name(temporary, path, writer)
        finally:
            temporary.unlink(missing_ok=True)
        there = path.read_bytes()
    fsync_folder(path.parent)  # also when somebody else wrote it: it may not have come so far
    return there


def fsync_folder(path: Path) -> None:
    """The names in it become durable. Object mounts know no fsync of folders: nothing better can be done there."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in _NO_FSYNC_OF_FOLDERS:
            raise
    finally:
        os.close(fd)


def _temporary(path: Path) -> Path:
    return path.with_name(f".{path.name}.{secrets.token_hex(8)}")


def _give_name(temporary: Path, path: Path, writer: str) -> None:
    try:
        os.link(temporary, path)
    except FileExistsError:
        pass
    except OSError as error:
        if error.errno not in _NO_HARD_LINKS:
            raise
        _give_name_without_links(temporary, path, writer)


def _give_name_without_links(temporary: Path, path: Path, writer: str) -> None:
    taken = path.with_name(f"{path.name}.taken")
    try:
        fd = os.open(taken, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    except FileExistsError:
        if path.exists():
            return
        first = taken.read_text("utf-8", "replace")
        if first != writer:
            raise OSError(
                errno.EBUSY,
                f"{path} is being written by {first or 'somebody unknown'}; if that node is lost for good, "
                f"remove {taken}",
            ) from None
    else:
        try:
            os.write(fd, writer.encode())
        except OSError:
            taken.unlink()
            raise
        finally:
            os.close(fd)
    if not path.exists():
        temporary.rename(path)


def _write_durably(path: Path, data: bytes, mode: int) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, mode)
    with os.fdopen(fd, "wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())
