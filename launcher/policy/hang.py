"""When a standstill is a hang, and which rank is behind. Pure: records of ranks in, bounds and findings out.

A rank that hangs makes all others wait in a collective, so nothing moves any more. Who is behind is read from what the
ranks had written before: the number of a collective that one has not entered and in which the others wait.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Literal, TypeAlias

from launcher.progress_record import Phase, Place, RankProgress

HangSeconds: TypeAlias = int | Literal["auto", "off"]

LEAST_STILL_S = 2.0  # no standstill that is shorter is looked into
_STOPPED_S = 10.0  # for a process that somebody has stopped, where no step has been measured yet
_STOPPED_STATES = ("T", "t")
_UNINTERRUPTIBLE = "D"
_LEAST_FIRST_STEP_S = 30.0
_FIRST_STEP_S = 1800.0  # as for a collective (training.ddp_timeout): what is compiled or connected late is in it
_LEAST_EVALUATING_S = 120.0

# These hold whatever restart.hang_seconds says, unless it says more. Each is longer than what a rank waits for there by
# itself: a model on a cold network file system takes many minutes, a checkpoint may take an hour to become durable.
_PATIENT_S = {Phase.STARTING: 1800.0, Phase.ENCODING: 1800.0, Phase.SAVING: 3660.0, Phase.ENDING: 1800.0}
_BATCH_S = 30.0
_SNAPSHOT_S = 60.0  # the agent answers within 30 s, or not at all


class How(Enum):
    """What speaks against the rank that is named."""

    STOPPED = "stopped"  # its process is stopped, and cannot go on by itself
    BEHIND = "behind"  # it has not entered the collective that others wait in
    OUTSIDE = "outside"  # it is as far as the others, who wait in a collective, and is in none
    KERNEL = "kernel"  # it is as far as the others, and sits in the kernel without being interruptible
    DIFFERENT = "different"  # ranks wait in different collectives under the same number
    ALONE = "alone"  # there is no other rank
    NOBODY = "nobody"  # all are equally far


@dataclass(frozen=True)
class Finding:
    """`culprits`: the rank that is behind, and those that are in the very same position; the first is named. Empty
    where nobody is behind. `waiting`: one of the ranks that wait for it."""

    how: How
    culprits: tuple[RankProgress, ...]
    waiting: RankProgress | None

    @property
    def culprit(self) -> RankProgress | None:
        return self.culprits[0] if self.culprits else None

    @property
    def is_certain(self) -> bool:
        return self.how in (How.STOPPED, How.BEHIND, How.ALONE) and len(self.culprits) == 1


def standstill_bound_s(
    ranks: Sequence[RankProgress], hang_seconds: HangSeconds, *, known_first_step_s: float = 0.0
) -> float:
    """How long none of these ranks may have moved before it is a hang: the patience of the most patient phase. A
    process that is stopped needs no patience, whatever it is at. `known_first_step_s`: of earlier attempts, 0.0 where
    there was none."""
    step_s = max(_step_bound_s(rank) for rank in ranks) if all(rank.longest_step_s for rank in ranks) else None
    if any(rank.state in _STOPPED_STATES for rank in ranks):
        automatic = step_s or _STOPPED_S
    else:
        automatic = max(_phase_bound_s(rank, step_s, known_first_step_s) for rank in ranks)
    if not isinstance(hang_seconds, int):
        return automatic
    patient = [_PATIENT_S.get(Phase(rank.phase), 0.0) for rank in ranks]
    return max(float(hang_seconds), *patient)


def _step_bound_s(rank: RankProgress) -> float:
    """Of a job with even steps it is 2 s and twice the step; where steps are uneven, the longest of late counts."""
    return LEAST_STILL_S + max(2 * rank.typical_step_s, 1.25 * rank.longest_step_s)


def _phase_bound_s(rank: RankProgress, step_s: float | None, first_step_s: float) -> float:
    phase = Phase(rank.phase)
    if phase in _PATIENT_S:
        return _PATIENT_S[phase]
    if step_s is None:
        return max(_LEAST_FIRST_STEP_S, 3 * first_step_s) if first_step_s else _FIRST_STEP_S
    if rank.place != Place.OUTSIDE:  # what it waits for there is another rank, which has patience of its own
        return step_s
    evaluating_s = max(_LEAST_EVALUATING_S, 10 * rank.longest_step_s)
    patience_s = {Phase.BATCH: _BATCH_S, Phase.SNAPSHOT: _SNAPSHOT_S, Phase.EVALUATING: evaluating_s}
    return max(step_s, patience_s.get(phase, 0.0))


def who_is_behind(ranks: Sequence[RankProgress]) -> Finding:
    """`ranks`: all that there are, on all nodes, at least one; none of them moves any more."""
    ranks = sorted(ranks, key=lambda rank: rank.rank)
    stopped = [rank for rank in ranks if rank.state in _STOPPED_STATES]
    if stopped:
        return _found(How.STOPPED, _furthest_back(stopped), ranks)
    if len(ranks) == 1:
        return _found(How.ALONE, ranks, ranks)
    odd = _in_other_collective(ranks)
    if odd:
        return _found(How.DIFFERENT, odd, ranks)
    last = _furthest_back(ranks)
    if len(last) < len(ranks):
        return _found(How.BEHIND, _likeliest(last), ranks)
    for how, suspects in (
        (How.OUTSIDE, [rank for rank in ranks if rank.place == Place.OUTSIDE]),
        (How.KERNEL, [rank for rank in ranks if rank.state == _UNINTERRUPTIBLE]),
    ):
        if suspects and len(suspects) < len(ranks):
            return _found(how, suspects, ranks)
    return Finding(How.NOBODY, (), None)


def _position(rank: RankProgress) -> tuple[int, int, int]:
    return rank.step, rank.micro_batch, rank.collectives


def _furthest_back(ranks: Sequence[RankProgress]) -> list[RankProgress]:
    last = min(map(_position, ranks))
    return [rank for rank in ranks if _position(rank) == last]


def _likeliest(ranks: list[RankProgress]) -> list[RankProgress]:
    """Of ranks in the same position: those that wait in nothing, or else sit in the kernel, before the others."""
    outside = [rank for rank in ranks if rank.place == Place.OUTSIDE]
    uninterruptible = [rank for rank in ranks if rank.state == _UNINTERRUPTIBLE]
    first = outside or uninterruptible
    return first + [rank for rank in ranks if rank not in first]


def _in_other_collective(ranks: Sequence[RankProgress]) -> list[RankProgress]:
    """Where all wait in a collective of the same number, but not in the same one: those in the rarer one. Of two
    equally frequent ones those that are further back in the program."""
    if any(rank.place != Place.INSIDE for rank in ranks) or len({rank.collectives for rank in ranks}) > 1:
        return []
    frequency = Counter(map(_what, ranks))
    if len(frequency) == 1:
        return []
    rarest = min(frequency.values())
    return _furthest_back([rank for rank in ranks if frequency[_what(rank)] == rarest])


def _what(rank: RankProgress) -> tuple[str, int]:
    """What must be the same on all ranks."""
    return rank.kind, 0 if rank.kind.startswith("all_to_all") else rank.elements


def _found(how: How, culprits: Sequence[RankProgress], ranks: Sequence[RankProgress]) -> Finding:
    named = {rank.rank for rank in culprits}
    others = [rank for rank in ranks if rank.rank not in named]
    waiting = max(others, key=lambda rank: (rank.place != Place.OUTSIDE, *_position(rank)), default=None)
    return Finding(how, tuple(culprits), waiting)
