"""The edges of a run: planned end, epochs, console, disk. Each test is named after what was once seen."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from launcher.agent.events import read_json_lines
from tests.fault.harness import ROOT, Job
from tests.fault.weights import digests, history

MakeJob = Callable[..., Job]


def test_workers_at_the_end_of_an_epoch_do_not_stop_the_run(make_job: MakeJob) -> None:
    job = make_job(training={"max_steps": 36, "dataloader_num_workers": 1})  # 16 steps an epoch
    run = job.run()
    assert run.process.returncode == 0, run.log
    assert not run.events("notice")


def test_a_fault_after_the_last_checkpoint_trains_no_step_too_many(make_job: MakeJob, tiny: Path) -> None:
    job = make_job(data={"eval": str(tiny / "eval.jsonl")}, training={"max_steps": 6})
    with job.start() as run:
        run.until_event("checkpoint_saved", step=6)
        os.kill(run.rank_pid(1), signal.SIGKILL)
        assert run.wait(120) == 0, run.log
    steps = [path.name for path in job.output_dir.glob("checkpoint-*")]
    assert sorted(steps) == ["checkpoint-3", "checkpoint-6"]
    assert json.loads((job.output_dir / "final" / "MANIFEST.json").read_text())["step"] == 6


def test_an_evaluation_at_the_epochs_end_is_part_of_its_last_step(make_job: MakeJob, tiny: Path) -> None:
    """Killed in it, the run repeats it; killed after it, the run does not."""
    changes = {
        "data": {"eval": str(tiny / "eval.jsonl")},
        "training": {"max_steps": 20, "eval_strategy": "epoch"},
        "checkpoint": {"every_steps": 8, "memory": "on"},
    }
    undisturbed = make_job("undisturbed", **changes)
    assert undisturbed.run().process.returncode == 0
    kills = [{"rank": 0, "at": "evaluation", "step": 16}, {"rank": 1, "step": 17}]
    killed = make_job("killed", **changes, drill={"kill": kills})
    run = killed.run()
    assert run.process.returncode == 0, run.log
    assert [event["step"] for event in run.events("resumed")] == [15, 16]
    for step in (16, 20):
        assert digests(killed.checkpoint(step)) == digests(undisturbed.checkpoint(step))
        assert history(killed.checkpoint(step)) == history(undisturbed.checkpoint(step))
    assert [entry["step"] for entry in history(killed.checkpoint(20)) if "eval_loss" in entry] == [0, 16, 20]


def test_a_finished_run_can_be_trained_further(make_job: MakeJob) -> None:
    job = make_job(training={"max_steps": 4})
    assert job.run().process.returncode == 0
    run = job.run("--set", "training.max_steps=6")
    assert run.process.returncode == 0, run.log
    assert run.events("resumed")[0]["step"] == 4
    assert json.loads((job.output_dir / "final" / "MANIFEST.json").read_text())["step"] == 6


def test_a_planned_end_that_is_lowered_below_the_checkpoint_is_reached(make_job: MakeJob) -> None:
    job = make_job(training={"max_steps": 12}, checkpoint={"every_steps": 6})
    with job.start() as run:
        run.until_event("checkpoint_saved", step=6)
        run.process.kill()
        run.process.wait()
    run = job.run("--set", "training.max_steps=5")
    assert run.process.returncode == 0, run.log
    assert not run.events("incident")
    assert json.loads((job.output_dir / "final" / "MANIFEST.json").read_text())["step"] in (6, 12)
    assert "nothing left to do" in job.run("--set", "training.max_steps=5").log


def test_a_reader_that_goes_away_does_not_end_the_training(make_job: MakeJob) -> None:
    job = make_job(training={"max_steps": 6})
    command = f"exec {sys.executable} -m launcher --config {job.path} 2>&1 | head -1"
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    subprocess.run(["bash", "-c", command], check=True, timeout=120, env=environ, capture_output=True)
    deadline = time.monotonic() + 60
    while not job.events("run_ended") and time.monotonic() < deadline:
        time.sleep(0.1)
    assert [event["exit_code"] for event in job.events("run_ended")] == [0]
    assert job.checkpoint(6).is_dir()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB of its own."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    folder = tmp_path / "small"
    folder.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)], capture_output=True, check=False
    )
    if done.returncode != 0:
        pytest.skip(f"no mount here: {done.stderr.decode()}")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.mark.root
def test_a_disk_that_is_full_for_a_while_loses_no_record(make_job: MakeJob, small_disk: Path) -> None:
    job = make_job(
        output_dir=str(small_disk / "out"),
        training={"max_steps": 4000},
        checkpoint={"every_steps": 3999},
        check={"skip": ["disk.free"]},  # preflight would rightly refuse this disk
    )
    with job.start() as run:
        run.until_step(5)
        filler = small_disk / "filler"
        with filler.open("wb") as stream:
            try:
                while True:
                    stream.write(b"x" * 65536)
                    stream.flush()
            except OSError:
                pass
        run.until(lambda: "records cannot be written" in run.log, "the trouble is said")
        filler.unlink()
        run.until(lambda: "records are written again" in run.log, "the records are caught up")
        run.signal(signal.SIGTERM)
        assert run.wait(60) == 138, run.log
    # A line that the full disk cut off may stand there, but what it said stands in a whole line as well.
    steps = {record["step"] for record in read_json_lines(job.output_dir / "ftlaunch" / "samples" / "n0.jsonl")}
    assert steps == set(range(1, max(steps) + 1))


def test_sigterm_right_after_the_start(make_job: MakeJob) -> None:
    job = make_job()
    with job.start() as run:
        # As soon as the program itself answers for signals; before that Python or the kernel does.
        run.until(lambda: heeds_sigterm(run.process.pid), "SIGTERM is heeded", timeout_s=20)
        run.signal(signal.SIGTERM)
        assert run.wait(30) == 138, run.log
        assert not run.left_after(15)
    assert job.run().process.returncode == 0


def test_a_rank_that_dies_while_others_still_import(make_job: MakeJob) -> None:
    job = make_job(training={"max_steps": 4})
    with job.start(environ={"FTLAUNCH_FORK_SERVER": "off"}) as run:
        run.until(lambda: run.has_rank(0), "rank 0 is started")
        os.kill(run.rank_pid(0), signal.SIGKILL)
        assert run.wait(120) == 0, run.log
    assert [event["action"] for event in run.events("decision")] == ["restart"]


def test_a_deepspeed_json_with_its_own_scheduler(make_job: MakeJob, tmp_path: Path) -> None:
    own = {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "zero_optimization": {"stage": 2},
        "zero_allow_untested_optimizer": True,
        "scheduler": {
            "type": "WarmupLR",
            "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"},
        },
    }
    (tmp_path / "ds.json").write_text(json.dumps(own))
    changes = {"deepspeed": str(tmp_path / "ds.json"), "training": {"max_steps": 6}}
    undisturbed = make_job("undisturbed", **changes)
    run = undisturbed.run()
    assert run.process.returncode == 0, run.log
    killed = make_job("killed", **changes, drill={"kill": {"rank": 0, "step": 5}})
    assert killed.run().process.returncode == 0
    assert digests(killed.checkpoint(6)) == digests(undisturbed.checkpoint(6))


def test_changed_data_is_refused_on_resume(make_job: MakeJob, tiny: Path, tmp_path: Path) -> None:
    data = tmp_path / "train.jsonl"
    data.write_bytes((tiny / "train.jsonl").read_bytes())
    job = make_job(data={"train": str(data)}, training={"max_steps": 4})
    assert job.run().process.returncode == 0
    data.write_text('{"question": "node", "answer": "rank"}\n' + data.read_text())
    run = job.run("--set", "training.max_steps=6")
    assert run.process.returncode == 2, run.log
    assert "have changed since step 4" in run.log


def test_a_new_learning_rate_on_resume_is_said_to_have_no_effect(make_job: MakeJob) -> None:
    job = make_job(training={"max_steps": 2})
    assert job.run().process.returncode == 0
    run = job.run("--set", "training.max_steps=3", "--set", "training.learning_rate=0.5")
    assert run.process.returncode == 0, run.log
    assert "training.learning_rate was 0.01 and is 0.5 now" in run.log


def test_children_that_the_entrypoint_started_before_are_left_alone(make_job: MakeJob) -> None:
    """`tensorboard & exec ftlaunch ...`: what became a child of ftlaunch by exec was not started by it."""
    job = make_job(training={"max_steps": 2})
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    script = f"sleep 100 >/dev/null 2>&1 & echo $!; exec {sys.executable} -m launcher --config {job.path}"
    done = subprocess.run(
        ["bash", "-c", script], env=environ, timeout=120, stdout=subprocess.PIPE, text=True, check=False
    )
    sleeper = int(done.stdout.split()[0])
    try:
        assert done.returncode == 0
        os.kill(sleeper, 0)  # still there
    finally:
        os.kill(sleeper, signal.SIGKILL)


def test_tensorboard_files_are_written(make_job: MakeJob) -> None:
    pytest.importorskip("tensorboard")
    job = make_job(training={"max_steps": 2}, monitor={"tensorboard": True})
    run = job.run()
    assert run.process.returncode == 0, run.log
    assert list(job.output_dir.rglob("events.out.tfevents.*"))


def heeds_sigterm(pid: int) -> bool:
    """Whether the process has a handler for SIGTERM (SigCgt of proc(5))."""
    status = Path(f"/proc/{pid}/status").read_text()
    caught = int(status.split("SigCgt:")[1].split()[0], 16)
    return bool(caught >> (signal.SIGTERM - 1) & 1)
