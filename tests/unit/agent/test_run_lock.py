"""One run per output folder, among real processes."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from launcher.agent.run_lock import RunLock
from launcher.errors import ExitCode, LockedElsewhere, UserError

REPOSITORY = Path(__file__).parents[3]
HOLD = (
    "import sys, time; from pathlib import Path; from launcher.agent.run_lock import RunLock\n"
    "with RunLock(Path(sys.argv[1])):\n    print('held', flush=True)\n    time.sleep(60)"
)


@contextmanager
def holder(output_dir: Path, program: str = HOLD) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(output_dir)], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def test_the_second_run_is_refused_with_the_pid_of_the_first(tmp_path: Path) -> None:
    with holder(tmp_path) as first:
        with pytest.raises(UserError) as caught, RunLock(tmp_path):
            pytest.fail("two runs in one folder")
        assert f"pid {first.pid} on " in str(caught.value)
        assert str(tmp_path) in str(caught.value)
        assert "choose another output_dir" in str(caught.value)
        assert caught.value.exit_code == 2


def test_a_refused_run_does_not_spoil_the_lock(tmp_path: Path) -> None:
    with holder(tmp_path) as first:
        for _ in range(2):
            with pytest.raises(UserError, match=f"pid {first.pid} "), RunLock(tmp_path):
                pytest.fail("two runs in one folder")


def test_however_the_first_ends_the_folder_is_free_again(tmp_path: Path) -> None:
    with holder(tmp_path) as first:
        first.kill()
        first.wait()
        with RunLock(tmp_path):
            pass
    with RunLock(tmp_path):
        pass


def test_another_folder_is_another_run(tmp_path: Path) -> None:
    with holder(tmp_path / "a"), RunLock(tmp_path / "b"):
        pass


def test_a_child_of_the_holder_does_not_keep_the_lock(tmp_path: Path) -> None:
    with RunLock(tmp_path):
        child = subprocess.Popen(["sleep", "60"], close_fds=False)
    try:
        with RunLock(tmp_path):
            pass
    finally:
        child.kill()
        child.wait()


def hold(path: Path, text: str) -> Any:
    """Somebody holds the lock (a descriptor of this process) and has written `text` into it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    stream = path.open("w")
    stream.write(text)
    stream.flush()
    fcntl.flock(stream, fcntl.LOCK_EX)
    return stream


@pytest.mark.parametrize(
    "holder",
    [
        f"pid {os.getpid()} on {socket.gethostname()} (boot 00000000, pid:[1], started 1)",
        f"pid 1 on {socket.gethostname()} (boot 00000000, pid:[1], started 1)",
        "pid 7 on another-host",
        "",
    ],
    ids=["my own pid in a lost pod", "pid 1 of a lost pod", "older text", "no text"],
)
def test_a_holder_that_may_be_a_lost_machine_is_waited_for(tmp_path: Path, holder: str) -> None:
    said: list[str] = []
    with hold(tmp_path / "ftlaunch" / "lock", holder):
        lock = RunLock(tmp_path, say=said.append, stopped=lambda: bool(said), stop_exit_code=ExitCode.STOPPED_143)
        with pytest.raises(LockedElsewhere, match="still locked") as refused, lock:
            pytest.fail("it was not to be had")
    assert refused.value.exit_code == 143
    assert "waiting at most 120 s" in said[0]


def test_the_wait_ends_when_the_lock_is_released(tmp_path: Path) -> None:
    held = hold(tmp_path / "ftlaunch" / "lock", "pid 7 on another-host")
    with RunLock(tmp_path, say=lambda _: held.close()):
        assert (tmp_path / "ftlaunch" / "lock").read_text().startswith(f"pid {os.getpid()} on ")


# -- file systems without locks ----------------------------------------------------------------------------------------

NO_LOCKS = (
    "import errno, fcntl\ndef flock(fd, how): raise OSError(errno.ENOLCK, 'No locks available')\nfcntl.flock = flock\n"
)


@pytest.fixture
def without_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(fd: int, how: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)


def test_without_locks_a_living_run_on_this_machine_is_refused_all_the_same(
    tmp_path: Path, without_locks: None
) -> None:
    with holder(tmp_path, NO_LOCKS + HOLD) as first:
        with pytest.raises(UserError, match=f"pid {first.pid} on "), RunLock(tmp_path):
            pytest.fail("two runs in one folder")
        first.kill()
        first.wait()
        with RunLock(tmp_path):
            assert (tmp_path / "ftlaunch" / "lock").read_text().startswith(f"pid {os.getpid()} on ")
    assert not (tmp_path / "ftlaunch" / "lock").read_text().strip()


def test_without_locks_a_run_elsewhere_is_named_for_the_user_to_look(tmp_path: Path, without_locks: None) -> None:
    path = tmp_path / "ftlaunch" / "lock"
    path.parent.mkdir()
    path.write_text("pid 7 on another-host (boot 00000000, pid:[1], started 1)")
    said: list[str] = []
    with RunLock(tmp_path, say=said.append):
        pass
    (line,) = said
    assert "no locks on this file system (No locks available): start this run only once" in line
    assert "the lock names pid 7 on another-host" in line
