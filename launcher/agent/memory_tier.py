"""The memory that the agent lends its ranks for their snapshots, and the way back from it.

Invariants: slots outlive the ranks that write to them, over all generations of one agent, and what ranks resume from
are copies (see `resume_folder.py`). The slots of a rank that this node has not got any more stay until the ranks of the
present generation have something newer that is whole.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from launcher.agent.resume_folder import HeldSnapshot, Job, NotResumable, ResumeFolder, allocated_bytes, materialise
from launcher.checkpoint.snapshot import NUM_SLOTS, SnapshotIdentity, create_memory, read_snapshot
from launcher.checkpoint.whole_step import WholeStep, newest_whole_step, whole_steps


@dataclass(frozen=True)
class Refused:
    """A step that was whole, or a copy of one rank's part of it, that was not taken."""

    whole: WholeStep
    reason: str


@dataclass(frozen=True)
class FromMemory:
    """`taken` is None where the run resumes from disk or from step 0. `refused`: newest first."""

    taken: ResumeFolder | None
    refused: tuple[Refused, ...] = ()
    whole: WholeStep | None = None  # that was taken


class MemoryTier:
    """For one run on one node. Not for several threads at once: `resume` may run aside, nothing else meanwhile."""

    def __init__(self, run_id: str, scratch: Path | None = None) -> None:
        """`scratch`: where folders to resume from are made."""
        self._run_id = run_id
        self._scratch = scratch
        self._slots: dict[int, tuple[int, ...]] = {}
        self._generation = 0
        self._ranks: frozenset[int] = frozenset()
        self._folders: list[ResumeFolder] = []

    def begin(self, generation: int, ranks: Collection[int]) -> Mapping[int, tuple[int, ...]]:
        """The slots of each rank that this node has in the generation, with what lies in them.

        Raises OSError where descriptors are not to be had; then nothing has changed.
        """
        with ExitStack() as undo:
            new = {rank: self._create(rank, undo) for rank in ranks if rank not in self._slots}
            undo.pop_all()
        self._slots |= new
        self._generation, self._ranks = generation, frozenset(ranks)
        return {rank: self._slots[rank] for rank in ranks}

    def inventory(self) -> list[HeldSnapshot]:
        """Every sealed snapshot of this run, of any generation. Reads headers, no files. Raises OSError."""
        return [held for rank in sorted(self._slots) for held in self._held_of(rank)]

    def resume(
        self,
        job: Job,
        *,
        elsewhere: Iterable[HeldSnapshot] = (),
        not_below: int = 0,
        is_trusted: Callable[[WholeStep], bool] = lambda whole: True,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> FromMemory:
        """The newest step that is whole, agrees with the job and has the content that was written.

        `elsewhere`: what peers have of the ranks; of two copies that of this node is preferred. `not_below`: the step
        that there is on disk. `is_trusted`: whether a step may be taken. The ranks must be gone. Raises Cancelled; the
        folder that is returned is the caller's to release.
        """
        self._folders = [folder for folder in self._folders if not folder.is_released]
        found = [held for held in (*self.inventory(), *elsewhere) if held.snapshot.identity.run_id == job.run_id]
        refused: list[Refused] = []
        for whole in whole_steps(held.snapshot.identity for held in found):
            if whole.step < not_below or not is_trusted(whole):
                continue
            copies: dict[int, list[HeldSnapshot]] = {}
            for held in found:
                if whole.has(held.snapshot.identity):
                    copies.setdefault(held.snapshot.identity.rank, []).append(held)
            try:
                folder = materialise(whole, copies, job, within=self._scratch, cancelled=cancelled)
            except NotResumable as reason:
                refused.append(Refused(whole, str(reason)))
                continue
            self._folders.append(folder)
            refused += [Refused(whole, reason) for reason in folder.skipped]
            return FromMemory(folder, tuple(refused), whole)
        return FromMemory(None, tuple(refused))

    def retire(self, elsewhere: Iterable[SnapshotIdentity] = ()) -> frozenset[int]:
        """Close the slots of ranks that this node does not have any more, once the present generation has a step that
        is whole; returns these ranks. `elsewhere`: what other nodes have. Raises OSError.

        Cheap while there is nothing to close: may be called for each snapshot.
        """
        without_successor = self._slots.keys() - self._ranks
        if not without_successor:
            return frozenset()
        here = [held.snapshot.identity for rank in self._ranks for held in self._held_of(rank)]
        whole = newest_whole_step([*here, *elsewhere])
        if whole is None or whole.generation < self._generation:
            return frozenset()
        for rank in without_successor:
            self._close(self._slots.pop(rank))
        return frozenset(without_successor)

    def drop_others(self) -> None:
        """Close the slots of ranks that this node does not have any more: the present generation has something newer
        that is whole, on whatever nodes."""
        for rank in self._slots.keys() - self._ranks:
            self._close(self._slots.pop(rank))

    @property
    def held_bytes(self) -> int:
        """Memory in slots, and in resume folders that have not been released."""
        slots = sum(allocated_bytes(fd) for fds in self._slots.values() for fd in fds)
        return slots + sum(folder.held_bytes for folder in self._folders)

    def forget(self) -> None:
        """Give all of it back: at the end of the run. May be called again."""
        for folder in self._folders:
            folder.release()
        for fds in self._slots.values():
            self._close(fds)
        self._folders, self._slots, self._ranks = [], {}, frozenset()

    def _held_of(self, rank: int) -> list[HeldSnapshot]:
        read = ((read_snapshot(fd), fd) for fd in self._slots[rank])
        return [
            HeldSnapshot(snapshot, fd)
            for snapshot, fd in read
            if snapshot is not None and snapshot.identity.rank == rank and snapshot.identity.run_id == self._run_id
        ]

    def _create(self, rank: int, undo: ExitStack) -> tuple[int, ...]:
        fds = []
        for slot in range(NUM_SLOTS):
            fds.append(create_memory(f"ftlaunch-{self._run_id}-rank-{rank}-slot-{slot}"))
            undo.callback(os.close, fds[-1])
        return tuple(fds)

    @staticmethod
    def _close(fds: tuple[int, ...]) -> None:
        for fd in fds:
            os.close(fd)
