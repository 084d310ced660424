"""Checkpoints on their way from the ranks' snapshots to the output folder, while the ranks train on.

Invariant: every checkpoint that ranks have asked for is settled once, with its name given or with a reason, unless the
turn ends before. Until then its slots are not written to (the ranks see to that).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from launcher.agent.courier_client import CourierClient, Permit
from launcher.agent.crew import Crew, Turn
from launcher.checkpoint.manifest import FileRecord, Manifest
from launcher.checkpoint.snapshot import Snapshot
from launcher.cluster.messages import WrittenFile
from launcher.courier.messages import Cause, Failure, Progress, Published, Written
from launcher.event_loop import EventLoop
from launcher.host.storage import StorageKind
from launcher.link import Message

_MAX_TRIES = 3  # of a request whose courier has died
_SAY_PROGRESS_AFTER_S = 20.0
_MIB = 1 << 20


@dataclass
class _Save:
    """One checkpoint of this node's ranks."""

    step: int
    asked_at_s: float
    stall_s: float = 0.0
    snapshots: dict[int, tuple[Snapshot, int]] = field(default_factory=dict)  # by rank: with the slot's descriptor
    request: int | None = None
    num_tries: int = 0
    said_at_s: float = 0.0

    @property
    def name(self) -> str:
        return f"checkpoint-{self.step}"


class DiskSaves:
    """Of one turn after the other."""

    def __init__(
        self,
        courier: CourierClient,
        crew: Crew,
        output_dir: Path,
        storage: StorageKind,
        *,
        keep: int,
        saved: Callable[[Mapping[str, Any]], None],
        say: Callable[[str], None],
    ) -> None:
        """`saved`: gets the fields of the event `checkpoint_saved`."""
        self._courier, self._crew, self._output_dir, self._storage = courier, crew, output_dir, storage
        self._keep, self._saved, self._say = keep, saved, say
        self._turn: Turn | None = None
        self._saves: dict[int, _Save] = {}

    def begin(self, turn: Turn) -> None:
        self._turn = turn

    def finish(self, loop: EventLoop, bound_s: float) -> None:
        """The ranks are gone. What all of them have sealed is still saved, within `bound_s`."""
        deadline = time.monotonic() + bound_s
        while self._turn is not None and any(save.request is not None for save in self._saves.values()):
            if time.monotonic() > deadline:
                return
            loop.wait(max(0.0, min(1.0, deadline - time.monotonic())))

    def end(self) -> None:
        """The turn is over: what is under way is given up. Its generation's staging is cleared by the next one."""
        for save in self._saves.values():
            if save.request is not None:
                self._courier.cancel(save.request)
        self._saves = {}
        self._turn = None

    def on_snapshot(self, rank: int, message: Message, snapshot: Snapshot, fd: int) -> None:
        """A rank has sealed a snapshot that is to go to the output folder."""
        if self._turn is None:
            return
        step = int(message["step"])
        save = self._saves.setdefault(step, _Save(step, time.monotonic() - float(message["seconds"])))
        save.snapshots[rank] = (snapshot, fd)
        if len(save.snapshots) == self._turn.mine.num_ranks:
            self._write(self._turn, save)

    def stalled(self, message: Message) -> None:
        """How long a rank's training has waited for it."""
        save = self._saves.get(int(message["step"]))
        if save is not None:
            save.stall_s = max(save.stall_s, float(message["seconds"]))

    def publish(self, step: int, files: Sequence[WrittenFile]) -> None:
        """On the leader, once the parts of all nodes are written."""
        save, turn = self._saves.get(step), self._turn
        if save is None or turn is None:
            return
        note = save.snapshots[0][0].note  # the leader has rank 0
        records = {file.name: FileRecord(file.size_bytes, file.xxh3_128) for file in files}
        save.num_tries = 0
        self._publish(turn, save, Manifest(**{**note, "files": records}))

    def settled(self, step: int) -> None:
        self._saves.pop(step, None)

    def save_now(
        self, snapshots: Sequence[tuple[Snapshot, int]], generation: int, loop: EventLoop, bound_s: float
    ) -> str:
        """Between two turns, of all ranks, rank 0 first: wait until they are in the output folder. "" or why they are
        not."""
        first = snapshots[0][0]
        name, place = f"checkpoint-{first.identity.step}", (self._output_dir, self._storage, generation)
        deadline = time.monotonic() + bound_s
        answers: list[Written | Published | Failure] = []

        def wait() -> Written | Published | Failure:
            while not answers:
                if time.monotonic() > deadline:
                    return Failure(Cause.CANCELLED, f"not within {bound_s:g} s")
                loop.wait(max(0.0, min(1.0, deadline - time.monotonic())))
            return answers.pop()

        self._courier.write([(snapshot.identity, fd) for snapshot, fd in snapshots], *place, name, answers.append)
        outcome = wait()
        if isinstance(outcome, Written):
            manifest = Manifest(**{**first.note, "files": outcome.files})
            self._courier.publish(manifest, *place, name, _permit_always, answers.append, keep=self._keep)
            outcome = wait()
        if isinstance(outcome, Failure):
            self._courier.discard(*place, name)
            return f"{name} could not be saved from memory: {outcome.reason}"
        if isinstance(outcome, Published):
            self._tell(_Save(first.identity.step, deadline - bound_s), outcome)
        return ""

    # -- requests ------------------------------------------------------------------------------------------------------

    def _write(self, turn: Turn, save: _Save) -> None:
        save.num_tries += 1
        save.request = self._courier.write(
            [(snapshot.identity, fd) for snapshot, fd in save.snapshots.values()],
            self._output_dir,
            self._storage,
            turn.number,
            save.name,
            partial(self._on_written, turn, save),
            partial(self._on_progress, save),
        )

    def _on_written(self, turn: Turn, save: _Save, outcome: Written | Failure) -> None:
        save.request = None
        if not self._is_wanted(turn, save):
            return
        if isinstance(outcome, Written):
            files = [WrittenFile(name, r.size_bytes, r.xxh3_128) for name, r in outcome.files.items()]
            self._crew.part_written(turn, save.step, files, "")
        elif outcome.cause is Cause.LOST and save.num_tries < _MAX_TRIES:
            self._write(turn, save)
        else:
            self._give_up(turn, save)
            self._crew.part_written(turn, save.step, [], outcome.reason)

    def _publish(self, turn: Turn, save: _Save, manifest: Manifest) -> None:
        save.num_tries += 1
        save.request = self._courier.publish(
            manifest,
            self._output_dir,
            self._storage,
            turn.number,
            save.name,
            partial(self._permit, turn),
            partial(self._on_published, turn, save, manifest),
            keep=self._keep,
        )

    def _permit(self, turn: Turn, permit: Permit) -> None:
        """As late as possible: a generation that is over must not publish under the feet of the next one."""
        reason = self._crew.may_commit(turn) if self._turn is turn else f"generation {turn.number} is over"
        permit(not reason, reason)

    def _on_published(self, turn: Turn, save: _Save, manifest: Manifest, outcome: Published | Failure) -> None:
        save.request = None
        if not self._is_wanted(turn, save):
            return
        if isinstance(outcome, Published):
            self._tell(save, outcome)
            self._crew.published(turn, save.step, "")
        elif outcome.cause is Cause.LOST and save.num_tries < _MAX_TRIES:
            self._publish(turn, save, manifest)
        else:
            self._give_up(turn, save)
            self._crew.published(turn, save.step, outcome.reason)

    def _give_up(self, turn: Turn, save: _Save) -> None:
        """A full disk gets its room back."""
        self._courier.discard(self._output_dir, self._storage, turn.number, save.name)

    def _is_wanted(self, turn: Turn, save: _Save) -> bool:
        return self._turn is turn and self._saves.get(save.step) is save

    # -- what people hear ----------------------------------------------------------------------------------------------

    def _on_progress(self, save: _Save, progress: Progress) -> None:
        now = time.monotonic()
        if progress.begun and now - max(save.said_at_s, save.asked_at_s) > _SAY_PROGRESS_AFTER_S:
            save.said_at_s = now
            done, total = progress.bytes_done // _MIB, progress.bytes_total // _MIB
            self._say(f"{save.name}: {done} of {total} MiB are in the output folder")

    def _tell(self, save: _Save, published: Published) -> None:
        if published.prune_error:
            self._say(f"older checkpoints could not be removed: {published.prune_error}")
        self._saved(
            {
                "step": save.step,
                "tier": "disk",
                "path": str(published.path),
                "bytes": published.num_bytes,
                "stall_seconds": round(save.stall_s, 6),
                "durable_seconds": round(time.monotonic() - save.asked_at_s, 3),
                "pruned": [path.name for path in published.pruned],
            }
        )


def _permit_always(permit: Permit) -> None:
    """Between two turns of a node that is alone nobody else is at work."""
    permit(True, "")
