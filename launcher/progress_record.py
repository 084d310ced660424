"""How far a rank is, in a page of memory that its agent owns: the rank writes plain numbers, the agent compares them.

Invariants: writing takes no lock, sends nothing and waits for nothing, so it costs a few microseconds and works
whatever the interpreter is stuck in afterwards. A reader may see a write half done: it must rely on a record only when
that has not changed for a while.
"""

from __future__ import annotations

import mmap
import os
import statistics
import struct
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum

# changes, at, phase, place, step, micro-batches, work, collectives, elements, kind, steps: typical, longest, first
_LAYOUT = struct.Struct("=QdBBqqqqq24sddd")
_RECORD_BYTES = 4096
_TYPICAL_OF = 32  # the latest steps, of which the median counts
_LONGEST_OF = 128


class Phase(IntEnum):
    """What a rank is at. Each has its own bound on standing still (`launcher/policy/hang.py`)."""

    STARTING = 0  # connecting, loading, preparing the engine
    ENCODING = 1
    TRAINING = 2
    BATCH = 3  # waiting for its loader
    SNAPSHOT = 4  # taking one in memory, or waiting for its agent to say something
    EVALUATING = 5
    SAVING = 6
    ENDING = 7  # answers to questions, final/


class Place(IntEnum):
    """Where a rank is with its collectives."""

    OUTSIDE = 0
    INSIDE = 1  # a collective of all ranks
    IN_GROUP = 2  # a collective of some ranks, or one whose group is not known
    WAITING = 3  # for one that was begun with async_op


@dataclass(frozen=True, slots=True)
class RankProgress:
    """A rank as its record shows it, and its process as the kernel does.

    step: the last one it has finished. micro_batch: how many it has begun since. work: records encoded, or batches
    evaluated. collectives: how many of all ranks it has entered. kind, elements: of the last collective it has entered.
    still_s: since the record changed. state: of /proc/PID/stat ("T": stopped), "" where it is not known.
    typical_step_s, longest_step_s: 0.0 until steps have been measured.
    """

    rank: int
    node: str
    phase: int
    place: int
    step: int
    micro_batch: int
    work: int
    collectives: int
    kind: str
    elements: int
    still_s: float
    state: str = ""
    typical_step_s: float = 0.0
    longest_step_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Reading:
    """A record at one moment. `first_step_s`: from the begin of training, 0.0 until it has ended. `changes` counts
    writes; `at_s` is when the last one was made (0.0: there was none), on
    the monotonic clock of this machine."""

    changes: int
    at_s: float
    phase: int
    place: int
    step: int
    micro_batch: int
    work: int
    collectives: int
    elements: int
    kind: str
    typical_step_s: float
    longest_step_s: float
    first_step_s: float


def create_record(name: str) -> int:
    """A descriptor of memory for one rank's record, all zero. Raises OSError."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC)
    os.ftruncate(fd, _RECORD_BYTES)
    return fd


def read_record(fd: int) -> Reading:
    changes, at_s, phase, place, step, micro_batch, work, collectives, elements, kind, *steps_s = _LAYOUT.unpack(
        os.pread(fd, _LAYOUT.size, 0)
    )
    text = kind.rstrip(b"\0").decode("ascii", "replace")
    return Reading(changes, at_s, phase, place, step, micro_batch, work, collectives, elements, text, *steps_s)


class ProgressRecord:
    """The rank's side. `fd` None: nobody reads it."""

    def __init__(self, fd: int | None) -> None:
        self._memory = mmap.mmap(fd if fd is not None else -1, _RECORD_BYTES)
        self.phase = Phase.STARTING
        self._changes = 0
        self._place = Place.OUTSIDE
        self._step = self._micro_batch = self._work = self._collectives = self._elements = 0
        self._kind = b""
        self._step_began_at_s: float | None = None
        self._aside_s = 0.0  # of this step, in phases that not every step has
        self._phase_began_at_s = time.monotonic()
        self._steps_s: deque[float] = deque(maxlen=_LONGEST_OF)
        self._typical_s = self._longest_s = self._first_s = 0.0
        self._training_since_s: float | None = None
        self._write()

    # -- phases and steps ----------------------------------------------------------------------------------------------

    def enter(self, phase: Phase) -> None:
        if phase == self.phase:
            return
        now = time.monotonic()
        if self.phase in (Phase.SAVING, Phase.EVALUATING):
            self._aside_s += now - self._phase_began_at_s
        self.phase, self._phase_began_at_s = phase, now
        if phase == Phase.TRAINING and self._training_since_s is None:
            self._training_since_s = now
        self._work = 0
        self._write()

    @contextmanager
    def within(self, phase: Phase) -> Iterator[None]:
        before = self.phase
        self.enter(phase)
        try:
            yield
        finally:
            self.enter(before)

    def resumed(self, step: int) -> None:
        self._step, self._micro_batch = step, 0
        self._write()

    def micro_batch_begins(self) -> None:
        self._micro_batch += 1
        self._write()

    def worked(self) -> None:
        """A record is encoded, a batch evaluated."""
        self._work += 1
        self._write()

    def step_ended(self, step: int) -> None:
        now = time.monotonic()
        self._step, self._micro_batch = step, 0
        if self._step_began_at_s is not None:
            self._steps_s.append(now - self._step_began_at_s - self._aside_s)
            if len(self._steps_s) > 1:  # the first one that is measured may still compile and allocate
                self._typical_s = statistics.median(list(self._steps_s)[-_TYPICAL_OF:])
                self._longest_s = max(self._steps_s)
        elif self._training_since_s is not None:
            self._first_s = now - self._training_since_s
        self._step_began_at_s, self._aside_s = now, 0.0
        self._write()

    # -- collectives ---------------------------------------------------------------------------------------------------

    @property
    def is_outside(self) -> bool:
        return self._place == Place.OUTSIDE

    def collective_begins(self, kind: bytes, elements: int, *, of_all_ranks: bool) -> None:
        """`kind` in ASCII, at most 24 bytes."""
        self._kind, self._elements = kind, elements
        if of_all_ranks:
            self._collectives += 1
            self._place = Place.INSIDE
        else:
            self._place = Place.IN_GROUP
        self._write()

    def waits(self) -> None:
        self._place = Place.WAITING
        self._write()

    def goes_on(self) -> None:
        """It has come out of a collective, or of a wait for one."""
        self._place = Place.OUTSIDE
        self._write()

    def _write(self) -> None:
        self._changes += 1
        _LAYOUT.pack_into(
            self._memory,
            0,
            self._changes,
            time.monotonic(),
            self.phase,
            self._place,
            self._step,
            self._micro_batch,
            self._work,
            self._collectives,
            self._elements,
            self._kind,
            self._typical_s,
            self._longest_s,
            self._first_s,
        )
