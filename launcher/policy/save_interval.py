"""How often a snapshot of the training state is taken in memory. Pure; every decision carries its reason and inputs.

Rules, in this order:
1. a number in job.yaml (`checkpoint.memory: N`, `on` is 1) is taken;
2. nothing measured yet: after every step, which is how the cost gets measured;
3. after every step, where that stays within the budget (`checkpoint.budget`, a share of the step time);
4. else the shorter of two intervals: the shortest within the budget, and the one that loses least time over all. The
   second is the shorter one only where failures are so frequent that saving more often than the budget pays.

So the time lost exceeds that of the best interval by at most the budget, and only where less is lost at each failure.

**The best interval when saves are asynchronous.** A step takes T seconds, a snapshot begins every tau = k T of them,
holds the training thread up for s (the stall), and is safe d after it began. Failures come with a mean time M between
them. At a failure the newest safe snapshot began d + x ago, x anywhere in [0, tau): the work of d + tau / 2 is lost on
average, however d compares with tau. The share of time lost is

    s / tau  +  (d + tau / 2 + R) / M            with R for the restart,

and its derivative by tau, -s / tau^2 + 1 / (2 M), has neither d nor R in it: tau = sqrt(2 s M). This is Young's formula
(J. W. Young, "A first order approximation to the optimum checkpoint interval", CACM 17(9), 1974) with the stall in
place of the time to write: what is written while training goes on costs nothing but the d of each failure. Daly's
higher order terms (J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", FGCS
22(3), 2006) matter where s comes near M; a stall is seconds at most, so they are left out. The budget as a bound on the
overhead is CheckFreq's (Mohan et al., FAST 2021).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any

# Failures are taken as Poisson: (faults + 1/2) / (time trained + PRIOR) of them a second. The half is Jeffreys' prior
# for such a rate. With no fault seen it alone would be for ever, or at a start never: the time beside it says that a
# machine lasts 24 h until better is known, the longest that preemptible machines are let live (Compute Engine stops
# them after 24 h). It is counted in node hours, because every further machine is one more that may go. Half a fault
# is forgotten after a few real ones. Wrong by a factor f, it makes the interval wrong by sqrt(f), and only where saving
# is dear: an idle prior never wins against a budget of 1 % unless a stall takes longer than 2 x 24 h x (1 %)^2 = 17 s.
PRIOR_FAULTS = 0.5
PRIOR_NODE_S = 12 * 3600.0

# An interval is kept while a stall up to this much longer would still ask for it (or, where failures decide, one this
# much longer or shorter). Within the noise of a stall nothing changes; a drift of a quarter is followed.
HOLD = 0.25

NUM_WARM_UP = 3  # the first snapshot in each of the three slots pays for fresh pages
NUM_RECENT = 100  # stalls that count: what a snapshot costs may change within a run


class IntervalReason(Enum):
    """What decided."""

    FIXED = "fixed"  # job.yaml names a number
    MEASURING = "measuring"  # nothing is measured yet
    EVERY_STEP = "every_step"  # the budget allows it
    BUDGET = "budget"  # the shortest interval within the budget
    FAILURES = "failures"  # so frequent that more than the budget pays
    HELD = "held"  # another interval would be better, by too little to change


@dataclass(frozen=True)
class Stall:
    """Seconds for which a snapshot holds the training thread up, on the slowest rank; over `num` recent snapshots."""

    median_s: float
    p99_s: float
    num: int = 1

    @property
    def mean_s(self) -> float:
        """An upper estimate of the mean. From the median up, the quantiles of a distribution with a long tail are a
        convex function, so the mean of the upper half is at most that of its two ends; the lower half is at most the
        median: (median + (median + p99) / 2) / 2."""
        return 0.75 * self.median_s + 0.25 * self.p99_s


class RecentStalls:
    """The latest `NUM_RECENT` stalls of one rank, without those of the first snapshot in each slot once there are
    others."""

    def __init__(self) -> None:
        self._warm_up: list[float] = []
        self._recent: deque[float] = deque(maxlen=NUM_RECENT)

    def add(self, stall_s: float) -> None:
        if len(self._warm_up) < NUM_WARM_UP:
            self._warm_up.append(stall_s)
        else:
            self._recent.append(stall_s)

    def summary(self) -> Stall | None:
        """None before the first snapshot."""
        return summarize(self._recent or self._warm_up)


def summarize(stalls_s: Sequence[float]) -> Stall | None:
    """Median and 99th percentile (nearest rank: one of the values), None where there are none."""
    if not stalls_s:
        return None
    ordered = sorted(stalls_s)
    return Stall(_percentile(ordered, 0.5), _percentile(ordered, 0.99), len(ordered))


def _percentile(ordered: Sequence[float], share: float) -> float:
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


@dataclass(frozen=True)
class FailureHistory:
    """Faults and preemptions of a run so far, over all of its starts, and the seconds in which it has trained."""

    num_faults: int = 0
    trained_s: float = 0.0

    def plus(self, num_faults: int, trained_s: float) -> FailureHistory:
        return FailureHistory(self.num_faults + num_faults, self.trained_s + trained_s)

    def mean_time_between_s(self, num_nodes: int) -> float:
        """Seconds, finite also without a fault (see PRIOR_FAULTS)."""
        return (self.trained_s + PRIOR_NODE_S / num_nodes) / (self.num_faults + PRIOR_FAULTS)


@dataclass(frozen=True)
class IntervalInputs:
    """`fixed`: the number of job.yaml, None for `auto`. `step_s`: median of an optimizer step, without stalls.
    `seal_s`: from a snapshot's begin until it is safe. None: not measured yet."""

    budget: float
    fixed: int | None = None
    step_s: float | None = None
    stall: Stall | None = None
    seal_s: float | None = None
    failures: FailureHistory = field(default_factory=FailureHistory)
    num_nodes: int = 1


@dataclass(frozen=True)
class SaveInterval:
    """A snapshot after every `every_steps` optimizer steps.

    `overhead`: share of the step time that stalls add, an upper estimate. `lost_s`: seconds of work that a failure
    costs on average. `budget_steps`, `best_steps`: the two intervals of rule 4. None: not known yet.
    """

    every_steps: int
    reason: IntervalReason
    text: str
    inputs: IntervalInputs
    overhead: float | None = None
    lost_s: float | None = None
    mean_time_between_failures_s: float | None = None
    budget_steps: int | None = None
    best_steps: int | None = None

    def inputs_of_event(self) -> dict[str, Any]:
        """What the event `memory_interval` carries as `inputs`: what was measured and what follows from it."""
        derived = {
            "overhead": self.overhead,
            "lost_s": self.lost_s,
            "mean_time_between_failures_s": self.mean_time_between_failures_s,
            "budget_steps": self.budget_steps,
            "best_steps": self.best_steps,
        }
        return asdict(self.inputs) | {key: _rounded(value) for key, value in derived.items()}


def choose_interval(inputs: IntervalInputs, current: int | None = None) -> SaveInterval:
    """`current`: the interval in force, which stays where it is nearly right; None at a run's first decision."""
    if inputs.fixed is not None:
        return _fixed(inputs, inputs.fixed)
    if inputs.stall is None or not inputs.step_s:
        return SaveInterval(1, IntervalReason.MEASURING, "after every step, until the cost is measured", inputs)
    wanted, reason = _wanted(inputs, inputs.step_s, inputs.stall.mean_s)
    if current is not None and current != wanted and _is_near(inputs, inputs.step_s, inputs.stall.mean_s, current):
        return _decided(inputs, inputs.step_s, inputs.stall.mean_s, current, IntervalReason.HELD)
    return _decided(inputs, inputs.step_s, inputs.stall.mean_s, wanted, reason)


def is_due(step: int, every_steps: int) -> bool:
    """Whether a snapshot is taken after `step`: the same on every rank that has the same interval, however the interval
    came about (a resume, a change on the way)."""
    return step % every_steps == 0


def steps_within_budget(stall_s: float, step_s: float, budget: float) -> int:
    """The shortest interval whose stalls take at most `budget` of the step time."""
    # A hair less, so that a stall of exactly the budget is within it, whatever the last bit of the division says.
    return max(1, math.ceil(stall_s / (budget * step_s) * (1 - 1e-12)))


def steps_of_least_loss(stall_s: float, step_s: float, mean_time_between_failures_s: float) -> int:
    """Young's interval in whole steps. The cost a / k + k is the same at k and k + 1 where k (k + 1) = a, so the best k
    is the first with k (k + 1) >= (tau / T)^2."""
    squared = 2 * stall_s * mean_time_between_failures_s / step_s**2
    return max(1, math.ceil((math.sqrt(1 + 4 * squared) - 1) / 2))


def lost_share(
    every_steps: float, stall_s: float, step_s: float, mean_time_between_failures_s: float, seal_s: float = 0.0
) -> float:
    """Share of the time that stalls and work done again take, to first order, without the restarts themselves."""
    interval_s = every_steps * step_s
    return stall_s / interval_s + (seal_s + interval_s / 2) / mean_time_between_failures_s


def _wanted(inputs: IntervalInputs, step_s: float, stall_s: float) -> tuple[int, IntervalReason]:
    within_budget = steps_within_budget(stall_s, step_s, inputs.budget)
    if within_budget == 1:
        return 1, IntervalReason.EVERY_STEP
    best = steps_of_least_loss(stall_s, step_s, inputs.failures.mean_time_between_s(inputs.num_nodes))
    if best < within_budget:
        return best, IntervalReason.FAILURES
    return within_budget, IntervalReason.BUDGET


def _is_near(inputs: IntervalInputs, step_s: float, stall_s: float, current: int) -> bool:
    """An interval that breaks the budget is near only where failures decide, which do not ask for the budget."""
    wanted, reason = _wanted(inputs, step_s, stall_s)
    shortest = wanted
    if reason is IntervalReason.FAILURES:
        shortest, _ = _wanted(inputs, step_s, stall_s * (1 - HOLD))
    longest, _ = _wanted(inputs, step_s, stall_s * (1 + HOLD))
    return shortest <= current <= longest


def _decided(
    inputs: IntervalInputs, step_s: float, stall_s: float, every_steps: int, reason: IntervalReason
) -> SaveInterval:
    between_s = inputs.failures.mean_time_between_s(inputs.num_nodes)
    within_budget = steps_within_budget(stall_s, step_s, inputs.budget)
    best = steps_of_least_loss(stall_s, step_s, between_s)
    overhead = stall_s / (every_steps * step_s)
    how_often = "after every step" if every_steps == 1 else f"every {every_steps} steps"
    cost = f"{how_often}: a stall of {_seconds(stall_s)} is {overhead:.2%} of their time"
    why = {
        IntervalReason.EVERY_STEP: f"within the budget of {inputs.budget:.3g}",
        IntervalReason.BUDGET: f"the shortest interval within the budget of {inputs.budget:.3g}",
        IntervalReason.FAILURES: f"with a failure every {_seconds(between_s)} less often would lose more",
        IntervalReason.HELD: f"near enough to {_wanted(inputs, step_s, stall_s)[0]} steps",
    }[reason]
    return SaveInterval(
        every_steps=every_steps,
        reason=reason,
        text=f"{cost}, {why}",
        inputs=inputs,
        overhead=overhead,
        lost_s=every_steps * step_s / 2 + (inputs.seal_s or 0.0),
        mean_time_between_failures_s=between_s,
        budget_steps=within_budget,
        best_steps=best,
    )


def _fixed(inputs: IntervalInputs, every_steps: int) -> SaveInterval:
    how_often = "after every step" if every_steps == 1 else f"every {every_steps} steps"
    text = f"{how_often}, as checkpoint.memory says"
    if inputs.stall is None or not inputs.step_s:
        return SaveInterval(every_steps, IntervalReason.FIXED, text, inputs)
    return SaveInterval(
        every_steps=every_steps,
        reason=IntervalReason.FIXED,
        text=text,
        inputs=inputs,
        overhead=inputs.stall.mean_s / (every_steps * inputs.step_s),
        lost_s=every_steps * inputs.step_s / 2 + (inputs.seal_s or 0.0),
    )


def _seconds(seconds: float) -> str:
    if seconds < 1:
        return f"{seconds * 1000:.3g} ms"
    for unit_s, unit in ((86400.0, "d"), (3600.0, "h"), (60.0, "min")):
        if seconds >= 2 * unit_s:
            return f"{seconds / unit_s:.3g} {unit}"
    return f"{seconds:.3g} s"


def _rounded(value: float | None) -> float | None:
    return value if value is None or isinstance(value, int) else float(f"{value:.4g}")
