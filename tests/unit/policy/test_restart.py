"""What follows a failed attempt: a table of histories."""

from __future__ import annotations

import pytest

from launcher.errors import ExitCode
from launcher.policy.restart import Action, FailedAttempt, decide, restarts_without_progress

OUTSIDE, INSIDE = ("unknown", True), ("device_assert_index", False)


def history(*reached: int, last: tuple[str, bool] = OUTSIDE, code: int | None = None) -> list[FailedAttempt]:
    attempts = [FailedAttempt(number, *OUTSIDE, step) for number, step in enumerate(reached[:-1], start=1)]
    return [*attempts, FailedAttempt(len(reached), *last, reached[-1], code)]


@pytest.mark.parametrize(
    ("started_at", "reached", "fruitless"),
    [
        (0, (5,), 0),
        (0, (0,), 1),
        (100, (100,), 1),
        (100, (101,), 0),
        (0, (5, 5), 1),
        (0, (5, 3), 1),
        (0, (5, 3, 4), 2),
        (0, (5, 3, 6), 0),
        (0, (0, 0, 7), 0),
        (0, (0, 0, 7, 7), 1),
        (100, (90, 95, 99), 3),
        (0, (5, 6, 7, 8, 9), 0),
    ],
)
def test_only_a_new_step_is_progress(started_at: int, reached: tuple[int, ...], fruitless: int) -> None:
    """Steps that only repeat what an earlier attempt had done do not count."""
    assert restarts_without_progress(history(*reached), started_at) == fruitless


@pytest.mark.parametrize(
    ("reached", "delay_s"),
    [((5,), 0.0), ((0,), 2.0), ((0, 0), 4.0), ((0, 0, 0), 8.0), ((0, 0, 3), 0.0), ((5, 5), 2.0), ((5, 4, 9, 9), 2.0)],
)
def test_a_fault_from_outside_is_retried_with_doubling_pauses(reached: tuple[int, ...], delay_s: float) -> None:
    decision = decide(history(*reached), max_without_progress=3, backoff_s=2.0, started_at_step=0)
    assert (decision.action, decision.delay_s, decision.exit_code) == (Action.RESTART, delay_s, None)
    assert decision.reason


def test_a_thousand_preemptions_are_survived_while_there_is_progress() -> None:
    decision = decide(history(*range(1, 1001)), max_without_progress=0, backoff_s=1.0, started_at_step=0)
    assert decision.action is Action.RESTART


@pytest.mark.parametrize(
    ("bound", "fruitless", "action"),
    [(0, 1, Action.STOP), (1, 1, Action.RESTART), (1, 2, Action.STOP), (3, 3, Action.RESTART), (3, 4, Action.STOP)],
)
def test_the_budget_without_progress(bound: int, fruitless: int, action: Action) -> None:
    decision = decide(history(*[0] * fruitless), max_without_progress=bound, backoff_s=1.0, started_at_step=0)
    assert decision.action is action
    if action is Action.STOP:
        assert decision.exit_code is ExitCode.STOPPED, "another node may do better, so the scheduler is asked for one"
        assert f"restart.max_without_progress is {bound}" in decision.reason
        assert f"{fruitless} attempts" in decision.reason


def test_progress_fills_the_budget_again() -> None:
    decision = decide(history(0, 0, 0, 1, 1, 1, 1), max_without_progress=3, backoff_s=1.0, started_at_step=0)
    assert decision.action is Action.RESTART


def test_a_fault_that_a_rerun_would_meet_again_is_never_retried() -> None:
    decision = decide(history(50, last=INSIDE), max_without_progress=100, backoff_s=1.0, started_at_step=0)
    assert (decision.action, decision.exit_code) == (Action.STOP, ExitCode.FAILED)
    assert "device_assert_index" in decision.reason


def test_such_a_fault_after_faults_from_outside_stops_too() -> None:
    decision = decide(history(5, 9, 12, last=INSIDE), max_without_progress=3, backoff_s=1.0, started_at_step=0)
    assert decision.exit_code is ExitCode.FAILED


@pytest.mark.parametrize("code", [ExitCode.WRONG_INPUT, ExitCode.REFUSED])
def test_a_wrong_input_keeps_its_own_exit_code(code: ExitCode) -> None:
    for last in (INSIDE, OUTSIDE):
        decision = decide(
            history(0, last=last, code=int(code)), max_without_progress=3, backoff_s=1.0, started_at_step=0
        )
        assert (decision.action, decision.exit_code) == (Action.STOP, code)


def test_the_last_attempt_decides_not_an_earlier_one() -> None:
    earlier = FailedAttempt(1, *INSIDE, 3)
    decision = decide(
        [earlier, FailedAttempt(2, *OUTSIDE, 9)], max_without_progress=3, backoff_s=1.0, started_at_step=0
    )
    assert decision.action is Action.RESTART


@pytest.mark.parametrize(
    ("attempts", "action"),
    [
        ([("hang", 8, 8), ("hang", 8, 8)], Action.STOP),
        ([("hang", 8, 8), ("hang", 9, 9)], Action.RESTART),  # it came further
        ([("hang", 8, 8), ("host_oom", 8, 8)], Action.RESTART),  # another fault
        ([("hang", 8, None), ("hang", 8, None)], Action.RESTART),  # before the training: the budget decides
        ([("unknown", 8, 8), ("unknown", 8, 8)], Action.RESTART),  # nobody knows that it was the same
        ([("hang", 8, 8), ("preempted", 8, 8), ("hang", 8, 8)], Action.RESTART),
        ([("hang", 8, 8), ("hang", 12, 12), ("hang", 12, 12)], Action.STOP),
    ],
)
def test_the_same_fault_twice_at_one_step_is_not_tried_a_third_time(
    attempts: list[tuple[str, int, int | None]], action: Action
) -> None:
    past = [
        FailedAttempt(number, fault, True, reached, at_step=at_step)
        for number, (fault, reached, at_step) in enumerate(attempts, start=1)
    ]
    decision = decide(past, max_without_progress=5, backoff_s=1.0, started_at_step=0)
    assert decision.action is action
    if action is Action.STOP:
        assert decision.exit_code is ExitCode.STOPPED
        assert f"after step {past[-1].at_step}" in decision.reason
