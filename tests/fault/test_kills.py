"""Done when 2: every way to kill a run leaves no process, the right exit code, and a checkpoint to go on from."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

from tests.fault.harness import Job, Run

MakeJob = Callable[..., Job]
# Enough steps that a run is still training when it is hurt, whatever the machine's speed.
LONG = {"training": {"max_steps": 4000}, "checkpoint": {"every_steps": 20, "keep": 3}}


def next_start_resumes(job: Job) -> None:
    """The next start continues from a whole checkpoint and reaches the end."""
    newest = max(
        int(path.name.split("-")[1]) for path in job.output_dir.glob("checkpoint-*") if path.name[11:].isdigit()
    )
    job.configure({**job.config, "training": {**job.config["training"], "max_steps": newest + 5}, "drill": None} | {})
    job.configure({key: value for key, value in job.config.items() if value is not None})
    run = job.run()
    assert run.process.returncode == 0, run.log
    resumed = run.events("resumed")
    assert resumed, run.log
    assert resumed[0]["step"] > 0


def test_sigkill_of_a_rank_is_survived(make_job: MakeJob) -> None:
    saves = {"every_steps": 20, "memory": "on"}
    job = make_job(training={"max_steps": 60}, checkpoint=saves, drill={"kill": {"rank": 1, "step": 30}})
    run = job.run()
    assert run.process.returncode == 0, run.log
    assert [e["signal"] for e in run.events("worker_exited") if not e["killed_by_us"]][:1] == ["SIGKILL"]
    assert [e["action"] for e in run.events("decision")] == ["restart"]
    resumed = run.events("resumed")[0]
    assert (resumed["tier"], resumed["step"] in (29, 30)) == ("memory", True), resumed
    assert run.events("run_ended")[0]["exit_code"] == 0


def test_sigkill_of_a_rank_from_outside_while_it_trains(make_job: MakeJob) -> None:
    job = make_job(**LONG)
    with job.start() as run:
        run.until_step(50)
        os.kill(run.rank_pid(0), signal.SIGKILL)
        run.until(lambda: len(run.events("resumed")) == 1, "the restart resumes")
        run.until(lambda: len(run.events("first_step")) == 2, "the restart trains")
        run.signal(signal.SIGTERM)
        assert run.wait(60) == 138, run.log
        assert not run.left_after(15)
    next_start_resumes(job)


def test_sigkill_of_the_fork_server_does_not_stop_the_training(make_job: MakeJob) -> None:
    job = make_job(**LONG)
    with job.start() as run:
        run.until_step(30)
        first = run.fork_server_pid()
        os.kill(first, signal.SIGKILL)
        run.until(lambda: "fork server was killed" in run.log, "the loss is noticed")
        # The ranks were not disturbed, and the next attempt has a fork server again.
        assert len(run.events("generation_started")) == 1
        os.kill(run.rank_pid(1), signal.SIGKILL)
        run.until(lambda: len(run.events("first_step")) == 2, "a rank's restart works with the new fork server")
        assert run.fork_server_pid() != first
        run.signal(signal.SIGTERM)
        assert run.wait(60) == 138, run.log
        assert not run.left_after(15)
    next_start_resumes(job)


def test_sigkill_of_the_agent_leaves_nothing(make_job: MakeJob) -> None:
    job = make_job(**LONG)
    with job.start() as run:
        run.until_event("checkpoint_saved")
        run.process.kill()
        run.process.wait()
        assert not run.left_after(15)
    next_start_resumes(job)


def test_sigterm_to_the_agent_saves_at_one_step(make_job: MakeJob) -> None:
    job = make_job(**LONG)
    with job.start() as run:
        run.until_step(25)
        run.signal(signal.SIGTERM)
        assert run.wait(60) == 138, run.log
        assert not run.left_after(15)
    saved = run.events("checkpoint_saved")[-1]["step"]
    # Nothing that was done is done again: the last step of all is the one that was saved.
    assert saved == run.events("run_ended")[0]["steps"]
    assert job.checkpoint(saved).joinpath("MANIFEST.json").is_file()
    next_start_resumes(job)


def test_sigterm_to_the_agent_with_exit_code_143(make_job: MakeJob) -> None:
    job = make_job(**LONG, spot={"exit_code": 143})
    with job.start() as run:
        run.until_step(3)
        run.signal(signal.SIGTERM)
        assert run.wait(60) == 143, run.log


def test_sigterm_to_a_rank_is_a_notice_for_the_run(make_job: MakeJob) -> None:
    job = make_job(**LONG)
    with job.start() as run:
        run.until_step(25)
        os.kill(run.rank_pid(1), signal.SIGTERM)
        assert run.wait(60) == 138, run.log
        assert not run.left_after(15)
    assert run.events("notice")[0]["source"] == "SIGTERM to rank 1"
    assert run.events("checkpoint_saved")[-1]["step"] == run.events("run_ended")[0]["steps"]
    next_start_resumes(job)


def test_sigterm_to_everybody_at_once_as_slurm_does(make_job: MakeJob) -> None:
    job = make_job(**LONG)
    with job.start() as run:
        run.until_step(25)
        for pid in (run.rank_pid(0), run.rank_pid(1), run.process.pid):
            os.kill(pid, signal.SIGTERM)
        assert run.wait(60) == 138, run.log
        assert not run.left_after(15)
    assert run.events("checkpoint_saved")[-1]["step"] == run.events("run_ended")[0]["steps"]


def test_ctrl_c_twice_stops_at_once(make_job: MakeJob) -> None:
    # Slow steps: an agreed save would take longer than the second signal needs.
    job = make_job(**LONG)
    with job.start() as run:
        run.until_event("checkpoint_saved")
        stop_everything_but_the_agent(run)
        run.signal(signal.SIGINT)
        run.until_event("notice")
        assert run.process.poll() is None  # the ranks cannot save, so the first signal alone waits
        run.signal(signal.SIGINT)
        assert run.wait(15) == 138, run.log
        assert not run.left_after(15)
    next_start_resumes(job)


def test_a_save_that_hangs_is_bounded(make_job: MakeJob) -> None:
    job = make_job(**LONG, spot={"grace_seconds": 2})
    with job.start() as run:
        run.until_event("checkpoint_saved")
        stop_everything_but_the_agent(run)
        run.signal(signal.SIGTERM)
        assert run.wait(20) == 138, run.log
        assert "spot.grace_seconds" in str(run.events("group_killed"))


def test_sigterm_before_the_first_step(make_job: MakeJob) -> None:
    job = make_job()
    with job.start() as run:
        run.until_event("generation_started")
        run.signal(signal.SIGTERM)
        assert run.wait(20) == 138, run.log
        assert not run.left_after(15)
    assert job.run().process.returncode == 0


def stop_everything_but_the_agent(run: Run) -> None:
    for rank in (0, 1):
        os.kill(run.rank_pid(rank), signal.SIGSTOP)
