"""Where the ranks write a checkpoint, or `final/`, and how it gets its name: the same for all of them.

POSIX: all ranks write into one staging folder on the storage itself, and rank 0 renames it.

OBJECT: what writes the files (Trainer, DeepSpeed, safetensors) truncates, renames and writes where it likes. So the
ranks of a node write into a folder on the node's own disk, below TMPDIR, which must have room for what they write; the
first rank of each node puts the files to their place, and rank 0 publishes.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch.distributed as dist

from launcher.checkpoint.commit import Committed, commit_folder, staging_root
from launcher.checkpoint.manifest import FileRecord, Manifest, iter_files, record_files
from launcher.checkpoint.object_file import chunks_of
from launcher.checkpoint.publish import publication, require_all
from launcher.host.local_folder import local_folder
from launcher.host.storage import StorageKind
from launcher.plan.spec import RankSpec

_UPLOADS_AT_ONCE = 4  # an object store gives each stream a share of what it has


class StagedSave:
    def __init__(self, spec: RankSpec) -> None:
        self._spec = spec
        self._on_objects = spec.storage_kind is StorageKind.OBJECT
        self._is_first_of_node = int(os.environ.get("LOCAL_RANK", "0")) == 0

    def root(self) -> Path:
        """The folder in which the ranks of this generation make `checkpoint-N` and `final`."""
        if not self._on_objects:
            return staging_root(self._spec.output_path, self._spec.generation)
        return local_folder(self._spec.output_path) / "staging" / f"gen-{self._spec.generation}"

    def put(self, name: str) -> tuple[Path, Mapping[str, FileRecord]]:
        """Called by all ranks, when all have written. Returns, on rank 0, a folder in which all files are, and what
        they hold. Raises OSError where the storage fails."""
        staged = self.root() / name
        if not self._on_objects:
            return staged, record_files(staged) if _rank() == 0 else {}
        mine = self._put_of_this_node(staged, name) if self._is_first_of_node else {}
        files = _gathered(mine)
        if self._is_first_of_node:
            _clear(staged, self._spec.generation)
        folder = self._spec.output_path / name
        if _rank() == 0:
            require_all(folder, files)
        return folder, files

    def publish(
        self, name: str, manifest: Manifest, *, replace: bool = False, may_commit: Callable[[], None]
    ) -> Committed:
        """On rank 0. Raises as `Publication.publish` does."""
        output_dir = self._spec.output_path
        if not self._on_objects:
            return commit_folder(
                self.root() / name, output_dir / name, manifest, replace=replace, may_commit=may_commit
            )
        target = publication(StorageKind.OBJECT, output_dir, self._spec.generation, name)
        return target.publish(manifest, replace=replace, may_commit=may_commit)

    def _put_of_this_node(self, staged: Path, name: str) -> dict[str, FileRecord]:
        target = publication(StorageKind.OBJECT, self._spec.output_path, self._spec.generation, name)
        names = list(iter_files(staged))
        with ThreadPoolExecutor(_UPLOADS_AT_ONCE, thread_name_prefix="upload") as pool:
            records = pool.map(lambda file: target.put(file, chunks_of(staged / file)), names)
            return dict(zip(names, records, strict=True))


def _clear(staged: Path, generation: int) -> None:
    """What has been put, and what killed generations have left on this disk."""
    shutil.rmtree(staged, ignore_errors=True)
    for folder in staged.parent.parent.glob("gen-*"):
        number = folder.name.removeprefix("gen-")
        if number.isdecimal() and int(number) < generation:
            shutil.rmtree(folder, ignore_errors=True)


def _gathered(mine: Mapping[str, FileRecord]) -> dict[str, FileRecord]:
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return dict(mine)
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, dict(mine))
    return {name: record for part in parts for name, record in part.items()}


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0
