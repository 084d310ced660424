"""The courier as a process: it dies with its agent, is replaced when it dies, and never holds the agent up."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launcher.agent import courier_client
from launcher.courier.messages import Cause, Failure, Progress, Published, Written
from launcher.host.storage import StorageKind
from launcher.process import carriers_of
from tests.unit.courier.conftest import REPOSITORY, Agent, Made, is_gone
from tests.unit.courier.snapshots import Slot, manifest_for, slots_of_step

pytestmark = pytest.mark.slow  # real processes, and waits for bounds

MIB = 1 << 20


@pytest.fixture(autouse=True)
def _no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(courier_client, "_RESTART_PAUSE_S", 0.2)


def ask_to_write(agent: Agent, slots: list[Slot], output_dir: Path) -> list[Written | Failure]:
    outcomes: list[Written | Failure] = []
    agent.courier.write(slots, output_dir, StorageKind.POSIX, 1, "checkpoint-5", outcomes.append)
    return outcomes


@pytest.fixture
def stalled(tmp_path: Path) -> Path:
    """An output folder into which no file gets: the name of a file is a FIFO that nobody reads, so opening it waits for
    ever, as it does on a dead mount."""
    output_dir = tmp_path / "stalled"
    folder = output_dir / "ftlaunch" / "staging" / "gen-1" / "checkpoint-5"
    folder.mkdir(parents=True)
    os.mkfifo(folder / "latest")
    return output_dir


def test_a_courier_killed_in_the_middle_is_replaced_and_the_request_can_be_asked_again(
    agent: Agent, tmp_path: Path, stalled: Path
) -> None:
    slots = slots_of_step(5)
    outcomes = ask_to_write(agent, slots, stalled)
    agent.wait_until((stalled / "ftlaunch/staging/gen-1/checkpoint-5/scheduler.pt").exists)
    first = agent.pid
    os.kill(first, signal.SIGKILL)
    agent.wait_until(lambda: outcomes)
    (failure,) = outcomes
    assert isinstance(failure, Failure)
    assert failure.cause is Cause.LOST
    assert "signal 9" in failure.reason
    assert isinstance(agent.write(slots, tmp_path / "run"), Written)
    assert agent.pid != first
    assert any("a new one is started" in line for line in agent.said)


def test_a_request_may_be_asked_again_from_within_its_answer(agent: Agent, tmp_path: Path) -> None:
    slots = slots_of_step(5, ballast_bytes=64 * MIB)
    outcomes: list[Written | Failure] = []

    def done(outcome: Written | Failure) -> None:
        outcomes.append(outcome)
        if isinstance(outcome, Failure):
            agent.courier.write(slots, tmp_path / "run", StorageKind.POSIX, 1, "checkpoint-5", done)

    agent.courier.write(slots, tmp_path / "run", StorageKind.POSIX, 1, "checkpoint-5", done)
    os.kill(agent.pid, signal.SIGKILL)
    agent.wait_until(lambda: len(outcomes) == 2)
    assert isinstance(outcomes[0], Failure)
    assert isinstance(outcomes[1], Written)


@pytest.mark.parametrize("delay_s", [0.0, 0.02, 0.05, 0.1, 0.2])
def test_a_kill_at_any_moment_costs_nothing_but_time(agent: Agent, tmp_path: Path, delay_s: float) -> None:
    output_dir = tmp_path / "run"
    slots = slots_of_step(5, ballast_bytes=64 * MIB)
    agent.wait_until(lambda: isinstance(agent.write(slots_of_step(1), output_dir, "checkpoint-1"), Written))
    outcomes = ask_to_write(agent, slots, output_dir)
    time.sleep(delay_s)
    os.kill(agent.pid, signal.SIGKILL)
    agent.wait_until(lambda: outcomes)
    assert not (output_dir / "checkpoint-5").exists()
    written = agent.write(slots, output_dir)
    assert isinstance(written, Written)
    assert isinstance(agent.publish(manifest_for(written.files, 5), output_dir), Published)


def test_what_is_asked_before_the_new_one_has_started_is_done_by_it(
    agent: Agent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(courier_client, "_RESTART_PAUSE_S", 1.0)
    assert isinstance(agent.write(slots_of_step(4), tmp_path / "run", "checkpoint-4"), Written)
    os.kill(agent.pid, signal.SIGKILL)
    agent.wait_until(lambda: agent.said)
    assert agent.courier.pids == [], "one that dies at once is not started again in a tight loop"
    assert isinstance(agent.write(slots_of_step(5), tmp_path / "run"), Written)


def test_progress_is_said_while_storage_stands_still(agent: Agent, stalled: Path) -> None:
    said: list[Progress] = []
    outcomes: list[Written | Failure] = []
    slots = slots_of_step(5)
    agent.courier.write(slots, stalled, StorageKind.POSIX, 1, "checkpoint-5", outcomes.append, said.append)
    agent.wait_until(lambda: len(said) >= 2)
    assert said[-1].begun
    assert 0 < said[-1].bytes_done < said[-1].bytes_total
    assert not outcomes


def test_a_request_that_stands_still_for_too_long_is_given_up_with_its_courier(
    agent: Agent, stalled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(courier_client, "STUCK_S", 7.0)
    stuck = ask_to_write(agent, slots_of_step(5), stalled)
    behind = ask_to_write(agent, slots_of_step(5), tmp_path / "run")
    first = agent.pid
    agent.wait_until(lambda: stuck and behind)
    assert isinstance(stuck[0], Failure)
    assert stuck[0].cause is Cause.STUCK
    assert isinstance(behind[0], Failure)
    assert behind[0].cause is Cause.LOST, "it only waited for its turn, and is worth asking again"
    assert is_gone(first)
    assert isinstance(agent.write(slots_of_step(5), tmp_path / "run"), Written)


def test_a_cancelled_request_is_answered_and_leaves_no_name(agent: Agent, tmp_path: Path) -> None:
    outcomes: list[Written | Failure] = []
    number = agent.courier.write(
        slots_of_step(5, ballast_bytes=64 * MIB),
        tmp_path / "run",
        StorageKind.POSIX,
        1,
        "checkpoint-5",
        outcomes.append,
    )
    agent.courier.cancel(number)
    agent.wait_until(lambda: outcomes)
    assert outcomes == [Failure(Cause.CANCELLED, "the agent has called it off")]


def test_stop_signals_do_not_end_it(agent: Agent, tmp_path: Path) -> None:
    assert isinstance(agent.write(slots_of_step(4), tmp_path / "run", "checkpoint-4"), Written)
    pid = agent.pid
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        os.kill(pid, number)
    assert isinstance(agent.write(slots_of_step(5), tmp_path / "run"), Written)
    assert agent.pid == pid


def test_the_warden_finds_it(agent: Agent, tmp_path: Path) -> None:
    assert isinstance(agent.write(slots_of_step(5), tmp_path / "run"), Written)
    assert carriers_of(agent.token) == [agent.pid]


def test_it_opens_no_more_and_more_descriptors(agent: Agent, tmp_path: Path) -> None:
    slots = slots_of_step(5)

    def num_open() -> tuple[int, int]:
        return len(os.listdir(f"/proc/{agent.pid}/fd")), len(os.listdir("/proc/self/fd"))

    assert isinstance(agent.write(slots, tmp_path / "run"), Written)
    before = num_open()
    for _ in range(5):
        assert isinstance(agent.write(slots, tmp_path / "run"), Written)
    assert num_open() == before


def test_the_end_is_quick_and_leaves_nothing(make_agent: Made, tmp_path: Path) -> None:
    agent = make_agent()
    assert isinstance(agent.write(slots_of_step(5), tmp_path / "run"), Written)
    pid = agent.pid
    started = time.monotonic()
    agent.courier.close()
    assert time.monotonic() - started < 1.0
    assert not Path(f"/proc/{pid}").exists()


def test_the_end_does_not_wait_for_storage_that_does_not_answer(make_agent: Made, stalled: Path) -> None:
    agent = make_agent()
    outcomes = ask_to_write(agent, slots_of_step(5), stalled)
    agent.wait_until((stalled / "ftlaunch/staging/gen-1/checkpoint-5/scheduler.pt").exists)
    pid = agent.pid
    started = time.monotonic()
    agent.courier.close()
    assert time.monotonic() - started < 2.0
    assert not Path(f"/proc/{pid}").exists()
    assert not outcomes


def test_a_frozen_courier_does_not_hold_up_the_end(make_agent: Made, tmp_path: Path) -> None:
    agent = make_agent()
    assert isinstance(agent.write(slots_of_step(5), tmp_path / "run"), Written)
    pid = agent.pid
    os.kill(pid, signal.SIGSTOP)
    started = time.monotonic()
    agent.courier.close(bound_s=0.5)
    assert time.monotonic() - started < 2.0
    assert not Path(f"/proc/{pid}").exists()


def test_the_agents_loop_does_not_wait_for_a_courier_that_reads_nothing(agent: Agent, tmp_path: Path) -> None:
    assert isinstance(agent.write(slots_of_step(4), tmp_path / "run", "checkpoint-4"), Written)
    os.kill(agent.pid, signal.SIGSTOP)
    slots = slots_of_step(5)
    started = time.monotonic()
    outcomes = [ask_to_write(agent, slots, tmp_path / "run") for _ in range(300)]
    assert time.monotonic() - started < 2.0
    os.kill(agent.pid, signal.SIGCONT)
    agent.wait_until(lambda: all(outcomes), 60)
    assert all(isinstance(answers[0], Written) for answers in outcomes)


AGENT = """
import os, sys, time
from pathlib import Path
from launcher.agent.courier_client import CourierClient
from launcher.event_loop import EventLoop
client = CourierClient(EventLoop(), os.environ, "0" * 32, Path(sys.argv[1]), print)
print(client.pids[0], flush=True)
time.sleep(300)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_it_dies_with_its_agent(tmp_path: Path, number: signal.Signals) -> None:
    agent = subprocess.Popen(
        [sys.executable, "-c", AGENT, str(tmp_path / "courier.log")],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )
    assert agent.stdout is not None
    courier_pid = int(agent.stdout.readline())
    agent.send_signal(number)
    agent.communicate(timeout=15)
    assert is_gone(courier_pid)


def test_a_courier_that_cannot_be_started_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make_agent: Made
) -> None:
    (tmp_path / "node-0").write_text("a file where the folder of the log should be")
    agent = make_agent()
    assert "could not be started" in agent.said[0]
    outcomes = ask_to_write(agent, slots_of_step(5), tmp_path / "run")
    (tmp_path / "node-0").unlink()
    agent.wait_until(lambda: outcomes)
    assert isinstance(outcomes[0], Written)


def test_it_imports_little(agent: Agent, tmp_path: Path) -> None:
    """What it imports is memory that a node has one time more."""
    assert isinstance(agent.write(slots_of_step(5), tmp_path / "run"), Written)
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{agent.pid}/status").read_text().splitlines())
    assert int(fields["VmRSS"].split()[0]) < 40_000
    maps = Path(f"/proc/{agent.pid}/maps").read_text()
    assert "torch" not in maps
    assert "pydantic" not in maps
