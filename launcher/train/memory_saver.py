"""Snapshots of this rank in memory that its agent owns: taken after a step, written while the next forward pass runs.

Invariants:
- `fence` returns only when the snapshot of the last step is sealed. It comes before the last backward pass of a step,
  so before the collective without which no rank can finish that step. A rank that has finished step s knows that every
  rank has sealed step s - 1, and two slots hold the last two: there is always a step that all ranks have.
- A slot whose snapshot is on its way to the output folder is not written to until the agent says that it is there.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from launcher.checkpoint.slots import slot_to_write
from launcher.checkpoint.snapshot import SlotWriter, Snapshot, SnapshotIdentity, read_snapshot
from launcher.link import Link, Message
from launcher.train.capture import Part
from launcher.train.snapshot_rhythm import SnapshotRhythm

log = logging.getLogger("ftlaunch.resilience")

SAY_EVERY_S = 20.0  # while the training waits for a slow disk
EXCHANGE_WAIT_S = 30.0  # the agent answers in any case, sooner
DURABLE_WAIT_S = 3600.0  # for a checkpoint to reach the output folder; the agent says what it is waiting for


@dataclass(frozen=True)
class _Job:
    slot: int
    identity: SnapshotIdentity
    parts: Sequence[Part]
    note: Mapping[str, Any]
    for_disk: bool
    began_at_s: float
    after: Any  # a CUDA event: what the captured tensors are the result of


class CheckpointNotDurable(RuntimeError):  # noqa: N818 - an outcome, not a defect
    """A checkpoint has not reached the output folder; the reason is the agent's."""


class MemorySaver:
    """The slots of one rank, and the thread that writes them.

    `slots`: descriptors of memory that the agent owns. `resumed_from`: step that the run goes on from; its snapshot
    stays until this generation has a newer one that all ranks have.
    """

    def __init__(
        self,
        slots: Sequence[int],
        link: Link,
        rhythm: SnapshotRhythm,
        *,
        generation: int,
        resumed_from: int,
        peers: bool = False,
    ) -> None:
        self._slots = list(slots)
        self._link = link
        self.rhythm = rhythm
        self._generation = generation
        self._resumed_from = resumed_from
        self._peers = peers
        self._exchanged_step = 0
        self._snapshots: list[Snapshot | None] = [read_snapshot(fd) for fd in slots]
        self._num_sealed = 0
        self._sealed_at_s = 0.0
        self._held: dict[int, int] = {}  # step on its way to the output folder -> slot
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._idle = threading.Event()
        self._idle.set()
        self._failure: BaseException | None = None
        self._under_way: _Job | None = None  # the training thread's: since the last capture, until the next fence
        self._stall_s = 0.0  # what it has cost the training so far
        self._thread = threading.Thread(target=self._write_all, name="snapshots", daemon=True)
        self._thread.start()

    # -- the training thread -------------------------------------------------------------------------------------------

    def save(
        self,
        identity: SnapshotIdentity,
        capture: Callable[[], Sequence[Part]],
        note: Callable[[], Mapping[str, Any]],
        *,
        for_disk: bool,
    ) -> None:
        """Capture now, write in the background."""
        started = time.monotonic()
        self.fence()
        slot = self._free_slot(for_disk=for_disk)
        parts = capture()
        after = None
        if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            after = torch.cuda.Event()  # type: ignore[no-untyped-call]
            after.record()
        if for_disk:
            self._held[identity.step] = slot
        self._idle.clear()
        self._under_way = _Job(slot, identity, parts, note(), for_disk, started, after)
        self._jobs.put(self._under_way)
        self._stall_s = time.monotonic() - started

    def fence(self) -> None:
        """Wait until nothing captured is still to be written. Raises what the writing has failed with."""
        if self._under_way is None:
            return
        started = time.monotonic()
        self._idle.wait()
        job, self._under_way = self._under_way, None
        if self._failure is not None:
            raise self._failure
        if self._peers:
            self._wait_until_exchanged(job.identity.step)
        stall_s = self._stall_s + time.monotonic() - started
        if not job.for_disk:
            self.rhythm.stalled(stall_s)
            self.rhythm.sealed(self._sealed_at_s - job.began_at_s)
        self._link.send("stalled", step=job.identity.step, for_disk=job.for_disk, seconds=round(stall_s, 6))

    def on_message(self, message: Message) -> None:
        """What the agent says of checkpoints. Raises CheckpointNotDurable."""
        if message["kind"] == "exchanged":
            self._exchanged_step = max(self._exchanged_step, int(message["step"]))
        elif message["kind"] == "durable":
            self._held.pop(int(message["step"]), None)
            if message["error"]:
                raise CheckpointNotDurable(
                    f"the checkpoint of step {message['step']} was not saved: {message['error']}"
                )

    def _wait_until_exchanged(self, step: int) -> None:
        """With other nodes: the last step is safe only when the next node has it, too."""
        deadline = time.monotonic() + EXCHANGE_WAIT_S
        while self._exchanged_step < step:
            message = self._link.wait_for("exchanged", max(0.0, deadline - time.monotonic()))
            if message is None:
                if not self._link.closed:
                    log.warning("the agent has not said within %.0f s that step %d is exchanged", EXCHANGE_WAIT_S, step)
                return
            self.on_message(message)

    def wait_until_durable(self) -> None:
        """Until every checkpoint has reached the output folder. Raises CheckpointNotDurable."""
        self.fence()
        deadline = time.monotonic() + DURABLE_WAIT_S
        while self._held:
            self._wait_for_durable(deadline)

    def close(self) -> None:
        self._jobs.put(None)
        self._thread.join()

    def _free_slot(self, *, for_disk: bool) -> int:
        """Waits for the checkpoint before where that one has not reached the output folder: two slots have to be left
        for the steps that follow."""
        deadline = time.monotonic() + DURABLE_WAIT_S
        while for_disk and self._held:
            self._wait_for_durable(deadline)
        keep = {self._resumed_from} if self._num_sealed < 2 else set()
        held = set(self._held.values())
        slot = slot_to_write(self._snapshots, generation=self._generation, keep=keep, held=held)
        if slot is None:  # of three slots at most one is kept, and one is held
            raise RuntimeError(f"no slot is left for a snapshot ({len(self._slots)}, of which {len(held)} are held)")
        return slot

    def _wait_for_durable(self, deadline: float) -> None:
        message = self._link.wait_for("durable", min(SAY_EVERY_S, max(0.0, deadline - time.monotonic())))
        if message is not None:
            self.on_message(message)
        elif self._link.closed:
            raise CheckpointNotDurable("the agent is gone")
        elif time.monotonic() >= deadline:
            steps = ", ".join(map(str, sorted(self._held)))
            raise CheckpointNotDurable(f"step {steps} has not reached the output folder within {DURABLE_WAIT_S:.0f} s")

    # -- the writing thread --------------------------------------------------------------------------------------------

    def _write_all(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                self._write(job)
            except BaseException as error:  # noqa: BLE001 - raised again in the training thread, at the next fence
                self._failure = error
            del job  # its parts may be a whole model
            self._idle.set()

    def _write(self, job: _Job) -> None:
        writer = SlotWriter(self._slots[job.slot])
        self._snapshots[job.slot] = None
        with _reading_after(job.after):
            for part in job.parts:
                part.write(writer)
        snapshot = writer.seal(job.identity, job.note)
        self._snapshots[job.slot] = snapshot
        self._num_sealed += 1
        self._sealed_at_s = time.monotonic()
        self._link.send(
            "snapshot",
            step=job.identity.step,
            slot=job.slot,
            for_disk=job.for_disk,
            bytes=snapshot.num_bytes,
            seconds=round(self._sealed_at_s - job.began_at_s, 6),
        )


@contextmanager
def _reading_after(event: Any) -> Iterator[None]:
    """On a GPU: copies to the host go over a stream of their own, beside the forward pass, once `event` has
    happened."""
    if event is None:
        yield
        return
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_event(event)
    with torch.cuda.stream(stream):
        yield
