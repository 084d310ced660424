"""Issue 5, hangs: found within 3 s and twice the step time, the right rank named, and the run goes on from memory."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.fault.harness import Job, Run

MakeJob = Callable[..., Job]
SAVES = {"every_steps": 1000, "memory": "on"}


def hung(run: Run) -> dict[str, Any]:
    (hang,) = run.events("hang")
    (killed,) = [event for event in run.events("group_killed") if "hangs" in event["reason"]]
    print(f"found after {hang['still_seconds']:.2f} s (bound {hang['bound_seconds']:.2f} s): {hang['what']}")
    print(f"found at {hang['t']}, ended at {killed['t']}")
    return hang


def goes_on_from_memory(run: Run, hang: dict[str, Any]) -> None:
    """Restarted once, from the last step or the one before it, and every rank's stack is in the bundle."""
    assert [event["action"] for event in run.events("decision")] == ["restart"], run.log
    (resumed,) = run.events("resumed")
    assert resumed["tier"] == "memory"
    assert resumed["step"] >= hang["step"] - 1
    (incident,) = run.events("incident")
    assert (incident["class"], incident["retryable"]) == ("nccl_watchdog_timeout", True)
    assert incident["culprit_rank"] == hang["rank"]
    bundle = Path(incident["bundle"])
    for rank in (0, 1):
        assert "MainThread" in (bundle / "stacks" / f"rank-{rank}.txt").read_text("utf-8")
    verdict = json.loads((bundle / "verdict.json").read_text("utf-8"))
    assert verdict["culprit"]["rank"] == hang["rank"]


def within_the_target(hang: dict[str, Any]) -> None:
    step_s = max(rank["typical_step_s"] for rank in hang["ranks"])
    assert hang["still_seconds"] <= 3.0 + max(2 * step_s, 1.25 * max(r["longest_step_s"] for r in hang["ranks"]))


def test_a_rank_that_somebody_stops_is_named(make_job: MakeJob) -> None:
    job = make_job(training={"max_steps": 400}, checkpoint=SAVES)
    with job.start() as run:
        run.until_step(30)
        os.kill(run.rank_pid(1), signal.SIGSTOP)
        stopped_at_s = time.monotonic()
        run.until_event("hang")
        print(f"the event came {time.monotonic() - stopped_at_s:.2f} s after SIGSTOP")
        assert run.wait() == 0, run.log
        hang = hung(run)
        assert (hang["rank"], hang["how"], hang["certain"]) == (1, "stopped", True)
        within_the_target(hang)
        goes_on_from_memory(run, hang)


def test_a_rank_that_computes_for_ever_is_named(make_job: MakeJob) -> None:
    drill = {"kill": {"rank": 0, "step": 20, "at": "micro_batch", "hang": "loop"}}
    job = make_job(training={"max_steps": 40}, checkpoint=SAVES, drill=drill)
    run = job.run()
    assert run.process.returncode == 0, run.log
    hang = hung(run)
    assert (hang["rank"], hang["step"], hang["how"], hang["certain"]) == (0, 19, "behind", True), hang
    within_the_target(hang)
    goes_on_from_memory(run, hang)
    (incident,) = run.events("incident")
    assert any("drills.py" in line["text"] for line in incident["evidence"]), incident


def test_a_collective_that_one_rank_never_enters_twice_at_the_same_step_ends_the_start(make_job: MakeJob) -> None:
    absent = {"rank": 0, "step": 20, "at": "micro_batch", "hang": "absent"}
    job = make_job(training={"max_steps": 40}, checkpoint=SAVES, drill={"kill": [absent, absent]})
    run = job.run()
    assert run.process.returncode == 138, run.log
    assert [(drill["signal"], drill["hang"]) for drill in run.events("drill")] == [(None, "absent")] * 2
    first, second = run.events("hang")
    for hang in (first, second):
        assert (hang["rank"], hang["step"], hang["how"], hang["certain"]) == (0, 19, "behind", True), hang
    within_the_target(first)
    assert second["bound_seconds"] < 60, "no step was measured, but it is known what the first one took before"
    again, stop = run.events("decision")
    assert (again["action"], again["inputs"]["at_step"]) == ("restart", 19)
    assert (stop["action"], stop["inputs"]["at_step"]) == ("stop", 19)
    assert "again after step 19" in stop["reason"]
    assert job.checkpoint(19).is_dir(), "what only memory had is saved"
