"""Finding and ending what a run has started, with real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from launcher.process import (
    RUN_TOKEN_VARIABLE,
    carriers_of,
    descendants,
    kill_all,
    wait_until_adopted,
)

REPOSITORY = Path(__file__).parents[2]


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in ("Z", "X")


def until(condition: Callable[[], bool], bound_s: float = 10.0) -> bool:
    deadline = time.monotonic() + bound_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def run_python(code: str, **options: object) -> subprocess.Popen[str]:
    return subprocess.Popen(  # type: ignore[call-overload, no-any-return]
        [sys.executable, "-c", code],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        text=True,
        **options,
    )


def test_descendants_are_found_through_generations() -> None:
    shell = subprocess.Popen(["sh", "-c", "sh -c 'sleep 60; true' & wait"])
    try:
        assert until(lambda: len(descendants(shell.pid)) == 2)
        inner, sleep = descendants(shell.pid)
        assert shell.pid in descendants(os.getpid())
        assert sleep in descendants(os.getpid())
        assert sleep in descendants(inner)
        without = descendants(os.getpid(), without=[inner])
        assert shell.pid in without
        assert inner not in without
        assert sleep not in without, "the whole subtree is left out"
    finally:
        kill_all([*descendants(shell.pid), shell.pid])
        shell.wait()


def test_a_zombie_is_no_living_descendant() -> None:
    child = subprocess.Popen(["true"])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert child.pid not in descendants(os.getpid())
    child.wait()


def test_carriers_of_a_token_are_exactly_those() -> None:
    token = "0123456789abcdef"
    processes = {
        name: subprocess.Popen(["sleep", "60"], env={"PATH": os.environ["PATH"], **extra})
        for name, extra in {
            "carrier": {RUN_TOKEN_VARIABLE: token},
            "longer token": {RUN_TOKEN_VARIABLE: token + "0"},
            "other variable": {"OTHER_" + RUN_TOKEN_VARIABLE: token},
            "without": {},
        }.items()
    }
    try:
        assert until(lambda: carriers_of(token) == [processes["carrier"].pid])
    finally:
        kill_all(process.pid for process in processes.values())
        for process in processes.values():
            process.wait()
    assert carriers_of(token) == []


def test_this_process_is_never_its_own_carrier() -> None:
    code = "from launcher.process import carriers_of; print(carriers_of('t0ken'))"
    process = run_python(code, env={**os.environ, RUN_TOKEN_VARIABLE: "t0ken"})
    assert process.communicate(timeout=30)[0].strip() == "[]"


def test_killing_what_is_gone_already_is_no_error() -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    sleeper = subprocess.Popen(["sleep", "60"])
    kill_all([gone.pid, sleeper.pid])
    assert sleeper.wait(timeout=10) == -signal.SIGKILL


def test_a_child_dies_with_its_parent() -> None:
    parent = run_python(
        "import os, time\n"
        "from launcher.process import die_with_parent\n"
        "me = os.getpid()\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    die_with_parent(me)\n"
        "    print(os.getpid(), flush=True)\n"
        "time.sleep(60)\n"
    )
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    assert alive(child)
    parent.kill()
    parent.communicate()
    assert until(lambda: not alive(child))


def test_a_child_whose_parent_is_gone_already_dies_at_once() -> None:
    process = run_python("from launcher.process import die_with_parent; die_with_parent(999999999)")
    process.communicate(timeout=30)
    assert process.returncode == -signal.SIGKILL


def test_a_subreaper_adopts_orphans() -> None:
    """The middle process of a double fork leaves; the grandchild becomes the subreaper's child."""
    process = run_python(
        "import os, sys\n"
        "from launcher.process import become_subreaper, descendants, wait_until_adopted\n"
        "become_subreaper()\n"
        "me = os.getpid()\n"
        "middle = os.fork()\n"
        "if middle == 0:\n"
        "    if os.fork() == 0:\n"
        "        wait_until_adopted(me)\n"
        "        os._exit(7)\n"
        "    os._exit(0)\n"
        "os.waitpid(middle, 0)\n"
        "_, status = os.wait()\n"
        "print(os.waitstatus_to_exitcode(status))\n"
    )
    assert process.communicate(timeout=30)[0].strip() == "7"


def test_waiting_for_adoption_is_bounded() -> None:
    with pytest.raises(TimeoutError, match="was not adopted by 999999999"):
        wait_until_adopted(999999999, timeout_s=0.02)


def test_the_true_parent_is_accepted() -> None:
    process = run_python(
        f"import os; from launcher.process import die_with_parent; die_with_parent({os.getpid()}); print('lives')"
    )
    assert process.communicate(timeout=30)[0].strip() == "lives"
