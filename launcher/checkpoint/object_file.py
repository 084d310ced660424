"""Files that are written in one sequential pass and read back: all that an object mount is good for.

A mount may go on with the upload after close (JindoFuse completes a file when it is released, of which close does not
wait), and answers for a minute what it knew before. So a file is there when its content has come back.
"""

from __future__ import annotations

import errno
import os
import secrets
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import xxhash

from launcher.checkpoint.manifest import FileRecord, hash_file

Chunk = bytes | bytearray | memoryview

VISIBLE_WITHIN_S = 120.0
_LOOK_EVERY_S = (0.01, 2.0)  # from, to
_NO_FSYNC = frozenset({errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM, errno.EBADF})
_NOT_YET = frozenset({errno.ENOENT, errno.EIO, errno.ESTALE, errno.EAGAIN, errno.EBUSY})


class DamagedSource(RuntimeError):  # noqa: N818 - what it is about, not where it was noticed
    """What was to be put is not what was announced; nothing of it is left under its name."""


def put_object(path: Path, chunks: Iterable[Chunk], expected: FileRecord | None = None) -> FileRecord:
    """`path` gets this content, whole on return. Not for a file whose old content must survive a kill.

    Raises DamagedSource, and OSError where the storage fails or something else comes back (EIO).
    """
    path.unlink(missing_ok=True)  # O_TRUNC of a file that is there is a truncation, which some mounts refuse
    record = write_once_through(path, chunks, expected, sync=False)
    _read_back(path, record)
    return record


def replace_object(path: Path, data: bytes) -> None:
    """`path` has the old content or the new one at any time: a server copies one object as a whole. Raises OSError."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        put_object(temporary, [data])  # complete before it gets another name
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_once_through(path: Path, chunks: Iterable[Chunk], expected: FileRecord | None, *, sync: bool) -> FileRecord:
    """In one pass. `sync`: fsync must be possible. Errors of an upload come with close, which is why nothing here
    closes silently. Raises DamagedSource and OSError; then nothing is left under the name."""
    digest = xxhash.xxh3_128()
    size_bytes = 0
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
    try:
        for chunk in chunks:
            digest.update(chunk)
            size_bytes += _write_all(fd, chunk)
        _sync(fd, required=sync)
    except BaseException:
        os.close(fd)
        path.unlink(missing_ok=True)
        raise
    os.close(fd)
    record = FileRecord(size_bytes, digest.hexdigest())
    if expected is not None and record != expected:
        path.unlink(missing_ok=True)
        raise DamagedSource(
            f"{path.name}: {size_bytes} bytes with XXH3 {record.xxh3_128} were to be written, announced were "
            f"{expected.size_bytes} bytes with {expected.xxh3_128}"
        )
    return record


def chunks_of(path: Path, chunk_bytes: int = 1 << 22) -> Iterator[bytes]:
    with path.open("rb", buffering=0) as stream:
        while block := stream.read(chunk_bytes):
            yield block


def read_when_there(path: Path, within_s: float = 5.0) -> str:
    """For a file that was written a moment ago. Raises OSError."""
    for _ in looks(within_s):
        with suppress(FileNotFoundError):
            return path.read_text("utf-8")
    return path.read_text("utf-8")


def looks(within_s: float | None = None) -> Iterator[None]:
    """At once, then again and again, ever more rarely, until `within_s` (`VISIBLE_WITHIN_S`) have passed."""
    deadline = time.monotonic() + (VISIBLE_WITHIN_S if within_s is None else within_s)
    pause_s, longest_s = _LOOK_EVERY_S
    yield
    while time.monotonic() < deadline:
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, longest_s)
        yield


def _write_all(fd: int, chunk: Chunk) -> int:
    view = memoryview(chunk).cast("B")
    num_bytes = len(view)
    while view:
        view = view[os.write(fd, view) :]
    return num_bytes


def _sync(fd: int, *, required: bool) -> None:
    """Object mounts know fsync for some files only, or not at all: there reading back counts."""
    try:
        os.fsync(fd)
    except OSError as error:
        if required or error.errno not in _NO_FSYNC:
            raise


def _read_back(path: Path, record: FileRecord) -> None:
    found: FileRecord | None = None
    trouble = "nothing"
    for _ in looks():
        try:
            found = hash_file(path, fresh=True)
        except OSError as error:
            if error.errno not in _NOT_YET:
                raise
            found, trouble = None, str(error)
        if found == record:
            return
    there = f"{found.size_bytes} bytes with XXH3 {found.xxh3_128}" if found else trouble
    raise OSError(
        errno.EIO,
        f"{path}: {there} came back within {VISIBLE_WITHIN_S:.0f} s, written were {record.size_bytes} bytes with "
        f"{record.xxh3_128}",
    )
