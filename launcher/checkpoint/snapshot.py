"""A slot of memory (a memfd) that holds the files of one rank's part of a checkpoint: a snapshot.

Invariants: a slot is a sealed snapshot, or it reads as nothing. Its state word is cleared before the first byte of a
new snapshot is written, and set after the last; the header has a hash of its own and holds that of the index, the
index holds those of the files. So a writer may be killed at any instruction, and a reader in another process may look
at any time. Nothing here truncates: a slot grows with the first snapshot that needs it, and its pages are used again,
since the first touch of a page costs more than twice the copy into it.

Layout, all numbers little-endian: state word (8 bytes), magic (8), version (4), unused (4), offset and size of the
index (8 each), XXH3-128 of the index (16), XXH3-128 of the header from the magic on (16). The files, each from a new
page; after them, on a page of its own, the index: JSON of identity, files and note.
"""

from __future__ import annotations

import errno
import json
import os
import struct
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import PurePosixPath
from types import TracebackType
from typing import TYPE_CHECKING, Any

import xxhash

from launcher.checkpoint.manifest import MANIFEST_NAME, FileRecord
from launcher.errors import Cancelled

if TYPE_CHECKING:
    from typing_extensions import Buffer

NUM_SLOTS = 3

_PAGE_BYTES = 4096
_STATE_BYTES = 8
_SEALED = b"SEALED\r\n"
_UNSEALED = bytes(_STATE_BYTES)
_MAGIC = b"ftl-slot"
_VERSION = 1
_HEADER = struct.Struct("<8sI4xQQ16s")  # follows the state word, and is followed by its own hash
_HASH_BYTES = 16
# What is handed over in small pieces (torch.save: names, padding, small tensors) is gathered first: every write to the
# slot gives up the GIL, and a busy training thread may keep it for 5 ms.
_GATHER_BYTES = 1 << 20
_READ_BYTES = 1 << 22
_SENDFILE_BYTES = 1 << 26
_MFD_NOEXEC_SEAL = 0x0008  # not in Python's os


@dataclass(frozen=True)
class SnapshotIdentity:
    """Whose state it is, and of when."""

    run_id: str
    config_sha: str
    generation: int
    step: int
    rank: int
    world_size: int


@dataclass(frozen=True)
class FileEntry:
    """`name`: relative POSIX path within the checkpoint folder. `offset`: in the slot, in bytes, page aligned."""

    name: str
    offset: int
    record: FileRecord


@dataclass(frozen=True)
class Snapshot:
    """What a sealed slot says about itself. `note`: JSON; rank 0 puts the fields of the Manifest there."""

    identity: SnapshotIdentity
    files: tuple[FileEntry, ...]
    note: Mapping[str, Any]

    @property
    def num_bytes(self) -> int:
        """Of the files."""
        return sum(entry.record.size_bytes for entry in self.files)


class SlotStream:
    """One file on its way into a slot: write-only, in one sequential pass, hashed on the way.

    `torch.save` and `pickle.dump` can write to it. The file is complete when the `with` block is left without an error.
    """

    def __init__(self, fd: int, offset: int, gather: memoryview, done: Callable[[FileRecord | None], None]) -> None:
        self._fd = fd
        self._offset = offset
        self._done = done
        self._gather = gather
        self._gathered_bytes = 0
        self._written_bytes = 0
        self._digest = xxhash.xxh3_128()
        self._closed = False

    def write(self, data: Buffer) -> int:
        """Any buffer, also of several dimensions, not contiguous, or of another element type: its bytes in C order.

        Returns their number, always all. Raises OSError where the memory is not to be had.
        """
        if self._closed:
            raise ValueError("this file of the snapshot is closed")
        view = _bytes_of(data)
        num_bytes = view.nbytes
        if num_bytes > self._gather.nbytes - self._gathered_bytes:
            self.flush()
        if num_bytes > self._gather.nbytes:
            self._put(view)
        else:
            self._gather[self._gathered_bytes : self._gathered_bytes + num_bytes] = view
            self._gathered_bytes += num_bytes
        return num_bytes

    def flush(self) -> None:
        if self._gathered_bytes:
            gathered = self._gather[: self._gathered_bytes]
            self._gathered_bytes = 0
            self._put(gathered)

    def tell(self) -> int:
        return self._written_bytes + self._gathered_bytes

    def writable(self) -> bool:
        return True

    def __enter__(self) -> SlotStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        record = None
        try:
            if kind is None:
                self.flush()
                record = FileRecord(self._written_bytes, self._digest.hexdigest())
        finally:
            self._closed = True
            self._done(record)

    def _put(self, view: memoryview) -> None:
        self._digest.update(view)
        _pwrite_all(self._fd, view, self._offset + self._written_bytes)
        self._written_bytes += view.nbytes


class SlotWriter:
    """Writes one snapshot into a slot (a memfd). Unsealed from `__init__` on; whatever was there is gone.

    For one thread. Any error leaves the slot unsealed: `seal` refuses after a file that was not finished.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        _pwrite_all(fd, memoryview(_UNSEALED), 0)
        self._gather = memoryview(bytearray(_GATHER_BYTES))
        self._entries: dict[str, FileEntry] = {}
        self._end = _PAGE_BYTES
        self._state = "between files"

    def open(self, name: str) -> SlotStream:
        """A context manager; one at a time. Raises ValueError for a name that could not be one in the folder, or is
        taken."""
        _require_relative(name)
        if name in self._entries:
            raise ValueError(f"{name} is in this snapshot already")
        self._require_between_files()
        self._state = f"{name} is not finished"
        offset = _page_aligned(self._end)

        def done(record: FileRecord | None) -> None:
            if record is not None:
                self._entries[name] = FileEntry(name, offset, record)
                self._end = offset + record.size_bytes
                self._state = "between files"

        return SlotStream(self._fd, offset, self._gather, done)

    def seal(self, identity: SnapshotIdentity, note: Mapping[str, Any]) -> Snapshot:
        """Raises ValueError while a file is open, after one that was not finished, and the second time; TypeError or
        ValueError for a note that is not JSON."""
        self._require_between_files()
        index = _to_json(identity, tuple(self._entries.values()), note)
        offset = _page_aligned(self._end)
        _pwrite_all(self._fd, memoryview(index), offset)
        header = _HEADER.pack(_MAGIC, _VERSION, offset, len(index), xxhash.xxh3_128_digest(index))
        _pwrite_all(self._fd, memoryview(header + xxhash.xxh3_128_digest(header)), _STATE_BYTES)
        _pwrite_all(self._fd, memoryview(_SEALED), 0)
        self._state = "it is sealed"
        return _from_json(index)

    def _require_between_files(self) -> None:
        if self._state != "between files":
            raise ValueError(f"the snapshot takes nothing more: {self._state}")


def create_memory(name: str) -> int:
    """A new, empty memfd: not limited by the size of /dev/shm, gone with the last descriptor or mapping of it.

    `name` shows in /proc/<pid>/fd. Raises OSError.
    """
    try:
        return os.memfd_create(name, os.MFD_CLOEXEC | _MFD_NOEXEC_SEAL)  # vm.memfd_noexec=2 allows no other
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.memfd_create(name, os.MFD_CLOEXEC)  # before Linux 6.3


def read_snapshot(fd: int) -> Snapshot | None:
    """None: the slot is empty, unsealed or its header or index is damaged. Does not read the files. Raises OSError."""
    start = os.pread(fd, _STATE_BYTES + _HEADER.size + _HASH_BYTES, 0)
    header, digest = start[_STATE_BYTES:-_HASH_BYTES], start[-_HASH_BYTES:]
    if start[:_STATE_BYTES] != _SEALED or len(header) != _HEADER.size or xxhash.xxh3_128_digest(header) != digest:
        return None
    magic, version, offset, size_bytes, index_digest = _HEADER.unpack(header)
    if magic != _MAGIC or version != _VERSION or offset + size_bytes > os.fstat(fd).st_size:
        return None
    index = _pread_all(fd, size_bytes, offset)
    if xxhash.xxh3_128_digest(index) != index_digest:
        return None
    try:
        return _from_json(index)
    except (ValueError, KeyError, TypeError):
        return None


def verify_snapshot(fd: int, snapshot: Snapshot, cancelled: Callable[[], bool] = lambda: False) -> str:
    """ "" or which file does not agree with the index. Reads every byte. Raises what `verify_file` raises."""
    reasons = (verify_file(fd, entry, cancelled) for entry in snapshot.files)
    return next(filter(None, reasons), "")


def verify_file(fd: int, entry: FileEntry, cancelled: Callable[[], bool] = lambda: False) -> str:
    """ "" or what does not agree: size or hash of one file of a slot.

    Raises Cancelled as soon as `cancelled()`, which is asked before each block of 4 MiB, and OSError.
    """
    block = memoryview(bytearray(min(_READ_BYTES, entry.record.size_bytes)))
    digest = xxhash.xxh3_128()
    read_bytes = 0
    while read_bytes < entry.record.size_bytes:
        if cancelled():
            raise Cancelled(f"reading {entry.name} from memory")
        wanted = block[: entry.record.size_bytes - read_bytes]
        num_bytes = os.preadv(fd, [wanted], entry.offset + read_bytes)
        if num_bytes == 0:
            return f"{entry.name} ends after {read_bytes} bytes, {entry.record.size_bytes} were written"
        digest.update(wanted[:num_bytes])
        read_bytes += num_bytes
    if digest.hexdigest() != entry.record.xxh3_128:
        return f"{entry.name} does not have the content that was written (XXH3 differs)"
    return ""


def copy_file(fd: int, entry: FileEntry, target_fd: int, cancelled: Callable[[], bool] = lambda: False) -> None:
    """Write the file's bytes at `target_fd`'s position, in the kernel.

    Raises Cancelled as soon as `cancelled()`, which is asked before each 64 MiB, and OSError, also where the slot ends
    early. sendfile: it reaches every kind of target, where copy_file_range needs both on one file system, and is as
    fast.
    """
    offset, end = entry.offset, entry.offset + entry.record.size_bytes
    while offset < end:
        if cancelled():
            raise Cancelled(f"copying {entry.name} from memory")
        num_bytes = os.sendfile(target_fd, fd, offset, min(end - offset, _SENDFILE_BYTES))
        if num_bytes == 0:
            raise OSError(f"{entry.name}: the slot ends {end - offset} bytes too early")
        offset += num_bytes


def _bytes_of(data: Buffer) -> memoryview:
    view = memoryview(data)
    if view.nbytes == 0:
        return memoryview(b"")  # a shape with a zero in it cannot be cast
    try:
        return view.cast("B")
    except TypeError:  # not contiguous, or of a format that memoryview does not know
        return memoryview(view.tobytes())


def _to_json(identity: SnapshotIdentity, files: tuple[FileEntry, ...], note: Mapping[str, Any]) -> bytes:
    index = {"identity": asdict(identity), "files": [asdict(entry) for entry in files], "note": dict(note)}
    return json.dumps(index, ensure_ascii=False, allow_nan=False).encode("utf-8")


def _from_json(index: bytes) -> Snapshot:
    """Raises ValueError, KeyError or TypeError for anything that is not an index."""
    raw = json.loads(index)
    files = tuple(FileEntry(e["name"], e["offset"], FileRecord(**e["record"])) for e in raw["files"])
    for entry in files:
        _require_relative(entry.name)
    if not isinstance(raw["note"], dict):
        raise ValueError("the note is not an object")
    return Snapshot(SnapshotIdentity(**raw["identity"]), files, raw["note"])


def _require_relative(name: str) -> None:
    """The name becomes a path below a folder; an index may come from another node."""
    path = PurePosixPath(name)
    if not path.parts or path.as_posix() != name or path.is_absolute() or ".." in path.parts or "\0" in name:
        raise ValueError(f"{name!r} is not a relative POSIX path")
    if path.name == MANIFEST_NAME:
        raise ValueError(f"{name!r}: the manifest is made from the snapshots of all ranks")


def _page_aligned(offset: int) -> int:
    return -(-offset // _PAGE_BYTES) * _PAGE_BYTES


def _pwrite_all(fd: int, view: memoryview, offset: int) -> None:
    while view:
        num_bytes = os.pwrite(fd, view, offset)
        view = view[num_bytes:]
        offset += num_bytes


def _pread_all(fd: int, size_bytes: int, offset: int) -> bytes:
    blocks = []
    while size_bytes > 0 and (block := os.pread(fd, size_bytes, offset)):
        blocks.append(block)
        size_bytes -= len(block)
        offset += len(block)
    return b"".join(blocks)
