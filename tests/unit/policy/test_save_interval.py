"""How often a snapshot is taken: what the rule promises, over many costs, failure rates and measurements."""

from __future__ import annotations

import itertools
import json
import math
import random
from dataclasses import replace
from typing import Any

import pytest

from launcher.policy.save_interval import (
    HOLD,
    NUM_RECENT,
    NUM_WARM_UP,
    PRIOR_NODE_S,
    FailureHistory,
    IntervalInputs,
    IntervalReason,
    RecentStalls,
    SaveInterval,
    Stall,
    choose_interval,
    is_due,
    lost_share,
    steps_of_least_loss,
    steps_within_budget,
    summarize,
)

HOUR = 3600.0


def inputs(stall_s: float, step_s: float = 1.0, **more: Any) -> IntervalInputs:
    return IntervalInputs(**{"budget": 0.01, "step_s": step_s, "stall": Stall(stall_s, stall_s)} | more)


def many(number: int = 150) -> list[IntervalInputs]:
    """Steps of 10 ms to 1 min, stalls of 10 us to 1 min, no failure in a year to one every ten seconds."""
    rng = random.Random(7)

    def log_uniform(low: float, high: float) -> float:
        return math.exp(rng.uniform(math.log(low), math.log(high)))

    return [
        inputs(
            log_uniform(1e-5, 60),
            log_uniform(0.01, 60),
            budget=log_uniform(0.001, 0.5),
            seal_s=log_uniform(0.01, 60),
            failures=FailureHistory(rng.choice([0, 0, 1, 5, 100, 10_000]), log_uniform(60, 1e7)),
            num_nodes=rng.choice([1, 2, 32]),
        )
        for _ in range(number)
    ]


def of(chosen: SaveInterval) -> tuple[int, IntervalReason]:
    return chosen.every_steps, chosen.reason


# -- the rule ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (inputs(0.002), (1, IntervalReason.EVERY_STEP)),
        (inputs(0.01), (1, IntervalReason.EVERY_STEP)),
        (inputs(0.0101), (2, IntervalReason.BUDGET)),
        (inputs(0.5), (50, IntervalReason.BUDGET)),
        (inputs(0.5, budget=0.5), (1, IntervalReason.EVERY_STEP)),
        (inputs(0.0), (1, IntervalReason.EVERY_STEP)),
        # A failure every 5 minutes: sqrt(2 x 0.5 x 300) = 17.3 s
        (inputs(0.5, failures=FailureHistory(100_000, 3e7)), (17, IntervalReason.FAILURES)),
        # The budget allows every step, whatever the failures: less would only lose more.
        (inputs(0.002, failures=FailureHistory(1000, 1e9)), (1, IntervalReason.EVERY_STEP)),
        # Failures faster than steps.
        (inputs(0.5, failures=FailureHistory(10**6, 10.0)), (1, IntervalReason.FAILURES)),
        (inputs(0.5, fixed=7), (7, IntervalReason.FIXED)),
        (IntervalInputs(budget=0.01, fixed=1), (1, IntervalReason.FIXED)),
        (IntervalInputs(budget=0.01), (1, IntervalReason.MEASURING)),
        (IntervalInputs(budget=0.01, step_s=1.0), (1, IntervalReason.MEASURING)),
        (IntervalInputs(budget=0.01, stall=Stall(1, 1)), (1, IntervalReason.MEASURING)),
    ],
)
def test_interval_and_reason(given: IntervalInputs, expected: tuple[int, IntervalReason]) -> None:
    assert of(choose_interval(given)) == expected


def test_a_long_tail_counts() -> None:
    """Every hundredth snapshot stalls for a second: the mean is over the budget, the median is not."""
    assert choose_interval(inputs(0.008)).every_steps == 1
    assert choose_interval(inputs(0.008, stall=Stall(0.008, 1.0))).every_steps > 1


@pytest.mark.parametrize("given", many())
def test_the_overhead_is_within_the_budget_unless_failures_are_frequent(given: IntervalInputs) -> None:
    chosen = choose_interval(given)
    assert chosen.overhead is not None
    if chosen.reason is IntervalReason.FAILURES:
        assert chosen.every_steps < steps_within_budget(given.stall.mean_s, given.step_s, given.budget)  # type: ignore[union-attr,arg-type]
    else:
        assert chosen.overhead <= given.budget * (1 + 1e-9)


@pytest.mark.parametrize("given", many())
def test_no_interval_loses_less_by_more_than_the_budget(given: IntervalInputs) -> None:
    assert given.stall is not None
    assert given.step_s is not None
    between_s = given.failures.mean_time_between_s(given.num_nodes)

    def lost(every_steps: int) -> float:
        return lost_share(every_steps, given.stall.median_s, given.step_s, between_s)  # type: ignore[union-attr,arg-type]

    chosen = choose_interval(given)
    best = steps_of_least_loss(given.stall.median_s, given.step_s, between_s)
    assert all(lost(best) <= lost(other) * (1 + 1e-9) for other in range(max(1, best - 5), best + 6))
    assert lost(chosen.every_steps) <= lost(best) + given.budget * (1 + 1e-9)
    if chosen.reason is IntervalReason.FAILURES:
        assert chosen.every_steps == best


@pytest.mark.parametrize("given", many(100))
def test_dearer_snapshots_are_not_taken_more_often(given: IntervalInputs) -> None:
    assert given.stall is not None
    dearer = replace(given, stall=Stall(2 * given.stall.median_s, 2 * given.stall.p99_s))
    assert choose_interval(dearer).every_steps >= choose_interval(given).every_steps


@pytest.mark.parametrize("given", many(100))
def test_more_failures_do_not_make_snapshots_rarer(given: IntervalInputs) -> None:
    seen = given.failures
    worse = replace(given, failures=FailureHistory(2 * seen.num_faults + 1, seen.trained_s))
    assert choose_interval(worse).every_steps <= choose_interval(given).every_steps


@pytest.mark.parametrize("seal_s", [0.0, 10.0, 1000.0])
def test_the_time_until_a_snapshot_is_safe_costs_but_does_not_move_the_interval(seal_s: float) -> None:
    without = choose_interval(inputs(0.5, failures=FailureHistory(100, 3e4)))
    chosen = choose_interval(inputs(0.5, failures=FailureHistory(100, 3e4), seal_s=seal_s))
    assert of(chosen) == of(without)
    assert chosen.lost_s == pytest.approx((without.lost_s or 0.0) + seal_s)


def test_the_share_that_is_lost_is_that_of_a_replay() -> None:
    """Failures at random, replayed step by step, with a delay until snapshots are safe."""
    rng = random.Random(3)
    step_s, stall_s, seal_s, between_s, every = 1.0, 0.3, 4.0, 2000.0, 12
    cycle_s, lost_s, all_s = every * step_s + stall_s, 0.0, 0.0
    for _ in range(20_000):
        up_s = rng.expovariate(1 / between_s)
        safe = [j for j in range(int(up_s / cycle_s) + 2) if j == 0 or j * cycle_s - stall_s + seal_s <= up_s]
        lost_s += up_s - safe[-1] * every * step_s
        all_s += up_s
    assert lost_s / all_s == pytest.approx(lost_share(every, stall_s, step_s, between_s, seal_s), rel=0.03)


# -- failures ----------------------------------------------------------------------------------------------------------


def test_a_run_that_has_seen_no_fault_expects_one_a_day_and_node() -> None:
    assert FailureHistory().mean_time_between_s(1) == 24 * HOUR
    assert FailureHistory().mean_time_between_s(32) == 24 * HOUR / 32
    assert FailureHistory(0, 48 * HOUR).mean_time_between_s(1) == 120 * HOUR


def test_what_was_seen_soon_counts_for_more_than_what_was_expected() -> None:
    seen = FailureHistory().plus(20, 2 * HOUR).plus(0, 2 * HOUR)
    assert seen == FailureHistory(20, 4 * HOUR)
    assert 0.2 * HOUR < seen.mean_time_between_s(32) < 0.25 * HOUR
    assert FailureHistory(2000, 400 * HOUR).mean_time_between_s(1) == pytest.approx(0.2 * HOUR, rel=0.04)


def test_without_faults_the_budget_of_a_hundredth_is_kept() -> None:
    """Where nothing is known the prior does not make the training slower than was agreed, unless a snapshot is very
    dear."""
    for stall_s in (0.02, 0.5, 5.0, 17.0):
        assert choose_interval(inputs(stall_s)).reason is IntervalReason.BUDGET
    assert choose_interval(inputs(30.0)).reason is IntervalReason.FAILURES


# -- measurements ------------------------------------------------------------------------------------------------------


def test_the_first_snapshot_in_each_slot_is_forgotten() -> None:
    stalls = RecentStalls()
    assert stalls.summary() is None
    for _ in range(NUM_WARM_UP):
        stalls.add(9.0)
        assert stalls.summary() == Stall(9.0, 9.0, stalls.summary().num)  # type: ignore[union-attr]
    stalls.add(0.1)
    assert stalls.summary() == Stall(0.1, 0.1, 1)


def test_old_stalls_are_forgotten() -> None:
    stalls = RecentStalls()
    for _ in range(500):
        stalls.add(9.0)
    for _ in range(NUM_RECENT):
        stalls.add(0.1)
    assert stalls.summary() == Stall(0.1, 0.1, NUM_RECENT)


def test_median_and_99th_percentile() -> None:
    assert summarize([]) is None
    assert summarize([3.0]) == Stall(3.0, 3.0, 1)
    assert summarize([float(i) for i in range(100, 0, -1)]) == Stall(50.0, 99.0, 100)


@pytest.mark.parametrize("sigma", [0.1, 1.0, 2.0])
def test_the_estimate_of_the_mean_errs_upward(sigma: float) -> None:
    rng = random.Random(1)
    stalls = [rng.lognormvariate(-4, sigma) for _ in range(2000)]
    summary = summarize(stalls)
    assert summary is not None
    assert sum(stalls) / len(stalls) <= summary.mean_s <= summary.p99_s


# -- hysteresis --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("failures", [FailureHistory(), FailureHistory(100_000, 3e7)])
@pytest.mark.parametrize("stall_s", [0.0095, 0.01, 0.0105, 0.1, 0.5, 3.0])
def test_noise_does_not_make_it_flap(stall_s: float, failures: FailureHistory) -> None:
    """A stall that is measured anew a thousand times, each time up to a tenth off."""
    rng = random.Random(5)
    current: int | None = None
    decisions = []
    for _ in range(1000):
        current = choose_interval(inputs(stall_s * rng.uniform(0.9, 1.1), failures=failures), current).every_steps
        decisions.append(current)
    changes = [(a, b) for a, b in itertools.pairwise(decisions) if a != b]
    assert all(b > a for a, b in changes), "it never goes back"
    assert len(changes) <= 10


@pytest.mark.parametrize("given", many(50))
@pytest.mark.parametrize("current", [1, 2, 10, 300])
def test_what_is_kept_is_within_the_budget_and_nearly_right(given: IntervalInputs, current: int) -> None:
    assert given.stall is not None
    fresh, chosen = choose_interval(given), choose_interval(given, current)
    if chosen.reason is not IntervalReason.HELD:
        assert of(chosen) == of(fresh)
        return
    assert chosen.every_steps == current
    assert chosen.overhead is not None
    if fresh.reason is not IntervalReason.FAILURES:
        assert chosen.overhead <= given.budget * (1 + 1e-9)
    assert fresh.every_steps * (1 - HOLD) - 1 <= current <= fresh.every_steps * (1 + HOLD) + 1


def test_a_change_that_lasts_is_followed() -> None:
    assert of(choose_interval(inputs(0.5), 10)) == (50, IntervalReason.BUDGET)
    assert of(choose_interval(inputs(0.1), 50)) == (10, IntervalReason.BUDGET)
    assert of(choose_interval(inputs(0.005), 2)) == (1, IntervalReason.EVERY_STEP)
    assert of(choose_interval(inputs(0.0095), 2)) == (2, IntervalReason.HELD)
    assert of(choose_interval(inputs(0.0105), 1)) == (2, IntervalReason.BUDGET)
    assert choose_interval(inputs(0.5, fixed=3), 50).every_steps == 3


# -- what is told ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "current", "words"),
    [
        (inputs(0.002), None, ("after every step", "2 ms", "0.20%", "within the budget of 0.01")),
        (inputs(0.5), None, ("every 50 steps", "500 ms", "1.00%", "shortest interval")),
        (inputs(0.5, failures=FailureHistory(100_000, 3e7)), None, ("every 17 steps", "every 5.01 min")),
        (inputs(0.0095), 2, ("every 2 steps", "near enough to 1 steps")),
        (inputs(0.5, fixed=3), None, ("every 3 steps", "checkpoint.memory")),
        (IntervalInputs(budget=0.01), None, ("until the cost is measured",)),
    ],
)
def test_the_reason_in_words(given: IntervalInputs, current: int | None, words: tuple[str, ...]) -> None:
    text = choose_interval(given, current).text
    assert [word for word in words if word not in text] == [], text


def test_the_inputs_of_the_event_are_json_and_complete() -> None:
    chosen = choose_interval(inputs(0.5, seal_s=2.0, failures=FailureHistory(3, 7200.0), num_nodes=2))
    told = json.loads(json.dumps(chosen.inputs_of_event()))
    assert told["stall"] == {"median_s": 0.5, "p99_s": 0.5, "num": 1}
    assert told["failures"] == {"num_faults": 3, "trained_s": 7200.0}
    assert (told["budget_steps"], told["overhead"], told["lost_s"]) == (50, 0.01, 27.0)
    assert told["mean_time_between_failures_s"] == pytest.approx((7200 + PRIOR_NODE_S / 2) / 3.5, rel=1e-3)
    # What was decided can be decided again from the event alone.
    again = IntervalInputs(
        budget=told["budget"],
        fixed=told["fixed"],
        step_s=told["step_s"],
        stall=Stall(**told["stall"]),
        seal_s=told["seal_s"],
        failures=FailureHistory(**told["failures"]),
        num_nodes=told["num_nodes"],
    )
    assert choose_interval(again) == chosen
    assert json.dumps(choose_interval(IntervalInputs(budget=0.01)).inputs_of_event())


def test_every_rank_takes_its_snapshots_after_the_same_steps() -> None:
    assert [step for step in range(1, 13) if is_due(step, 4)] == [4, 8, 12]
    assert all(is_due(step, 1) for step in range(1, 13))
