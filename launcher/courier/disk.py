"""Snapshots on their way to the output folder, and to their name there.

Invariants: what is stored was compared with the hash of its index on the way; nothing gets a final name before every
file of the manifest is there with its size and the agent has given its permission. A request that failed or was cut
off at any moment can be asked again: what is there is written anew, and what has been published stays so.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from launcher.checkpoint.commit import remove_tree, staging_root
from launcher.checkpoint.manifest import MANIFEST_NAME, FileRecord, Manifest, parse_manifest, read_manifest
from launcher.checkpoint.publish import DamagedSource, Publication, prune_published, publication, require_fence
from launcher.checkpoint.snapshot import FileEntry, SnapshotIdentity
from launcher.checkpoint.verify import missing_of
from launcher.courier.job import Job
from launcher.courier.messages import Cause, Discarded, Failed, Published, Written
from launcher.courier.slots import expected_snapshot
from launcher.host.storage import StorageKind

_NUM_WRITERS = 4  # network storage is faster with several files at a time
_BLOCK_BYTES = 1 << 21


@dataclass(frozen=True)
class Place:
    """Where a checkpoint goes: `name` in `output_dir`, by way of this generation's staging where there is one."""

    output_dir: Path
    storage: StorageKind
    generation: int
    name: str

    @property
    def final(self) -> Path:
        return self.output_dir / self.name

    @property
    def folder(self) -> Path:
        """Where its files are before it is published."""
        staged = staging_root(self.output_dir, self.generation) / self.name
        return self.final if self.storage is StorageKind.OBJECT else staged


@dataclass(frozen=True)
class _Source:
    fd: int
    entry: FileEntry
    rank: int


def write(place: Place, expected: Sequence[SnapshotIdentity], fds: Sequence[int], job: Job) -> Written:
    """Store every file of the snapshots. Raises Failed; what was stored before that stays, under no final name."""
    started = time.monotonic()
    sources = _sources(expected, fds)
    way = publication(place.storage, place.output_dir, place.generation, place.name)
    job.bytes_total = sum(source.entry.record.size_bytes for source in sources)
    # The largest first: they decide when all is done.
    waiting = sorted(sources, key=lambda source: source.entry.record.size_bytes)
    records: dict[str, FileRecord] = {}
    failures: list[Failed] = []
    turn = threading.Lock()

    def put_files() -> None:
        while True:
            with turn:
                if failures or not waiting:
                    return
                source = waiting.pop()
            try:
                record = _put(way, source, job, lambda: bool(failures))
            except Failed as failure:
                with turn:
                    failures.append(failure)
                return
            with turn:
                records[source.entry.name] = record

    writers = [threading.Thread(target=put_files, name="write", daemon=True) for _ in range(_NUM_WRITERS)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    if failures:
        raise failures[0]
    if len(records) != len(sources):
        raise Failed(Cause.DEFECT, f"{len(records)} of {len(sources)} files were written; the courier's log says more")
    return Written(dict(sorted(records.items())), job.bytes_total, time.monotonic() - started)


def publish(
    place: Place, manifest_text: str, keep: int, *, replace: bool, ask_permission: Callable[[], None]
) -> Published:
    """Give the checkpoint its name and remove those beyond the newest `keep` (0: remove none).

    Raises Failed; then the name is not given, except where storage fails after the rename.
    """
    started = time.monotonic()
    try:
        manifest = parse_manifest(manifest_text)
    except (ValueError, KeyError, TypeError) as error:
        raise Failed(Cause.DEFECT, f"the manifest of {place.name} is not one ({error})") from error

    def may_commit() -> None:
        _require_state(place, manifest)
        ask_permission()

    try:
        if not _is_published(place.final, manifest):
            way = publication(place.storage, place.output_dir, place.generation, place.name)
            way.publish(manifest, replace=replace, may_commit=may_commit)
    except OSError as error:
        raise Failed(Cause.STORAGE, f"{place.name} could not be published: {error}") from error
    pruned: tuple[Path, ...] = ()
    prune_error = ""
    try:
        if keep > 0:
            pruned = tuple(prune_published(place.storage, place.output_dir, keep, place.generation))
    except OSError as error:
        prune_error = str(error)
    return Published(place.final, manifest.total_bytes, pruned, prune_error, time.monotonic() - started)


def discard(place: Place) -> Discarded:
    """Remove what was written, as far as that goes, unless it has been published or a later generation has begun.

    Raises Failed.
    """
    folder = place.folder
    try:
        if place.storage is StorageKind.OBJECT:
            require_fence(place.output_dir, place.generation)
        if not (folder == place.final and (folder / MANIFEST_NAME).exists()):
            remove_tree(folder)
    except FileNotFoundError:
        pass  # nothing there, or nothing of this generation's
    except OSError as error:
        raise Failed(Cause.STORAGE, f"{folder} could not be removed: {error}") from error
    return Discarded(folder)


def _sources(expected: Sequence[SnapshotIdentity], fds: Sequence[int]) -> list[_Source]:
    """Every file once. Raises Failed for a slot that holds another snapshot or none, and where two ranks disagree."""
    sources: dict[str, _Source] = {}
    for identity, fd in zip(expected, fds, strict=True):
        for entry in expected_snapshot(fd, identity).files:
            source = _Source(fd, entry, identity.rank)
            other = sources.setdefault(entry.name, source)
            if other.entry.record != entry.record:
                raise Failed(
                    Cause.DAMAGED,
                    f"ranks {other.rank} and {identity.rank} both have {entry.name}, with different contents",
                )
    return list(sources.values())


def _put(way: Publication, source: _Source, job: Job, given_up: Callable[[], bool]) -> FileRecord:
    entry = source.entry
    try:
        return way.put(entry.name, _blocks(source, job, given_up), entry.record)
    except DamagedSource as error:
        raise Failed(Cause.DAMAGED, f"the slot of rank {source.rank} is damaged: {error}") from error
    except OSError as error:
        raise Failed(Cause.STORAGE, f"{entry.name} could not be written: {error}") from error


def _blocks(source: _Source, job: Job, given_up: Callable[[], bool]) -> Iterator[memoryview]:
    """The file's bytes in order. A block is good until the next one is asked for."""
    entry = source.entry
    buffer = memoryview(bytearray(min(_BLOCK_BYTES, entry.record.size_bytes)))
    offset, end = entry.offset, entry.offset + entry.record.size_bytes
    while offset < end:
        job.require_wanted()
        if given_up():
            raise Failed(Cause.CANCELLED, "another file has failed")
        num_bytes = os.preadv(source.fd, [buffer[: end - offset]], offset)
        if num_bytes == 0:
            raise DamagedSource(f"{entry.name} ends {end - offset} bytes too early")
        yield buffer[:num_bytes]
        offset += num_bytes
        job.add_bytes(num_bytes)


def _is_published(final: Path, manifest: Manifest) -> bool:
    """Whether this very checkpoint has its name already: the courier that gave it died before it could say so."""
    try:
        return read_manifest(final) == manifest
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _require_state(place: Place, manifest: Manifest) -> None:
    """Raises Failed for what a resume would need and this folder, in which every file of the manifest is, lacks."""
    if manifest.kind != "checkpoint":
        return
    missing = missing_of(place.folder, manifest)
    if missing:
        raise Failed(Cause.INCOMPLETE, f"{place.name} could not be resumed from: {missing}")
