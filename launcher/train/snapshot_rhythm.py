"""After which steps a snapshot is taken in memory: the same ones on every rank.

Invariant: at every review, which is after the same steps on all ranks, all of them put the slowest rank's figures into
the same pure function. So they agree without anybody who tells them.
"""

from __future__ import annotations

import statistics
import time
from collections import deque

import torch
import torch.distributed as dist

from launcher.link import Link
from launcher.plan.spec import RankSpec
from launcher.policy.save_interval import (
    FailureHistory,
    IntervalInputs,
    RecentStalls,
    SaveInterval,
    Stall,
    choose_interval,
    is_due,
)

_FIRST_REVIEWS = (10, 30)  # steps into the generation
_REVIEW_EVERY = 100
_NUM_STEPS = 100  # the latest ones, of which the median counts


class SnapshotRhythm:
    """Of one rank, in one generation."""

    def __init__(self, spec: RankSpec, budget: float, link: Link, *, device: torch.device, rank: int) -> None:
        self._spec, self._budget, self._link, self._device, self._rank = spec, budget, link, device, rank
        self._stalls = RecentStalls()
        self._steps_s: deque[float] = deque(maxlen=_NUM_STEPS)
        self._seals_s: deque[float] = deque(maxlen=_NUM_STEPS)
        self._stalled_s = 0.0  # since the last step ended
        self._step_ended_at: float | None = None
        self._first_step: int | None = None
        self._chosen: SaveInterval = choose_interval(self._inputs(None, None, None))
        self._tell(0)

    def is_due(self, step: int) -> bool:
        return is_due(step, self._chosen.every_steps)

    def stalled(self, seconds: float) -> None:
        """A snapshot has held the training thread up for so long."""
        self._stalls.add(seconds)
        self._stalled_s += seconds

    def sealed(self, seconds: float) -> None:
        """A snapshot was safe so long after it began."""
        self._seals_s.append(seconds)

    def step_ended(self, step: int) -> None:
        """To be called after every step, on all ranks: some of these calls are a review, with a collective."""
        now = time.monotonic()
        if self._step_ended_at is not None:
            self._steps_s.append(now - self._step_ended_at - self._stalled_s)
        self._step_ended_at, self._stalled_s = now, 0.0
        if self._first_step is None:
            self._first_step = step
        if self._spec.memory_every == 0 and _is_review(step - self._first_step):
            self._review(step)

    def pause(self) -> None:
        """What follows (an evaluation, a log) is not part of a step's time."""
        self._step_ended_at = None

    def _review(self, step: int) -> None:
        """Collective."""
        stall = self._stalls.summary() or Stall(0.0, 0.0)
        figures = torch.tensor(
            [stall.median_s, stall.p99_s, _median(self._steps_s), _median(self._seals_s)],
            dtype=torch.float64 if self._device.type == "cpu" else torch.float32,
            device=self._device,
        )
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(figures, op=dist.ReduceOp.MAX)
        median_s, p99_s, step_s, seal_s = figures.tolist()
        before = self._chosen
        self._chosen = choose_interval(
            self._inputs(step_s, Stall(median_s, p99_s, stall.num), seal_s), before.every_steps
        )
        if self._chosen.every_steps != before.every_steps or self._chosen.reason is not before.reason:
            self._tell(step)

    def _inputs(self, step_s: float | None, stall: Stall | None, seal_s: float | None) -> IntervalInputs:
        spec = self._spec
        return IntervalInputs(
            budget=self._budget,
            fixed=spec.memory_every or None,
            step_s=step_s,
            stall=stall,
            seal_s=seal_s,
            failures=FailureHistory(spec.num_faults, spec.trained_s),
            num_nodes=spec.num_nodes,
        )

    def _tell(self, step: int) -> None:
        if self._rank == 0:
            chosen = self._chosen
            self._link.send(
                "memory_interval",
                step=step,
                every_steps=chosen.every_steps,
                reason=chosen.reason.value,
                text=chosen.text,
                inputs=chosen.inputs_of_event(),
            )


def _is_review(num_steps: int) -> bool:
    return num_steps in _FIRST_REVIEWS or (num_steps > 0 and num_steps % _REVIEW_EVERY == 0)


def _median(values: deque[float]) -> float:
    return statistics.median(values) if values else 0.0
