"""Disks that are full, read-only, forbidden or broken: what a run does, what it says, and what it never costs."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from launcher.checkpoint.verify import verify_checkpoint
from tests.fault.harness import ROOT, Job, Run
from tests.fault.judging import copy_checkpoints
from tests.fault.trouble import as_anybody, enlarge, mode_of, read_only, small_disk, with_strace
from tests.fault.weights import digests

MakeJob = Callable[..., Job]
PAGE_BYTES = 4096


def bytes_on_disk(folder: Path) -> int:
    """In whole pages, as a tmpfs counts."""
    files = [path.stat().st_size for path in folder.rglob("*") if path.is_file()]
    return sum(-(-size // PAGE_BYTES) * PAGE_BYTES for size in files)


def copied(trained: Job, folder: Path) -> Job:
    """A run that was killed after its checkpoint of step 6, before `final/`."""
    out = copy_checkpoints(trained.output_dir, folder / "out")
    return Job(folder, {**trained.config, "output_dir": str(out)})


def ftlaunch(command: str, job: Job, *prefix: str) -> subprocess.CompletedProcess[str]:
    what = [str(job.output_dir), "--verify"] if command == "checkpoints" else ["--config", str(job.path)]
    return subprocess.run(
        [*prefix, sys.executable, "-m", "launcher", command, *what],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        cwd=ROOT,
    )


# -- no space left -----------------------------------------------------------------------------------------------------


@pytest.mark.root
def test_no_space_left_in_mid_save(trained: Job, make_job: MakeJob, tmp_path: Path) -> None:
    """The second checkpoint does not fit. The first is not touched, what was begun is removed, and once there is room
    the same command goes on, to the very weights of a run without this."""
    one = bytes_on_disk(trained.checkpoint(6))
    with small_disk(tmp_path / "disk", int(1.6 * one) + 100 * PAGE_BYTES // 4) as disk:
        job = make_job(
            output_dir=str(disk / "out"),
            training={"max_steps": 6},
            checkpoint={"memory": "off"},
            check={"skip": ["disk.free"]},  # preflight would rightly refuse this disk
        )
        run = job.run()
        assert run.process.returncode == 1, run.log
        (incident,) = run.events("incident")
        assert incident["class"] == "no_space", run.log
        assert not incident["retryable"]
        assert "were free" in run.log
        assert "a checkpoint takes" in run.log
        assert str(job.output_dir) in run.log
        assert verify_checkpoint(job.checkpoint(3), 3).whole
        staging = job.output_dir / "ftlaunch" / "staging"
        assert [path for path in staging.rglob("*") if path.is_file()] == [], "the space comes back"

        enlarge(disk, 20 * one)
        again = job.run()
        assert again.process.returncode == 0, again.log
        assert again.events("resumed")[0]["step"] == 3
        assert digests(job.checkpoint(6)) == digests(trained.checkpoint(6))


def test_a_disk_without_room_is_refused_before_the_start(make_job: MakeJob, tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 1 << 20) as disk:
        job = make_job(output_dir=str(disk / "out"))
        run = job.run()
        assert run.process.returncode == 3, run.log
        assert "disk.free" in run.log
        assert not run.events("generation_started")


# -- read-only ---------------------------------------------------------------------------------------------------------


@pytest.mark.root
def test_a_read_only_mount_is_refused_before_the_start(trained: Job, tmp_path: Path) -> None:
    job = copied(trained, tmp_path)
    with read_only(job.output_dir):
        run = job.run()
        assert run.process.returncode == 2, run.log
        assert "output_dir cannot be written" in run.log
        assert "mounted read-only" in run.log
        assert ftlaunch("checkpoints", job).returncode == 0, "looking needs no right to write"
    assert not (job.output_dir / "ftlaunch").exists()


def test_a_folder_of_another_user_is_refused_before_the_start(trained: Job, tmp_path: Path) -> None:
    job = copied(trained, tmp_path)
    with mode_of(job.output_dir, 0o555), Run(job, (), {}, prefix=as_anybody()) as run:
        assert run.wait() == 2, run.log
        assert "Permission denied" in run.log
        assert "give this user the right to write there" in run.log
    assert not (job.output_dir / "ftlaunch").exists()


def test_records_that_may_not_be_written_are_named(trained: Job, tmp_path: Path) -> None:
    """The folder is this user's, what an earlier start of another user left in it is not."""
    job = copied(trained, tmp_path)
    lock = job.output_dir / "ftlaunch" / "lock"
    lock.parent.mkdir()
    lock.touch()
    with mode_of(lock, 0o444), Run(job, (), {}, prefix=as_anybody()) as run:
        assert run.wait() == 2, run.log
    assert f"the output folder cannot be used: [Errno 13] Permission denied: '{lock}'" in run.log
    assert "needs the right to read and write there" in run.log


@pytest.mark.root
def test_a_folder_that_becomes_read_only_while_the_run_goes_on(make_job: MakeJob) -> None:
    """What could be written at the start and cannot now is not the job's fault: run it again, elsewhere."""
    job = make_job(training={"max_steps": 4000}, checkpoint={"every_steps": 20, "memory": "off"})
    with job.start() as run:
        run.until_event("checkpoint_saved")
        with read_only(job.output_dir):
            assert run.wait(120) == 138, run.log
        assert not run.left_after(15)
    assert "Read-only file system" in run.log
    assert "run it again" in run.log
    (incident,) = run.events("incident")
    assert (incident["class"], incident["retryable"]) == ("permission", True)
    saved = run.events("checkpoint_saved")[-1]["step"]
    assert verify_checkpoint(job.checkpoint(saved), saved).whole


# -- what cannot be read -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["MANIFEST.json", "scheduler.pt", "trainer_state.json", "."])
def test_a_checkpoint_that_this_user_may_not_read_is_not_damaged(trained: Job, tmp_path: Path, name: str) -> None:
    """Exit code 2 and the path; set aside, it would cost the progress in it."""
    job = copied(trained, tmp_path)
    path = job.checkpoint(6) / name
    with mode_of(path, 0o000):
        for command in ("checkpoints", "run"):
            done = ftlaunch(command, job, *as_anybody())
            assert done.returncode == 2, done.stderr
            assert f"[Errno 13] Permission denied: '{path}" in done.stderr
            assert "needs the right to read" in done.stderr
            assert "Traceback" not in done.stderr
    assert verify_checkpoint(job.checkpoint(6), 6).whole


LOOK = """
import json, sys
from pathlib import Path
from tests.fault.judging import start_looks, identity_of
judged = start_looks(Path(sys.argv[1]), json.loads(sys.argv[2]))
print(json.dumps([judged.resume.step, [refused.reason for refused in judged.choice.refused]]))
"""


def looks_with_errors(job: Job, *files: Path) -> subprocess.CompletedProcess[str]:
    """What a start makes of the checkpoints when every read of these files ends with EIO."""
    identity = json.loads((job.checkpoint(3) / "MANIFEST.json").read_text())["identity"]
    paths = [option for file in files for option in ("-P", str(file))]
    strace = with_strace(*paths, "-o", job.path.parent / "trace", "-e", "inject=read:error=EIO", "-e", "trace=read")
    return subprocess.run(
        [*strace, sys.executable, "-c", LOOK, str(job.output_dir), json.dumps(identity)],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        cwd=ROOT,
    )


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "MANIFEST.json"])
def test_a_block_that_the_disk_has_lost(trained: Job, tmp_path: Path, name: str) -> None:
    """One file of the newest checkpoint cannot be read, all of the one before can: it will not get better."""
    job = copied(trained, tmp_path)
    set_aside = job.output_dir / "checkpoint-6.rejected"
    done = looks_with_errors(job, job.checkpoint(6) / name, set_aside / name)  # a new name mends nothing
    assert done.returncode == 0, done.stderr
    reason = f"{name} cannot be read (Input/output error), while all of checkpoint-3 can"
    assert json.loads(done.stdout) == [3, [reason]]
    assert set_aside.is_dir()


def test_a_storage_that_answers_nothing_costs_no_checkpoint(trained: Job, tmp_path: Path) -> None:
    job = copied(trained, tmp_path)
    done = looks_with_errors(job, *(job.checkpoint(step) / "adapter_model.safetensors" for step in (3, 6)))
    assert done.returncode == 1
    assert f"OSError: [Errno 5] Input/output error: '{job.checkpoint(6) / 'adapter_model.safetensors'}'" in done.stderr
    assert sorted(path.name for path in job.output_dir.glob("checkpoint-*")) == ["checkpoint-3", "checkpoint-6"]


def test_a_start_on_a_storage_that_fails_ends_with_138(trained: Job, tmp_path: Path) -> None:
    job = copied(trained, tmp_path)
    paths = [option for step in (3, 6) for option in ("-P", str(job.checkpoint(step) / "MANIFEST.json"))]
    strace = with_strace(*paths, "-o", tmp_path / "trace", "-e", "inject=read:error=EIO", "-e", "trace=read")
    done = ftlaunch("run", job, *strace)
    assert done.returncode == 138, done.stderr
    assert "Input/output error" in done.stderr
    assert "run it again" in done.stderr
    assert sorted(path.name for path in job.output_dir.glob("checkpoint-*")) == ["checkpoint-3", "checkpoint-6"]
