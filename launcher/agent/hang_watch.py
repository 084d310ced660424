"""Finds that the ranks of this node stand still, by looking at their progress records once a second.

Invariants: while anything moves, a look reads a few numbers and does nothing else. A time in which this agent itself
was away (the machine suspended, the agent stopped) counts for nothing.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from launcher.agent.generation import RankProcess
from launcher.event_loop import EventLoop
from launcher.policy.hang import LEAST_STILL_S, HangSeconds, standstill_bound_s
from launcher.progress_record import RankProgress, Reading, create_record, read_record

LOOK_S = 1.0
_AWAY_S = 3.0  # a look that comes so late: whoever waited for this agent may have stood still because of it
_PAUSE_FACTOR = 1.5


class HangWatch:
    """`begin` and `end` with each attempt, `watch` once its ranks are being started."""

    def __init__(self, loop: EventLoop, hang_seconds: HangSeconds, node: str) -> None:
        self._loop, self._hang_seconds, self._node = loop, hang_seconds, node
        self._records: dict[int, int] = {}
        self._processes: Callable[[], Sequence[RankProcess]] = list
        self._on_standstill: Callable[[Sequence[RankProgress]], None] = lambda ranks: None
        self._looked_at_s = self._since_s = self._told_at_s = 0.0
        self._longest_pause_s = 0.0  # that has ended by itself, in this start
        self._first_step_s = 0.0  # of earlier attempts of this start
        self.bound_s = 0.0  # of the latest standstill

    def begin(self, ranks: range) -> None:
        """Raises OSError where there is no memory to be had."""
        self.end()
        for rank in ranks:
            self._records[rank] = create_record(f"progress-of-rank-{rank}")

    def record_of(self, rank: int) -> int:
        """The descriptor of a rank's record."""
        return self._records[rank]

    def watch(
        self, processes: Callable[[], Sequence[RankProcess]], on_standstill: Callable[[Sequence[RankProgress]], None]
    ) -> None:
        """`on_standstill` is called at each look for as long as nothing moves and the bound is over."""
        self._processes, self._on_standstill = processes, on_standstill
        self._looked_at_s = self._since_s = time.monotonic()
        if self._hang_seconds != "off":
            self._loop.every("hang watch", LOOK_S, self._look)

    def end(self) -> None:
        self._loop.stop_timer("hang watch")
        for fd in self._records.values():
            self._first_step_s = max(self._first_step_s, read_record(fd).first_step_s)
            os.close(fd)
        self._records.clear()

    def _look(self) -> None:
        now = time.monotonic()
        if now - self._looked_at_s > _AWAY_S:
            self._since_s = now
        self._looked_at_s = now
        processes = self._running()
        readings = [read_record(self._records[process.rank]) for process in processes]
        if not readings:
            return
        still_s = now - self._still_since_s(readings)
        if still_s < LEAST_STILL_S:
            self._look_again_in(LEAST_STILL_S - still_s)
            return
        ranks = [self._progress(process, reading, now) for process, reading in zip(processes, readings, strict=True)]
        by_phase_s = standstill_bound_s(ranks, self._hang_seconds, known_first_step_s=self._first_step_s)
        self.bound_s = max(by_phase_s, _PAUSE_FACTOR * self._longest_pause_s)
        if still_s >= self.bound_s:
            self._told_at_s = now
            self._on_standstill(ranks)
        else:
            self._look_again_in(self.bound_s - still_s)

    def _look_again_in(self, seconds: float) -> None:
        """Where that is before the next look; while ranks move it is not."""
        if seconds < LOOK_S:
            self._loop.set_bound("standstill", seconds, self._look)

    def has_moved(self) -> bool:
        """Whether a rank has written something since `on_standstill` was called: then it was a pause, and one that is
        as long is no hang any more in this start."""
        readings = [read_record(self._records[process.rank]) for process in self._running()]
        moved = any(reading.at_s > self._told_at_s for reading in readings)
        if moved:
            self._longest_pause_s = max(self._longest_pause_s, self.bound_s)
        return moved

    def _running(self) -> list[RankProcess]:
        return [process for process in self._processes() if process.exit is None and process.rank in self._records]

    def _still_since_s(self, readings: Sequence[Reading]) -> float:
        return max(self._since_s, *(reading.at_s for reading in readings))

    def _progress(self, process: RankProcess, reading: Reading, now: float) -> RankProgress:
        return RankProgress(
            rank=process.rank,
            node=self._node,
            phase=reading.phase,
            place=reading.place,
            step=reading.step,
            micro_batch=reading.micro_batch,
            work=reading.work,
            collectives=reading.collectives,
            kind=reading.kind,
            elements=reading.elements,
            still_s=round(now - max(reading.at_s, self._since_s), 3),
            state=process_state(process.pid),
            typical_step_s=reading.typical_step_s,
            longest_step_s=reading.longest_step_s,
        )


def process_state(pid: int) -> str:
    """The letter of /proc/PID/stat; "" when it is gone."""
    with suppress(OSError), open(f"/proc/{pid}/stat", "rb") as stat:
        return stat.read().rpartition(b")")[2].split()[0].decode("ascii", "replace")
    return ""
