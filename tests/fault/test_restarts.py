"""Restarts leave nothing behind. scripts/many_restarts.py does it two hundred times."""

from __future__ import annotations

import signal
from collections.abc import Callable

from tests.fault.harness import Job
from tests.fault.restarts import growth, restarts

MakeJob = Callable[..., Job]


def test_restarts_leave_nothing_behind(make_job: MakeJob) -> None:
    job = make_job(training={"max_steps": 100000, "logging_steps": 1000}, checkpoint={"every_steps": 1000, "keep": 1})
    with job.start() as run:
        run.until_step(3)
        held = list(restarts(run, 12, seed=1))
        run.signal(signal.SIGTERM)
        assert run.wait(60) == 138, run.log
        assert not run.left_after(15)
    assert growth(held[3], held[-1]) == []
