"""The way of a checkpoint, or of `final/`, to its name in the output folder, on any storage.

Invariants, whatever the storage and whenever a process is killed:
- what is not whole has no MANIFEST.json that agrees with it, and is never resumed from;
- what was whole before stays so until the new one is (only `final/` gives way earlier on an object mount, see below).

POSIX: files are put into the generation's staging folder; one rename gives the name (`commit.py`).

OBJECT (JindoFuse, ossfs, s3fs): a rename of a folder copies and deletes object after object, and files can only be
written from the beginning to the end. So files are put under their final name, in one pass, and read back;
MANIFEST.json is the last one and says that the folder is whole. docs/checkpoints.md and decision 0011 have the reasons.
"""

from __future__ import annotations

import errno
import json
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import Protocol

from launcher.checkpoint.commit import (
    FENCE_NAME,
    FINAL_NAME,
    STAGING_NAME,
    Committed,
    commit_folder,
    highest_staged,
    prune,
    remove_tree,
    staging_root,
)
from launcher.checkpoint.in_place import REJECTED_NAME, UNFINISHED_NAME, is_unfinished, set_apart
from launcher.checkpoint.manifest import MANIFEST_NAME, FileRecord, Manifest, iter_files
from launcher.checkpoint.object_file import (
    VISIBLE_WITHIN_S,
    Chunk,
    DamagedSource,
    looks,
    put_object,
    write_once_through,
)
from launcher.checkpoint.verify import Verification, folders_by_step, list_checkpoints, verify_checkpoint
from launcher.host.storage import StorageKind

__all__ = ["Chunk", "DamagedSource", "Publication", "prune_published", "publication"]

_KEPT_ON_OBJECTS = 2  # no mount proves that what was read back is what the next machine will read


class Publication(Protocol):
    """One checkpoint (or `final/`) on its way to its name. Several processes, on several nodes, may put its files; one
    of them publishes. `put` may be called by several threads at once."""

    def put(self, name: str, chunks: Iterable[Chunk], expected: FileRecord | None = None) -> FileRecord:
        """Write one file, in one sequential pass; durable on return.

        name: relative POSIX path within the folder.
        Raises DamagedSource where the content is not `expected`, FileNotFoundError where a later generation has begun,
        FileExistsError where somebody else has published a checkpoint of this name, OSError where the storage fails.
        """

    def publish(
        self, manifest: Manifest, *, replace: bool = False, may_commit: Callable[[], None] = lambda: None
    ) -> Committed:
        """Once every file of the manifest has been put, by whomever. Files that it does not name are removed.

        `may_commit` is called as late as possible and raises where this generation is over. A folder that has the name
        already is set aside, or with `replace` removed. Raises FileNotFoundError and OSError as `put` does.
        """


def publication(kind: StorageKind, output_dir: Path, generation: int, name: str) -> Publication:
    """name: `checkpoint-N`, or `final`."""
    if kind is StorageKind.OBJECT:
        return _OnObjects(output_dir, generation, name)
    return _OnPosix(output_dir, generation, name)


def prune_published(kind: StorageKind, output_dir: Path, keep: int, generation: int) -> list[Path]:
    """Delete whole checkpoints beyond the newest `keep` whole ones; returns what was deleted.

    On an object mount at least two stay, MANIFEST.json goes before the other files, and what died before it was
    finished goes with them. Raises FileNotFoundError there where a later generation has begun.
    """
    if kind is StorageKind.POSIX:
        return prune(output_dir, keep, generation)
    found = list_checkpoints(output_dir)
    whole = [(step, path) for step, path in found if verify_checkpoint(path, step, hashes=False).whole]
    deleted = [path for _, path in whole[max(keep, _KEPT_ON_OBJECTS) :]]
    for path in deleted:
        require_fence(output_dir, generation)
        (path / UNFINISHED_NAME).write_bytes(b"{}")  # a kill from here on leaves what the next pruning removes
        (path / MANIFEST_NAME).unlink(missing_ok=True)
        _remove_in_place(path)
    newest = whole[0][0] if whole else -1
    for step, path in folders_by_step(output_dir):
        if step < newest and is_unfinished(path):
            require_fence(output_dir, generation)
            _remove_in_place(path)
    return deleted


def _remove_in_place(folder: Path) -> None:
    """What says that it is unfinished goes last."""
    for path in folder.iterdir():
        if path.name != UNFINISHED_NAME:
            remove_tree(path)
    (folder / UNFINISHED_NAME).unlink(missing_ok=True)
    remove_tree(folder)


def set_judged_apart(judged: Verification) -> Path | None:
    """On an object mount, in place of a rename: the folder keeps its name and is no checkpoint any more. None where it
    has gone, or its name belongs to another one by now."""
    if not judged.is_still_there():
        return None
    set_apart(judged.path, judged.reason)
    return judged.path


class _OnPosix:
    def __init__(self, output_dir: Path, generation: int, name: str) -> None:
        self._staged = staging_root(output_dir, generation) / name
        self._final = output_dir / name
        self._begun = False
        self._beginning = threading.Lock()

    def put(self, name: str, chunks: Iterable[Chunk], expected: FileRecord | None = None) -> FileRecord:
        with self._beginning:
            if not self._begun:
                self._staged.mkdir(parents=True, exist_ok=True)
                self._begun = True
        path = self._staged / _checked(name)
        # The staged folder itself is not made a second time: where it has gone, a later generation has begun.
        for folder in _folders_between(self._staged, path):
            folder.mkdir(exist_ok=True)
        return write_once_through(path, chunks, expected, sync=True)

    def publish(
        self, manifest: Manifest, *, replace: bool = False, may_commit: Callable[[], None] = lambda: None
    ) -> Committed:
        self._staged.stat()  # FileNotFoundError: it has been cleared away, there is nothing to wait for
        require_all(self._staged, manifest.files)
        _remove_others(self._staged, manifest)
        return commit_folder(self._staged, self._final, manifest, replace=replace, may_commit=may_commit)


class _OnObjects:
    """The fence: `ftlaunch/staging/gen-<g>/writing`, made before the first file is put. A later generation removes it
    before its ranks start, and whoever finds it gone puts, publishes and removes nothing any more."""

    def __init__(self, output_dir: Path, generation: int, name: str) -> None:
        self._output_dir = output_dir
        self._generation = generation
        self._folder = output_dir / name
        self._marker = self._folder / MANIFEST_NAME
        self._unfinished = self._folder / UNFINISHED_NAME
        self._begun = False
        self._beginning = threading.Lock()

    def put(self, name: str, chunks: Iterable[Chunk], expected: FileRecord | None = None) -> FileRecord:
        with self._beginning:
            if not self._begun:
                self._begin()
                self._begun = True
        require_fence(self._output_dir, self._generation)
        path = self._folder / _checked(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        return put_object(path, chunks, expected)

    def publish(
        self, manifest: Manifest, *, replace: bool = False, may_commit: Callable[[], None] = lambda: None
    ) -> Committed:
        require_all(self._folder, manifest.files)
        _remove_others(self._folder, manifest, spared=UNFINISHED_NAME)
        may_commit()
        require_fence(self._output_dir, self._generation)
        try:
            put_object(self._marker, [manifest.to_json().encode()])
            require_fence(self._output_dir, self._generation)
        except OSError:
            # Not durable for certain; or a later generation began in this moment, without this checkpoint, and must
            # not find it afterwards.
            self._marker.unlink(missing_ok=True)
            raise
        self._unfinished.unlink(missing_ok=True)
        return Committed(self._folder, manifest.total_bytes)

    def _begin(self) -> None:
        raise_fence(self._output_dir, self._generation)
        self._folder.mkdir(parents=True, exist_ok=True)
        if self._marker.exists():
            if self._folder.name != FINAL_NAME:
                raise FileExistsError(
                    errno.EEXIST,
                    f"{self._folder} has been published meanwhile, by another process than generation "
                    f"{self._generation}; it is left as it is",
                )
            # Unlike elsewhere the old one goes before the new one is whole. Nothing is lost: whoever writes final/
            # resumes from the checkpoint of the planned end, and writes it again after a kill.
            self._marker.unlink()
        if not self._unfinished.exists():
            text = json.dumps(
                {"v": 1, "generation": self._generation, "note": "not whole before MANIFEST.json is there"}
            )
            put_object(self._unfinished, [text.encode()])
        (self._folder / REJECTED_NAME).unlink(missing_ok=True)


# ---- the fence of a generation on an object mount ----


def fence_path(output_dir: Path, generation: int) -> Path:
    return output_dir / STAGING_NAME / f"gen-{generation}" / FENCE_NAME


def raise_fence(output_dir: Path, generation: int) -> None:
    """Before the first file of a checkpoint is put, and before the ranks of a generation start: from then on no earlier
    one raises its own. Raises FileNotFoundError where a later generation has begun."""
    latest = highest_staged(output_dir)
    path = fence_path(output_dir, generation)
    if latest > generation:
        raise FileNotFoundError(errno.ENOENT, f"generation {generation} is over, {latest} has begun: no {path}")
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        put_object(path, [b"removed by the next generation: then this one writes no more\n"])


def require_fence(output_dir: Path, generation: int) -> None:
    """Raises FileNotFoundError where a later generation has begun. The answer of a mount may be a minute old."""
    path = fence_path(output_dir, generation)
    try:
        with path.open("rb"):  # opened, not only looked at: mounts ask the server for less than that only at times
            return
    except FileNotFoundError:
        raise FileNotFoundError(
            errno.ENOENT, f"generation {generation} is over, a later one has begun: {path} is gone"
        ) from None


def require_all(folder: Path, files: Mapping[str, FileRecord]) -> None:
    """Every file is there, in its size. Contents were compared by whoever has put them; other nodes may have, and a
    mount shows their files late. Raises OSError."""
    missing = dict(files)
    for _ in looks():
        for name, record in list(missing.items()):
            try:
                if (folder / name).stat().st_size == record.size_bytes:
                    del missing[name]
            except FileNotFoundError:
                continue
        if not missing:
            return
    raise OSError(
        errno.EIO,
        f"{folder}: {len(missing)} of {len(files)} files have not come within {VISIBLE_WITHIN_S:.0f} s, "
        f"{min(missing)} for one",
    )


def _remove_others(folder: Path, manifest: Manifest, *, spared: str = "") -> None:
    """Left by a process that was writing this folder and died: a shard too many is a reason not to load it."""
    for name in iter_files(folder):
        if name not in manifest.files and name != spared:
            (folder / name).unlink(missing_ok=True)


def _checked(name: str) -> PurePosixPath:
    path = PurePosixPath(name)
    if not name or path.is_absolute() or ".." in path.parts or name in (MANIFEST_NAME, UNFINISHED_NAME, REJECTED_NAME):
        raise ValueError(f"not a file of a checkpoint: {name!r}")
    return path


def _folders_between(root: Path, path: Path) -> list[Path]:
    return [folder for folder in reversed(path.parents) if root in folder.parents]
