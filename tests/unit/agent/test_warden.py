"""However the agent dies, what it has started goes with it, and nothing else."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from launcher.agent.warden import Warden
from launcher.process import RUN_TOKEN_VARIABLE

REPOSITORY = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def _in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)  # `python -m launcher.agent.warden` works without an installation


@pytest.fixture
def token() -> str:
    return secrets.token_hex(16)


Start = Callable[..., "subprocess.Popen[bytes]"]


@pytest.fixture
def start() -> Iterator[Start]:
    """`start(TOKEN="...")`: a sleeper with these variables; ended after the test."""
    processes: list[subprocess.Popen[bytes]] = []

    def run(*command: str, **variables: str) -> subprocess.Popen[bytes]:
        command = command or ("sleep", "300")
        processes.append(
            subprocess.Popen(command, env={"PATH": os.environ["PATH"], **variables}, start_new_session=True)
        )
        return processes[-1]

    yield run
    for process in processes:
        process.kill()
        process.wait()


def ended(process: subprocess.Popen[bytes], bound_s: float = 15.0) -> int | None:
    try:
        return process.wait(timeout=bound_s)
    except subprocess.TimeoutExpired:
        return None


def gone(pid: int, bound_s: float = 15.0) -> bool:
    deadline = time.monotonic() + bound_s
    while time.monotonic() < deadline:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX":
                return True
        except OSError:
            return True
        time.sleep(0.02)
    return False


def test_when_the_agents_end_closes_its_processes_are_killed_and_others_live(token: str, start: Start) -> None:
    mine = [start(**{RUN_TOKEN_VARIABLE: token}) for _ in range(2)]
    others = [
        start(),
        start(**{RUN_TOKEN_VARIABLE: token + "0"}),
        start(**{RUN_TOKEN_VARIABLE: token[:-1]}),
        start(**{"OTHER_VARIABLE": token}),
    ]
    warden = Warden(token)
    assert all(process.poll() is None for process in mine), "nothing is touched while the agent lives"
    warden.release()
    assert [ended(process) for process in mine] == [-signal.SIGKILL] * 2
    assert warden.process.poll() == 0, "and then the warden goes too"
    assert [process.poll() for process in others] == [None] * 4


def test_a_process_that_ignores_every_signal_is_killed_all_the_same(token: str, start: Start) -> None:
    stubborn = start("sh", "-c", "trap '' TERM INT HUP; sleep 300", **{RUN_TOKEN_VARIABLE: token})
    Warden(token).release()
    assert ended(stubborn) == -signal.SIGKILL


AGENT = f"""
import os, subprocess, sys, time
from launcher.agent.warden import Warden
warden = Warden(sys.argv[1])
child = subprocess.Popen(["sleep", "300"], env={{**os.environ, "{RUN_TOKEN_VARIABLE}": sys.argv[1]}},
start_new_session=True)
print(warden.process.pid, child.pid, flush=True)
time.sleep(300)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV])
def test_an_agent_that_is_killed_leaves_nothing(token: str, number: signal.Signals) -> None:
    agent = subprocess.Popen([sys.executable, "-c", AGENT, token], stdout=subprocess.PIPE, text=True)
    assert agent.stdout is not None
    warden_pid, child_pid = map(int, agent.stdout.readline().split())
    agent.send_signal(number)
    agent.communicate(timeout=15)
    assert agent.returncode == -number
    assert gone(child_pid)
    assert gone(warden_pid)


def test_signals_to_the_whole_group_do_not_end_the_warden_first(token: str, start: Start) -> None:
    mine = start(**{RUN_TOKEN_VARIABLE: token})
    warden = Warden(token)
    ignored = 0
    deadline = time.monotonic() + 15
    while ignored & 0b100000000000010 != 0b100000000000010 and time.monotonic() < deadline:
        status = Path(f"/proc/{warden.process.pid}/status").read_text()
        ignored = int(status.partition("SigIgn:")[2].split()[0], 16)
        time.sleep(0.01)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        warden.process.send_signal(number)
    assert not warden.ensure_running(), "it is still the same one"
    assert mine.poll() is None
    warden.release()
    assert ended(mine) == -signal.SIGKILL


def test_a_killed_warden_is_replaced_and_the_new_one_watches(token: str, start: Start) -> None:
    mine = start(**{RUN_TOKEN_VARIABLE: token})
    warden = Warden(token)
    first = warden.process
    first.kill()
    first.wait()
    assert warden.ensure_running()
    assert warden.process.pid != first.pid
    assert mine.poll() is None
    warden.release()
    assert ended(mine) == -signal.SIGKILL


def test_the_token_is_not_in_the_wardens_own_environment(token: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it would end itself before the others."""
    monkeypatch.setenv(RUN_TOKEN_VARIABLE, token)
    warden = Warden(token)
    try:
        environ = Path(f"/proc/{warden.process.pid}/environ").read_bytes()
        assert f"{RUN_TOKEN_VARIABLE}=".encode() not in environ
    finally:
        warden.release()
