"""Two runs on one output folder: the second is refused with the name of the first, and nobody waits for the dead."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from launcher.agent.run_lock import RunLock
from tests.fault.harness import Job

MakeJob = Callable[..., Job]
ELSEWHERE = "pid 7 on gpu-17 (boot 00000000, pid:[4026531836], started 77)"


@contextmanager
def held_elsewhere(output_dir: Path) -> Iterator[None]:
    """As a file server shows it: the lock is held, by a process that is none of this machine's."""
    path = output_dir / "ftlaunch" / "lock"
    path.parent.mkdir(parents=True)
    with path.open("w") as stream:
        stream.write(ELSEWHERE)
        stream.flush()
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def test_the_second_run_on_this_machine_is_refused_at_once(make_job: MakeJob) -> None:
    job = make_job(training={"max_steps": 4000})
    with job.start() as first:
        first.until_event("generation_started")
        second = job.run(timeout_s=60)
        assert second.process.returncode == 2
        assert f"in use by another ftlaunch (pid {first.process.pid} on {socket.gethostname()}" in second.log
        assert "stop the other one, or choose another output_dir" in second.log
        assert not second.events("run_started")
        assert first.process.poll() is None


def test_after_kill_9_the_same_node_takes_the_folder_over_at_once(make_job: MakeJob) -> None:
    job = make_job(training={"max_steps": 4000})
    with job.start() as first:
        first.until_event("generation_started")
        os.kill(first.process.pid, signal.SIGKILL)
        first.process.wait()
        with job.start() as second:  # while what the first has started may still be ending
            second.until_event("generation_started")
            assert "is locked by" not in second.log
            second.signal(signal.SIGTERM)
            assert second.wait(60) == 138, second.log


def test_a_run_on_another_machine_is_waited_for_and_named(make_job: MakeJob) -> None:
    job = make_job()
    with held_elsewhere(job.output_dir), job.start() as run:
        run.until(lambda: "waiting at most 120 s" in run.log, "it says for whom it waits", timeout_s=60)
        assert ELSEWHERE in run.log
        run.signal(signal.SIGTERM)
        assert run.wait(30) == 138, run.log
        assert f"is still locked by {ELSEWHERE}; run it again" in run.log
    assert not run.events("run_started")


def test_a_machine_that_is_lost_holds_nothing(tmp_path: Path) -> None:
    """Its name is in the file, its lock has ended with it (or with the file server's lease)."""
    with held_elsewhere(tmp_path):
        pass
    said: list[str] = []
    with RunLock(tmp_path, say=said.append):
        pass
    assert said == []


def test_a_copy_of_the_folder_is_free_while_the_first_runs(tmp_path: Path) -> None:
    """The text of its lock names a living process, which does not hold the copy."""
    with RunLock(tmp_path / "out"):
        shutil.copytree(tmp_path / "out", tmp_path / "copy")
        with RunLock(tmp_path / "copy"):
            pass
