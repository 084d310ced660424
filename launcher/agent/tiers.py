"""Where the checkpoints of this node's ranks are: in memory of this process, and in the output folder; and which one an
attempt resumes from.

Invariant: the memory outlives every rank and every attempt of this start, and nothing of it the start.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from launcher.agent.courier_client import CourierClient
from launcher.agent.crew import Crew, Turn
from launcher.agent.disk_saves import DiskSaves
from launcher.agent.lifecycle import RankExit
from launcher.agent.memory_tier import FromMemory, MemoryTier
from launcher.agent.recorder import RunRecorder
from launcher.agent.resume import (
    LookAgain,
    Resume,
    begin_generation,
    look_for_resume,
    newest_step,
    take_resume,
)
from launcher.agent.resume_folder import Job, NotResumable, ResumeFolder
from launcher.agent.ring import Ring
from launcher.checkpoint.snapshot import read_snapshot
from launcher.checkpoint.whole_step import WholeStep, whole_steps
from launcher.cluster.messages import WrittenFile
from launcher.event_loop import CalledOff, EventLoop
from launcher.link import Message
from launcher.plan.spec import RankSpec

_FINISH_S = 10.0  # that a restart waits for a checkpoint on its way to the output folder


class Tiers:
    """Of one start. Nothing is there (no memory, no courier) where `spec.memory_every` is None."""

    def __init__(
        self,
        spec: RankSpec,
        loop: EventLoop,
        crew: Crew,
        recorder: RunRecorder,
        environ: Mapping[str, str],
        token: str,
        logs: Path,
        scratch: Path,
        *,
        every_steps: int,
        keep: int,
        tell: Callable[..., None],
        frozen: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """`tell`: says something to all ranks. `frozen`: training settings of which the saved state has its own."""
        self._spec, self._loop, self._crew, self._recorder, self._frozen = spec, loop, crew, recorder, frozen
        self._output_dir = spec.output_path
        self._tell = tell
        self._every_steps = every_steps
        self._num_exchanged = 0  # in this turn
        self._say = recorder.console.say
        self._turn: Turn | None = None
        self._folder: ResumeFolder | None = None
        self._resumed: WholeStep | None = None  # what the folder is of
        self._waits_for: set[int] = set()  # ranks that still need the folder
        self._slots: Mapping[int, Sequence[int]] = {}
        self._generation = 0  # of the latest attempt
        self._distrusted: WholeStep | None = None  # from which no rank could go on; nothing older is tried either
        self._doubted: WholeStep | None = None  # with several nodes: from which none has gone on, once
        self._memory: MemoryTier | None = None
        self._courier: CourierClient | None = None
        self._ring: Ring | None = None
        if spec.memory_every is not None:
            self._memory = MemoryTier(spec.run_id, scratch)
            self._courier = CourierClient(loop, environ, token, logs / "courier.log", self._say)
            self._saves = DiskSaves(
                self._courier,
                crew,
                self._output_dir,
                spec.storage_kind,
                keep=keep,
                saved=recorder.checkpoint_saved,
                say=self._say,
            )
            if crew.peer_place is not None:
                place = crew.peer_place(spec.run_id)
                self._ring = Ring(
                    self._courier,
                    place,
                    self._memory,
                    crew,
                    loop,
                    self._say,
                    self._on_exchanged,
                )

    @property
    def has_ring(self) -> bool:
        """Whether nodes keep each other's snapshots."""
        return self._ring is not None

    @property
    def pids(self) -> list[int]:
        """Processes of its own."""
        return self._courier.pids if self._courier is not None else []

    # -- before an attempt ---------------------------------------------------------------------------------------------

    def resume(self, turn: Turn, called_off: Callable[[], bool]) -> Resume:
        """On the leader. Memory comes before disk where it is not older. Looking may take long, and is done aside;
        taking is short, and only where the turn is still on. Raises CalledOff, UserError, OSError."""
        self._release_folder()  # of a turn that was over before it began
        return self._from_memory(turn, called_off) or self._from_disk(turn, called_off)

    def _from_memory(self, turn: Turn, called_off: Callable[[], bool]) -> Resume | None:
        if self._memory is None:
            return None
        if not self._crew.alone:
            return self._from_all_memories(turn, called_off)
        look = partial(
            self._memory.resume,
            self._job,
            not_below=newest_step(self._output_dir),
            is_trusted=self._is_trusted,
            cancelled=called_off,
        )
        found: FromMemory = self._loop.aside(look, called_off)
        for refused in found.refused:
            self._reject(refused.whole.step, refused.reason)
        if found.taken is None:
            return None
        return self._take(turn, found.taken, found.whole, called_off)

    def _from_all_memories(self, turn: Turn, called_off: Callable[[], bool]) -> Resume | None:
        """Over the memory of all nodes of the turn."""
        if self._ring is None:
            return None
        newest = newest_step(self._output_dir)
        whole = self._ring.newest_whole(
            turn, self._spec.run_id, lambda one: one.step >= newest and self._is_trusted(one), called_off
        )
        if whole is None:
            return None
        try:
            folder = self._ring.assemble(turn, whole, self._job, called_off)
        except NotResumable as reason:
            self._reject(whole.step, str(reason))
            self._distrusted = whole
            return None
        return replace(self._take(turn, folder, whole, called_off), snapshots=whole)

    def _take(
        self, turn: Turn, folder: ResumeFolder, whole: WholeStep | None, called_off: Callable[[], bool]
    ) -> Resume:
        self._folder, self._resumed = folder, whole
        if called_off() or self._crew.may_commit(turn):
            self._release_folder()
            raise CalledOff
        begin_generation(self._output_dir, turn.number, self._spec.storage_kind)
        manifest = folder.manifest
        batch = manifest.batch_of_run
        return Resume(str(folder.path), manifest.step, manifest.samples_seen, manifest.world_size, batch, folder.tier)

    def with_own_folder(self, turn: Turn, spec: RankSpec, called_off: Callable[[], bool]) -> RankSpec | None:
        """What the leader has ordered, with this node's own copy of what the ranks resume from. None where the turn is
        over, or there is no such copy."""
        if spec.resume_snapshots is None or turn.leads:
            return spec
        self._release_folder()
        whole = WholeStep(**spec.resume_snapshots)
        if self._ring is None:
            self._crew.failed(turn, "this node keeps no snapshots in memory")
            return None
        try:
            self._folder, self._resumed = self._ring.assemble(turn, whole, self._job, called_off), whole
        except CalledOff:
            return None
        except NotResumable as reason:
            self._reject(whole.step, str(reason))
            self._crew.failed(turn, f"step {whole.step} cannot be had from memory")
            return None
        return replace(spec, resume_from=str(self._folder.path), resume_tier=self._folder.tier)

    @property
    def _job(self) -> Job:
        return Job(self._spec.run_id, self._spec.identity)

    def _from_disk(self, turn: Turn, called_off: Callable[[], bool]) -> Resume:
        look = partial(look_for_resume, self._output_dir, self._spec.identity, cancelled=called_off)
        while True:
            choice = self._loop.aside(look, called_off)
            if called_off() or self._crew.may_commit(turn):
                raise CalledOff
            try:
                return take_resume(
                    self._output_dir,
                    choice,
                    turn.number,
                    self._recorder.events,
                    self._say,
                    frozen=self._frozen,
                    run_id=self._spec.run_id,
                    kind=self._spec.storage_kind,
                )
            except LookAgain as change:
                self._say(f"looking once more for the checkpoint to continue from: {change}")

    def _is_trusted(self, whole: WholeStep) -> bool:
        refused = self._distrusted
        return refused is None or (whole.generation, whole.step) > (refused.generation, refused.step)

    def _reject(self, step: int, reason: str) -> None:
        self._recorder.events.emit("checkpoint_rejected", path=f"memory: step {step}", reason=reason, kept_as=None)
        self._say(f"step {step} in memory is refused: {reason}")

    # -- during an attempt ---------------------------------------------------------------------------------------------

    def begin(self, turn: Turn) -> None:
        self._turn, self._generation = turn, turn.number
        self._num_exchanged = 0
        self._waits_for = set(turn.ranks)
        if self._memory is not None:
            self._slots = self._memory.begin(turn.number, turn.ranks)
            self._saves.begin(turn)
        if self._ring is not None:
            self._ring.begin(turn)

    def slots_of(self, rank: int) -> Sequence[int]:
        return self._slots.get(rank, ())

    def on_message(self, rank: int, message: Message) -> None:
        if message["kind"] == "step":
            self._waits_for.discard(rank)
            if not self._waits_for:
                self._release_folder()
        elif message["kind"] == "snapshot" and self._memory is not None:
            self._memory.retire()
            fd = self._slots[rank][int(message["slot"])]
            snapshot = read_snapshot(fd)
            if snapshot is not None and self._ring is not None:
                self._ring.on_snapshot(snapshot.identity, fd)
            if snapshot is not None and message["for_disk"]:
                self._saves.on_snapshot(rank, message, snapshot, fd)
        elif message["kind"] == "stalled" and self._memory is not None and message["for_disk"]:
            self._saves.stalled(message)

    def _on_exchanged(self, step: int, error: str) -> None:
        self._num_exchanged += not error
        if self._num_exchanged == 2 and self._memory is not None:  # so the first one is whole on all nodes
            self._memory.drop_others()
        self._tell("exchanged", step=step, error=error)

    def publish(self, step: int, files: Sequence[WrittenFile]) -> None:
        self._saves.publish(step, files)

    def settled(self, step: int) -> None:
        self._saves.settled(step)

    # -- after an attempt ----------------------------------------------------------------------------------------------

    def end(self, *, stepped: bool, failure: RankExit | None) -> None:
        """The ranks are gone. A state in memory from which they could not go on, although nobody has killed them, is
        not tried again: it may be what they cannot go on from. With several nodes a turn may be over for other
        reasons: there it counts the second time."""
        resumed = self._resumed
        if self._folder is not None and not stepped and resumed is not None:
            failed_here = failure is not None and failure.signal != signal.SIGKILL and not failure.killed_by_us
            if (failed_here and self._crew.alone) or (not self._crew.alone and resumed == self._doubted):
                self._distrusted = resumed
                self._reject(resumed.step, "the ranks that resumed from it ended before their first step")
            self._doubted = resumed
        self._release_folder()
        if self._memory is not None:
            if self._crew.alone:  # of several nodes others may be gone, and those that are left must not wait
                self._saves.finish(self._loop, _FINISH_S)
            self._saves.end()
            # A rank may have been killed between the last byte of such a snapshot and the word of it.
            self._save_from_memory(_FINISH_S, lambda step: step % self._every_steps == 0)
        self._turn = None
        if self._ring is not None:
            self._ring.end()

    def rescue(self, bound_s: float) -> int | None:
        """The start ends before the run does: what memory has and the output folder has not is saved there, within
        `bound_s`. For a node that is alone. The step, or None where there was nothing to save or it did not succeed."""
        step = self._save_from_memory(bound_s, lambda step: True)
        if step is not None:
            self._say(f"step {step}, which was in memory only, is saved")
        return step

    def _save_from_memory(self, bound_s: float, is_wanted: Callable[[int], bool]) -> int | None:
        """Of a node that is alone: the newest step that memory has whole, where it is newer than the output folder's.
        Its number, or None."""
        if self._memory is None or not self._crew.alone or self._generation == 0:
            return None
        found = self._memory.inventory()
        try:
            newest = newest_step(self._output_dir)
        except OSError as error:  # the run goes on, or ends, as it would have, whatever its storage does
            self._say(f"what is in memory could not be saved: {error}")
            return None
        steps = whole_steps(held.snapshot.identity for held in found)
        whole = next(
            (one for one in steps if one.step > newest and is_wanted(one.step) and self._is_trusted(one)), None
        )
        if whole is None:
            return None
        snapshots = {h.snapshot.identity.rank: h for h in found if whole.has(h.snapshot.identity)}
        outcome = self._saves.save_now(
            [(held.snapshot, held.fd) for _, held in sorted(snapshots.items())], self._generation, self._loop, bound_s
        )
        if outcome:
            self._say(outcome)
        return None if outcome else whole.step

    def close(self) -> None:
        """The run is over."""
        self._release_folder()
        if self._ring is not None:
            self._ring.close()
        if self._courier is not None:
            self._courier.close()
        if self._memory is not None:
            self._memory.forget()

    def _release_folder(self) -> None:
        if self._folder is not None:
            self._folder.release()
            self._folder = self._resumed = None
