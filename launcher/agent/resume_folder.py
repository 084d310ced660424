"""A checkpoint folder made of snapshots in memory, for ranks to resume from as they do from disk.

Invariants: its files are copies in memory of this process's own, verified after the copy, so that nobody who still has
a slot can change them; nothing is left of it after `release`. The folder has links to /proc/<this pid>/fd/<n>, so it is
good while this process lives, for processes of the same user in the same container.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from launcher.checkpoint.identity import differences
from launcher.checkpoint.manifest import MANIFEST_NAME, Manifest, parse_manifest
from launcher.checkpoint.snapshot import FileEntry, Snapshot, copy_file, create_memory, verify_file
from launcher.checkpoint.verify import missing_of
from launcher.checkpoint.whole_step import WholeStep

_MAX_COPYING = 8  # threads: the first touch of a page takes most of the time, and does not need the GIL


@dataclass(frozen=True)
class HeldSnapshot:
    """A sealed snapshot and the memory that it lies in. `tier`: `memory` (of this node's ranks) or `peer`."""

    snapshot: Snapshot
    fd: int
    tier: str = "memory"


@dataclass(frozen=True)
class Job:
    """What a snapshot must agree with: see `run_identity`. An empty `data_digest` is not compared."""

    run_id: str
    identity: Mapping[str, Any]
    data_digest: str = ""


class NotResumable(Exception):  # noqa: N818 - an outcome, not a defect
    """This step cannot be resumed from memory; the message says why."""


class ResumeFolder:
    """`path`: `.../checkpoint-N`; `tier`: `peer` where any of it came from there, else `memory`.

    A context manager; `release` once the ranks have resumed or the attempt is over. What a rank has mapped stays in
    memory until it lets go of it. `skipped`: damaged copies of which another one was good.
    """

    def __init__(
        self, root: Path, manifest: Manifest, fds: Sequence[int], *, tier: str = "memory", skipped: Sequence[str] = ()
    ) -> None:
        self._root = root
        self._fds = list(fds)
        self.path = _folder_in(root, manifest.step)
        self.manifest = manifest
        self.tier = tier
        self.skipped = tuple(skipped)

    @property
    def held_bytes(self) -> int:
        return sum(allocated_bytes(fd) for fd in self._fds)

    @property
    def is_released(self) -> bool:
        return not self._fds

    def release(self) -> None:
        """May be called again."""
        fds, self._fds = self._fds, []
        if fds:
            shutil.rmtree(self._root, ignore_errors=True)
        for fd in fds:
            os.close(fd)

    def __enter__(self) -> ResumeFolder:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()


def materialise(
    whole: WholeStep,
    copies: Mapping[int, Sequence[HeldSnapshot]],
    job: Job,
    *,
    within: Path | None = None,
    cancelled: Callable[[], bool] = lambda: False,
) -> ResumeFolder:
    """Copy and verify the step. `copies`: of each of its ranks, the preferred one first; where that is damaged the next
    one is taken. `within`: the folder to make it in, else that for temporary files.

    Raises NotResumable, also where memory or descriptors are not to be had, and Cancelled. Nothing is left behind then.
    """
    with ExitStack() as undo:
        copied = _copy_ranks(whole, copies, undo, cancelled)
        manifest = _manifest_of(whole, [rank.snapshot for rank in copied], job)
        try:
            root = Path(tempfile.mkdtemp(prefix="ftlaunch-resume-", dir=within))
            undo.callback(shutil.rmtree, root, ignore_errors=True)
            _write_folder(_folder_in(root, whole.step), manifest, copied)
        except OSError as error:
            raise NotResumable(f"its folder cannot be made: {error}") from error
        missing = missing_of(_folder_in(root, whole.step), manifest)
        if missing:
            raise NotResumable(missing)
        undo.pop_all()
    return ResumeFolder(
        root,
        manifest,
        [fd for rank in copied for fd in rank.fds],
        tier="peer" if any(rank.tier == "peer" for rank in copied) else "memory",
        skipped=[reason for rank in copied for reason in rank.skipped],
    )


def allocated_bytes(fd: int) -> int:
    """Of memory behind a memfd: what has been written to, not what its size spans."""
    return os.fstat(fd).st_blocks * 512  # the unit of st_blocks, whatever the page size


@dataclass(frozen=True)
class _CopiedRank:
    snapshot: Snapshot
    fds: tuple[int, ...]  # one for each file
    tier: str
    skipped: tuple[str, ...]


def _copy_ranks(
    whole: WholeStep,
    copies: Mapping[int, Sequence[HeldSnapshot]],
    undo: ExitStack,
    cancelled: Callable[[], bool],
) -> list[_CopiedRank]:
    """By rank. `undo` closes what has been copied, also when another rank fails."""
    with ThreadPoolExecutor(min(_MAX_COPYING, whole.world_size), "copy-snapshot") as pool:
        copying = [pool.submit(_copy_rank, copies[rank], cancelled) for rank in range(whole.world_size)]
    for done in copying:
        if done.exception() is None:
            for fd in done.result().fds:
                undo.callback(os.close, fd)
    return [done.result() for done in copying]


def _copy_rank(copies: Sequence[HeldSnapshot], cancelled: Callable[[], bool]) -> _CopiedRank:
    damaged: list[str] = []
    for held in copies:
        with ExitStack() as undo:
            try:
                fds = tuple(_copy(held, entry, undo, cancelled) for entry in held.snapshot.files)
            except (OSError, NotResumable) as error:
                damaged.append(f"{held.tier} of rank {held.snapshot.identity.rank}: {error}")
            else:
                undo.pop_all()
                return _CopiedRank(held.snapshot, fds, held.tier, tuple(damaged))
    raise NotResumable("; ".join(damaged))


def _copy(held: HeldSnapshot, entry: FileEntry, undo: ExitStack, cancelled: Callable[[], bool]) -> int:
    fd = create_memory(f"ftlaunch-{held.snapshot.identity.run_id}-resume-{held.snapshot.identity.step}")
    undo.callback(os.close, fd)
    copy_file(held.fd, entry, fd, cancelled)
    reason = verify_file(fd, replace(entry, offset=0), cancelled)
    if reason:
        raise NotResumable(reason)
    return fd


def _manifest_of(whole: WholeStep, snapshots: Sequence[Snapshot], job: Job) -> Manifest:
    """Of the files of all ranks; the rest is rank 0's note. Raises NotResumable."""
    files: dict[str, Any] = {}
    for entry in (entry for snapshot in snapshots for entry in snapshot.files):
        if files.setdefault(entry.name, asdict(entry.record)) != asdict(entry.record):
            raise NotResumable(f"two ranks have written {entry.name}, and not the same")
    try:
        manifest = parse_manifest(json.dumps({**snapshots[0].note, "files": files}))
    except (ValueError, KeyError, TypeError) as error:
        raise NotResumable(f"the note of rank 0 makes no {MANIFEST_NAME} ({error})") from error
    if (manifest.step, manifest.world_size) != (whole.step, whole.world_size):
        raise NotResumable(f"the note of rank 0 is of step {manifest.step} and {manifest.world_size} ranks")
    if manifest.run_id != job.run_id:
        raise NotResumable(f"it is of run {manifest.run_id}, this is {job.run_id}")
    changed = differences(manifest.identity, job.identity)
    if changed:
        listed = ", ".join(f"{key}: {old!r} there, {new!r} now" for key, old, new in changed)
        raise NotResumable(f"it was made with other settings ({listed})")
    if manifest.data_digest and job.data_digest and manifest.data_digest != job.data_digest:
        raise NotResumable("it was trained on other data (data_digest)")
    return manifest


def _folder_in(root: Path, step: int) -> Path:
    return root / f"checkpoint-{step}"


def _write_folder(folder: Path, manifest: Manifest, copied: Sequence[_CopiedRank]) -> None:
    """The manifest needs no fsync: the folder does not outlive this process."""
    for rank in copied:
        for entry, fd in zip(rank.snapshot.files, rank.fds, strict=True):
            link = folder / entry.name
            link.parent.mkdir(parents=True, exist_ok=True)
            if not link.is_symlink():  # else another rank has written the same
                link.symlink_to(f"/proc/{os.getpid()}/fd/{fd}")
    (folder / MANIFEST_NAME).write_text(manifest.to_json(), "utf-8")
