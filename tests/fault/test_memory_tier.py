"""What is in memory counts before the disk, when it is whole; and it is not lost with a rank that does not answer."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

from tests.fault.harness import Job, Run
from tests.fault.test_memory_stays import slots_of

MakeJob = Callable[..., Job]
IN_MEMORY: dict[str, Any] = {
    "training": {"max_steps": 4000, "logging_steps": 500},
    "checkpoint": {"every_steps": 40, "memory": "on"},
}


def until_resumed(run: Run) -> dict[str, Any]:
    run.until(lambda: len(run.events("resumed")) == 1, "the restart resumes")
    resumed: dict[str, Any] = run.events("resumed")[0]
    return resumed


def stopped(run: Run) -> None:
    run.signal(signal.SIGTERM)
    assert run.wait(90) == 138, run.log
    assert not run.left_after(15)


def test_of_a_rank_killed_at_any_time_at_most_one_step_is_done_again(make_job: MakeJob) -> None:
    job = make_job(**IN_MEMORY)
    with job.start() as run:
        for number in range(1, 4):
            run.until_step(30 * number)
            os.kill(run.rank_pid(number % 2), signal.SIGKILL)
            run.until(lambda number=number: len(run.events("resumed")) == number, "the restart resumes")
            resumed = run.events("resumed")[-1]
            died = [e["last_step"] for e in run.events("worker_exited") if e["gen"] == resumed["gen"] - 1]
            assert resumed["tier"] == "memory", resumed
            assert max(died) - resumed["step"] <= 1, (died, resumed)
            run.until(lambda number=number: len(run.events("first_step")) == number + 1, "it trains again")
        stopped(run)


def test_damaged_memory_is_refused_and_the_disk_is_next(make_job: MakeJob) -> None:
    job = make_job(**IN_MEMORY)
    with job.start() as run:
        run.until_event("checkpoint_saved", step=40)
        run.until_step(45)
        os.kill(run.process.pid, signal.SIGSTOP)  # or it would look before the damage is done
        os.kill(run.rank_pid(0), signal.SIGKILL)
        for fd in slots_of(run.process.pid):
            with open(f"/proc/{run.process.pid}/fd/{fd}", "r+b", buffering=0) as slot:
                slot.seek(4096 + 100)  # in the first file
                slot.write(b"\xff\x00\xff\x00")
        os.kill(run.process.pid, signal.SIGCONT)
        resumed = until_resumed(run)
        assert resumed["tier"] == "disk", resumed
        refused = [event for event in run.events("checkpoint_rejected") if event["path"].startswith("memory")]
        assert refused, run.log
        assert all("does not have the content" in event["reason"] for event in refused), refused
        stopped(run)


def test_a_rank_that_does_not_answer_loses_nothing_when_the_run_has_to_stop(make_job: MakeJob) -> None:
    job = make_job(**{**IN_MEMORY, "checkpoint": {"every_steps": 2000, "memory": "on"}}, spot={"grace_seconds": 4})
    with job.start() as run:
        run.until_step(30)
        os.kill(run.rank_pid(1), signal.SIGSTOP)
        run.signal(signal.SIGTERM)
        assert run.wait(60) == 138, run.log
        assert "in memory only, is saved" in run.log
        (saved,) = job.output_dir.glob("checkpoint-*")
        step = int(saved.name.split("-")[1])
        assert step >= 29, run.log
    with job.start() as run:
        assert until_resumed(run)["step"] == step
        stopped(run)
