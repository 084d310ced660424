"""After a failed attempt: start again, or stop and with which exit code. Pure; every decision carries its reason.

Rules, in this order:
1. the user's input is wrong (exit 2) or preflight's business (exit 3): stop;
2. a fault that a rerun would meet again: stop, exit 1;
3. the same fault has struck twice at the same step, with no new step in between: stop, exit 138: it is no passing
   trouble, and a third time would be no different on this node;
4. the budget of restarts without progress is used up: stop, exit 138, because what keeps happening is outside the job;
5. anything else: start again, at once after progress, with doubling pauses without.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from launcher.errors import ExitCode

# What a fault's action asks to be adjusted and every new attempt adjusts anyway.
ADJUSTED_BY_RESTART = frozenset({"adjust:master_port"})  # each attempt has a port of its own


class Action(Enum):
    RESTART = "restart"
    STOP = "stop"


@dataclass(frozen=True)
class FailedAttempt:
    """One generation that failed. `reached_step` is the highest step that any rank finished, in it or before this
    start; `at_step` the one after which the fault struck, None where that was before the training began."""

    generation: int
    fault_class: str
    retryable: bool
    reached_step: int
    input_error_code: int | None = None
    at_step: int | None = None


@dataclass(frozen=True)
class Decision:
    """`exit_code` for STOP; `delay_s` for RESTART. `without_progress`: attempts in a row, this one included."""

    action: Action
    reason: str
    exit_code: ExitCode | None = None
    delay_s: float = 0.0
    without_progress: int = 0


def decide(
    history: Sequence[FailedAttempt], *, max_without_progress: int, backoff_s: float, started_at_step: int
) -> Decision:
    """`history` holds this start's failed attempts, oldest first, the one to decide on last."""
    last = history[-1]
    if last.input_error_code is not None:
        return Decision(Action.STOP, "the input has to be mended first", ExitCode(last.input_error_code))
    if not last.retryable:
        return Decision(Action.STOP, f"{last.fault_class}: the same start would meet it again", ExitCode.FAILED)
    fruitless = restarts_without_progress(history, started_at_step)
    if fruitless > 0 and _is_the_same_again(history):
        return Decision(
            Action.STOP,
            f"{last.fault_class} again after step {last.at_step}, with no new step in between: a third time would be "
            "no different here; look at what the job does there, or run it again on another node",
            ExitCode.STOPPED,
            without_progress=fruitless,
        )
    if fruitless > max_without_progress:
        steps = f"no new step since step {max(a.reached_step for a in history) if history else 0}"
        return Decision(
            Action.STOP,
            f"{fruitless} attempts in a row failed with {steps} (restart.max_without_progress is "
            f"{max_without_progress}); the cause is outside this job: run it again, best on another node",
            ExitCode.STOPPED,
            without_progress=fruitless,
        )
    delay_s = 0.0 if fruitless == 0 else backoff_s * 2 ** (fruitless - 1)
    what = "what ended the rank" if last.fault_class == "unknown" else last.fault_class
    reason = f"{what} does not come from the job; " + (
        "the attempt made progress"
        if fruitless == 0
        else f"{fruitless} of {max_without_progress} restarts without a new step"
    )
    return Decision(Action.RESTART, reason, delay_s=delay_s, without_progress=fruitless)


def _is_the_same_again(history: Sequence[FailedAttempt]) -> bool:
    """A fault without a known cause is never known to be the same."""
    if len(history) < 2:
        return False
    before, last = history[-2:]
    same = (before.fault_class, before.at_step) == (last.fault_class, last.at_step)
    return same and last.at_step is not None and last.fault_class != "unknown"


def restarts_without_progress(history: Sequence[FailedAttempt], started_at_step: int) -> int:
    """How many of the latest attempts in a row reached no step that was new."""
    best = started_at_step
    fruitless = 0
    for attempt in history:
        fruitless = 0 if attempt.reached_step > best else fruitless + 1
        best = max(best, attempt.reached_step)
    return fruitless
