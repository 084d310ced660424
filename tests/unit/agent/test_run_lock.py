"""One run per output folder, among real processes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from launcher.agent.run_lock import RunLock
from launcher.errors import UserError

REPOSITORY = Path(__file__).parents[3]
HOLD = (
    "import sys, time; from pathlib import Path; from launcher.agent.run_lock import RunLock\n"
    "with RunLock(Path(sys.argv[1])):\n    print('held', flush=True)\n    time.sleep(60)"
)


@contextmanager
def holder(output_dir: Path) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(output_dir)], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True
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
