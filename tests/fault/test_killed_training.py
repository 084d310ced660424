"""Killed at random moments, whoever is hit, a training ends as if nothing had happened. `scripts/kill_training.py` does
the same a hundred times."""

from __future__ import annotations

from collections.abc import Callable

from tests.fault.harness import Job
from tests.fault.killed_training import (
    KilledTraining,
    Victim,
    changes_for,
    planned_steps,
    require_nothing_lost,
    require_the_same,
)

NUM_KILLS = 6


def test_killed_at_random_moments_the_weights_are_those_of_an_undisturbed_run(make_job: Callable[..., Job]) -> None:
    undisturbed = make_job("undisturbed", **changes_for(NUM_KILLS))
    assert undisturbed.run().process.returncode == 0
    job = make_job("killed", **changes_for(NUM_KILLS))
    training = KilledTraining(job, NUM_KILLS, seed=4, say=print)
    training.run()
    assert training.kills.total() == NUM_KILLS
    assert {victim for victim, _ in training.kills} == set(Victim)
    require_nothing_lost(job)
    require_the_same(job, undisturbed, planned_steps(NUM_KILLS))
