"""When a standstill is a hang, and who is behind: tables of situations."""

from __future__ import annotations

from dataclasses import replace

import pytest

from launcher.policy.hang import HangSeconds, How, standstill_bound_s, who_is_behind
from launcher.progress_record import Phase, Place, RankProgress

INSIDE, OUTSIDE, WAITING = Place.INSIDE, Place.OUTSIDE, Place.WAITING
R = RankProgress(
    rank=0,
    node="n0",
    phase=Phase.TRAINING,
    place=INSIDE,
    step=8,
    micro_batch=1,
    work=0,
    collectives=412,
    kind="all_reduce",
    elements=49152,
    still_s=5.0,
    state="S",
    typical_step_s=0.5,
    longest_step_s=0.6,
)
R1, R2 = replace(R, rank=1), replace(R, rank=2)


def outside(rank: RankProgress, collectives: int, **more: int | str) -> RankProgress:
    return replace(rank, place=OUTSIDE, collectives=collectives, **more)


@pytest.mark.parametrize(
    ("ranks", "how", "culprits", "certain"),
    [
        ((R, outside(R1, 411)), How.BEHIND, [1], True),
        ((outside(R, 411), R1), How.BEHIND, [0], True),
        ((R, outside(R1, 411, state="R")), How.BEHIND, [1], True),
        ((R, outside(R1, 411), R2), How.BEHIND, [1], True),
        ((R, outside(R1, 411), outside(R2, 411)), How.BEHIND, [1, 2], False),
        # One of two that are equally far back waits in the collective before, so the other one is to blame.
        ((R, replace(R1, collectives=411), outside(R2, 411)), How.BEHIND, [2, 1], False),
        ((R, replace(outside(R1, 411), step=7)), How.BEHIND, [1], True),
        ((R, replace(R1, state="T")), How.STOPPED, [1], True),
        ((replace(R, state="t"), R1), How.STOPPED, [0], True),
        # Stopped beats behind: who is behind may still wait for the one that is stopped.
        ((outside(R, 411), replace(R1, state="T")), How.STOPPED, [1], True),
        ((replace(R, state="T"), replace(R1, state="T")), How.STOPPED, [0, 1], False),
        ((R, replace(R1, state="D")), How.KERNEL, [1], False),
        ((R, outside(R1, 412)), How.OUTSIDE, [1], False),
        ((replace(R, place=WAITING), outside(R1, 411)), How.BEHIND, [1], True),
        ((R, replace(R1, kind="broadcast", micro_batch=2)), How.DIFFERENT, [0], False),
        ((R, R1, replace(R2, elements=12)), How.DIFFERENT, [2], False),
        ((R, R1, R2), How.NOBODY, [], False),
        ((outside(R, 5), outside(R1, 5)), How.NOBODY, [], False),
        ((outside(R, 5),), How.ALONE, [0], True),
    ],
)
def test_who_is_behind(ranks: tuple[RankProgress, ...], how: How, culprits: list[int], certain: bool) -> None:
    for order in (ranks, ranks[::-1]):
        finding = who_is_behind(order)
        assert (finding.how, finding.is_certain) == (how, certain)
        assert [rank.rank for rank in finding.culprits] == culprits


def test_uneven_parts_of_an_all_to_all_are_no_difference() -> None:
    ranks = [replace(R, kind="all_to_all_single"), replace(R1, kind="all_to_all_single", elements=7)]
    assert who_is_behind(ranks).how is How.NOBODY


STARTING, BATCH = replace(R, phase=Phase.STARTING), replace(R, phase=Phase.BATCH, place=OUTSIDE)
UNMEASURED = replace(R, typical_step_s=0.0, longest_step_s=0.0)


@pytest.mark.parametrize(
    ("ranks", "hang_seconds", "bound_s"),
    [
        ((R, R1), "auto", 3.0),  # 2 s and twice the step
        ((R, replace(R1, longest_step_s=20.0)), "auto", 27.0),  # an occasional long step is no hang
        ((R, UNMEASURED), "auto", 1800.0),  # the first steps
        ((R, STARTING), "auto", 1800.0),  # a slow load is never a hang
        ((R, replace(R1, phase=Phase.SAVING)), "auto", 3660.0),
        ((R, BATCH), "auto", 30.0),
        ((R, replace(BATCH, place=INSIDE)), "auto", 3.0),  # it waits for another rank there
        ((R, replace(BATCH, phase=Phase.SNAPSHOT)), "auto", 60.0),
        ((R, replace(BATCH, phase=Phase.EVALUATING)), "auto", 120.0),
        ((R, replace(BATCH, phase=Phase.EVALUATING, longest_step_s=30.0)), "auto", 300.0),
        ((replace(R, state="T"), replace(R1, phase=Phase.SAVING)), "auto", 3.0),
        ((replace(STARTING, state="T"), UNMEASURED), "auto", 10.0),
        ((R, BATCH), 600, 600.0),
        ((UNMEASURED, UNMEASURED), 60, 60.0),
        ((R, STARTING), 60, 1800.0),
        ((R, STARTING), 7200, 7200.0),
    ],
)
def test_the_bound(ranks: tuple[RankProgress, ...], hang_seconds: HangSeconds, bound_s: float) -> None:
    assert standstill_bound_s(ranks, hang_seconds) == pytest.approx(bound_s)


@pytest.mark.parametrize(("first_step_s", "bound_s"), [(1.0, 30.0), (50.0, 150.0)])
def test_after_a_restart_the_first_steps_are_known(first_step_s: float, bound_s: float) -> None:
    assert standstill_bound_s([R, UNMEASURED], "auto", known_first_step_s=first_step_s) == bound_s
    assert standstill_bound_s([R, STARTING], "auto", known_first_step_s=first_step_s) == 1800.0
