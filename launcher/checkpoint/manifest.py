"""MANIFEST.json: the proof that a checkpoint folder is whole.

Invariant: the manifest is written after every other byte of the folder is on disk, and names each file with its size
and hash. A folder without a manifest, or one that does not agree with it, was not finished and is never resumed from.
It is sealed with a hash of its own (`SEAL`), because a flipped bit in it would change what a run resumes with (the
global batch, the samples seen) as surely as one in the weights.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from datetime import datetime, timezone
from pathlib import Path, PurePosixPath
from typing import Any

import xxhash

from launcher.errors import Cancelled

MANIFEST_NAME = "MANIFEST.json"
SEAL = "xxh3_128"  # of the manifest without this field, as `_canonical` writes it; version 0.1.0 wrote none
_READ_BYTES = 1 << 22


@dataclass(frozen=True)
class FileRecord:
    """`size_bytes` and the XXH3-128 digest (hex) of one file."""

    size_bytes: int
    xxh3_128: str


@dataclass(frozen=True)
class Manifest:
    """What MANIFEST.json holds.

    `identity` is what a resume must agree with (see `identity.py`); `training` are settings that live on in the state;
    `own_scheduler`: the schedule is Transformers' and lies in scheduler.pt (else DeepSpeed's, in its model states);
    `data_digest`: XXH3-128 of the encoded training data; `global_batch_size`: samples of an optimizer step over all
    ranks, 0 in manifests of versions that did not write it.
    """

    step: int
    world_size: int
    num_nodes: int
    precision: str
    run_id: str
    config_sha: str
    identity: Mapping[str, Any]
    samples_seen: int
    versions: Mapping[str, str]
    files: Mapping[str, FileRecord]
    kind: str = "checkpoint"
    planned_steps: int | None = None
    plan: Mapping[str, Any] = field(default_factory=dict)
    training: Mapping[str, Any] = field(default_factory=dict)
    own_scheduler: bool = True
    data_digest: str = ""
    global_batch_size: int = 0
    created: str = field(default_factory=lambda: datetime.now(timezone.utc).isoformat(timespec="microseconds"))
    v: int = 1

    def to_json(self) -> str:
        document = json.loads(json.dumps(asdict(self)))  # as a reader will see it: keys are strings, tuples are lists
        return _canonical({**document, SEAL: _seal(document)})

    @property
    def total_bytes(self) -> int:
        return sum(record.size_bytes for record in self.files.values())

    @property
    def batch_of_run(self) -> int:
        """The run's global batch; older manifests say it through the ranks and settings that wrote them."""
        if self.global_batch_size:
            return self.global_batch_size
        per_device = int(self.identity.get("training.per_device_train_batch_size", 8))
        return per_device * int(self.identity.get("training.gradient_accumulation_steps", 1)) * self.world_size


class LaterVersion(ValueError):  # noqa: N818 - says what it is
    """An intact manifest that a later version of ftlaunch has written: nothing is damaged, and nothing can be said."""


def parse_manifest(text: str) -> Manifest:
    """Raises LaterVersion, and ValueError, KeyError or TypeError for anything else that is not a manifest."""
    try:
        raw = json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(raw, dict):
        raise ValueError("not a JSON object")
    seal = raw.pop(SEAL, None)
    if seal is not None and seal != _seal(raw):
        raise ValueError("it does not have the content that was written (its own hash differs)")
    version = raw.get("v")
    if version != 1:
        if seal is not None and isinstance(version, int) and version > 1:
            raise LaterVersion(f"it is of version {version}, this ftlaunch knows version 1")
        raise ValueError("not a version 1 manifest")
    if seal is not None:  # what a later program has added to this version can be done without
        known = {field.name for field in fields(Manifest)}
        raw = {key: value for key, value in raw.items() if key in known}
    if not isinstance(raw.get("files"), dict) or not raw["files"]:
        raise ValueError("it names no files")
    files = {name: FileRecord(**record) for name, record in raw.pop("files").items()}
    manifest = Manifest(files=files, **raw)
    _require_plausible(manifest)
    return manifest


def _require_plausible(manifest: Manifest) -> None:
    """Others count with these, open files by these names, and have no bound for a wrong type."""
    for name in ("step", "world_size", "samples_seen", "global_batch_size"):
        value = getattr(manifest, name)
        if type(value) is not int or value < (name == "world_size"):
            raise ValueError(f"{name} is {value!r}")
    if not isinstance(manifest.identity, dict):
        raise ValueError(f"identity is {manifest.identity!r}")
    for file, record in manifest.files.items():
        if type(record.size_bytes) is not int:
            raise ValueError(f"the size of {file} is {record.size_bytes!r}")
        if PurePosixPath(file).is_absolute() or ".." in PurePosixPath(file).parts:
            raise ValueError(f"{file} is not within the folder")


def _canonical(document: Mapping[str, Any]) -> str:
    return json.dumps(document, indent=1, ensure_ascii=False, sort_keys=True)


def _seal(document: Mapping[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(_canonical(document).encode("utf-8", "backslashreplace"))


def read_manifest(folder: Path) -> Manifest:
    """Of a folder that has been verified; raises OSError and what `parse_manifest` raises."""
    return parse_manifest((folder / MANIFEST_NAME).read_text("utf-8"))


def hash_file(path: Path, cancelled: Callable[[], bool] = lambda: False, *, fresh: bool = False) -> FileRecord:
    """Raises Cancelled as soon as `cancelled()`, which is asked before each block of 4 MiB; OSError, which names the
    file. `fresh`: what the kernel still has of the file in memory does not count."""
    digest = xxhash.xxh3_128()
    size_bytes = 0
    with path.open("rb", buffering=0) as stream:
        if fresh:
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        while True:
            if cancelled():
                raise Cancelled(f"reading {path}")
            try:
                block = stream.read(_READ_BYTES)
            except OSError as error:
                error.filename = os.fspath(path)
                raise
            if not block:
                break
            digest.update(block)
            size_bytes += len(block)
    return FileRecord(size_bytes, digest.hexdigest())


def iter_files(folder: Path) -> Iterator[str]:
    """Relative POSIX paths of all regular files below `folder`, the manifest itself left out, in sorted order."""
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name != MANIFEST_NAME:
            yield path.relative_to(folder).as_posix()


def record_files(folder: Path) -> dict[str, FileRecord]:
    return {name: hash_file(folder / name) for name in iter_files(folder)}


def fsync_path(path: Path) -> None:
    """fsync of a file or folder; file systems that know no fsync of folders (object mounts) answer EINVAL: accepted."""
    flags = os.O_RDONLY | (os.O_DIRECTORY if path.is_dir() else 0)
    fd = os.open(path, flags)
    try:
        os.fsync(fd)
    except OSError:
        if not path.is_dir():
            raise
    finally:
        os.close(fd)


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest as the folder's last file: temporary name, fsync, rename, fsync of the folder."""
    temporary = folder / (MANIFEST_NAME + ".tmp")
    with temporary.open("w", encoding="utf-8") as stream:
        stream.write(manifest.to_json())
        stream.flush()
        os.fsync(stream.fileno())
    temporary.rename(folder / MANIFEST_NAME)
    fsync_path(folder)
