"""The process between a head and a node's agent, with pipes in the place of ssh and a small script as the agent."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from launcher.fanout import frames
from launcher.fanout.order import NodeOrder
from launcher.fanout.presence import claim

pytestmark = pytest.mark.slow  # processes that wait for others

ROOT = Path(__file__).parents[3]
# Prints what it is told to by files in its folder; ends with 138 at SIGTERM.
AGENT = """
import os, signal, sys, time
order = sys.stdin.readline()
signal.signal(signal.SIGTERM, lambda *_: os._exit(138))
os.write(1, b"here\\n")
if os.path.exists("flood"):
    for number in range(100_000):
        os.write(1, b"line %07d of a flood that nobody reads\\n" % number)
    open("flooded", "w").close()
while not os.path.exists("end"):
    if os.path.exists("say"):
        os.rename("say", "said")
        os.write(2, b"said\\n")
    time.sleep(0.01)
os._exit(int(open("end").read()))
"""
Starts = Callable[..., "Connection"]


class Connection:
    """What a head holds: the three pipes of an ssh, here of the process itself."""

    def __init__(self, order: NodeOrder, silent_s: float = frames.OWNER_SILENT_S) -> None:
        self.marker = order.marker
        program = (
            f"from launcher.fanout import frames; frames.OWNER_SILENT_S = {silent_s}\n"
            "from launcher.fanout.node import main; main()"
        )
        self.process = subprocess.Popen(
            [sys.executable, "-c", program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        self.tell(order.to_line())
        self._rest = b""

    def tell(self, line: bytes) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line)
        self.process.stdin.flush()

    def line(self, within_s: float = 10.0) -> bytes:
        """The next line; empty at the end."""
        assert self.process.stdout is not None
        deadline = time.monotonic() + within_s
        while b"\n" not in self._rest:
            assert select.select([self.process.stdout], [], [], max(0.0, deadline - time.monotonic()))[0], "silence"
            chunk = os.read(self.process.stdout.fileno(), 65536)
            if not chunk:
                return b""
            self._rest += chunk
        line, _, self._rest = self._rest.partition(b"\n")
        return line

    def frame(self) -> dict[str, Any]:
        """The next frame; lines of output before it are passed over."""
        while line := self.line():
            found = frames.parse_frame(self.marker, line)
            if found is not None:
                return found
        raise AssertionError("the end came before a frame")

    def close(self) -> None:
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            with contextlib.suppress(BrokenPipeError):
                stream.close()


@pytest.fixture
def order(tmp_path: Path) -> NodeOrder:
    (tmp_path / "agent.py").write_text(AGENT)
    return NodeOrder(
        run=f"test-{os.getpid()}-{time.monotonic_ns()}",
        name="n1",
        rank=1,
        places=("", "{}"),
        head="first",
        head_name="the first head",
        marker="0123456789abcdef",
        folder=str(tmp_path),
        environ={},
        job={},
        agent=(str(tmp_path / "agent.py"),),
    )


@pytest.fixture
def connect(tmp_path: Path) -> Iterator[Starts]:
    made: list[Connection] = []

    def start(order: NodeOrder, **settings: float) -> Connection:
        made.append(Connection(order, **settings))
        return made[-1]

    yield start
    (tmp_path / "end").write_text("0")
    for connection in made:
        connection.close()
        try:
            connection.process.wait(10)
        except subprocess.TimeoutExpired:
            connection.process.kill()
            connection.process.wait()


def wait_for(path: Path, within_s: float = 10.0) -> None:
    deadline = time.monotonic() + within_s
    while not path.exists():
        assert time.monotonic() < deadline, path
        time.sleep(0.005)


def test_output_passes_and_the_exit_code_is_told(connect: Starts, order: NodeOrder, tmp_path: Path) -> None:
    head = connect(order)
    assert head.frame()["kind"] == frames.STARTED
    assert head.line() == b"here"
    (tmp_path / "say").touch()
    assert head.line() == b"said"
    (tmp_path / "end").write_text("3")
    assert head.frame() == {"kind": frames.ENDED, "code": 3}
    assert head.line() == b""
    assert head.process.wait(5) == 0


def test_a_stop_is_the_same_signal_and_the_end_of_the_connection_is_none(
    connect: Starts, order: NodeOrder, tmp_path: Path
) -> None:
    head = connect(order)
    pid = head.frame()["pid"]
    assert head.line() == b"here"
    head.close()
    (tmp_path / "say").touch()
    wait_for(tmp_path / "said")
    again = connect(replace(order, marker="fedcba9876543210", head="second", head_name="the second head"))
    # "here" comes again too: a head that had it passes over it, and a new one begins at `unheard`.
    assert again.frame() == {"kind": frames.ATTACHED, "pid": pid, "by": "", "begins": 0, "unheard": len(b"here\n")}
    assert again.line() == b"here"
    assert again.line() == b"said", "what was said meanwhile"
    again.tell(frames.stop_line("SIGTERM"))
    assert again.frame() == {"kind": frames.ENDED, "code": 138}


def test_a_stop_right_behind_the_order_is_heard(connect: Starts, order: NodeOrder) -> None:
    head = connect(order)
    head.tell(frames.stop_line("SIGTERM"))
    assert head.frame()["kind"] == frames.STARTED
    assert head.frame()["code"] in (138, -signal.SIGTERM)  # the small agent may not have its handler yet


def test_signals_to_the_process_itself_do_not_reach_the_agent(connect: Starts, order: NodeOrder) -> None:
    head = connect(order)
    pid = head.frame()["pid"]
    assert head.line() == b"here"
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        head.process.send_signal(number)
    os.kill(pid, signal.SIGHUP)
    time.sleep(0.2)
    assert head.process.poll() is None
    os.kill(pid, signal.SIGKILL)
    assert head.frame() == {"kind": frames.ENDED, "code": -signal.SIGKILL}


def test_a_head_that_reads_nothing_does_not_hold_up_the_agent(
    connect: Starts, order: NodeOrder, tmp_path: Path
) -> None:
    (tmp_path / "flood").touch()
    head = connect(order)
    wait_for(tmp_path / "flooded", within_s=30)
    (tmp_path / "end").write_text("0")
    lines = []
    while line := head.line():
        lines.append(line)
    assert any(b"bytes of output left out" in line for line in lines)
    assert lines[-2] == b"line 0099999 of a flood that nobody reads"
    assert frames.parse_frame(order.marker, lines[-1]) == {"kind": frames.ENDED, "code": 0}


def test_another_head_is_told_who_is_there_and_the_same_one_takes_over(connect: Starts, order: NodeOrder) -> None:
    head = connect(order)
    pid = head.frame()["pid"]
    other = connect(replace(order, head="second"))
    assert other.frame() == {"kind": frames.BUSY, "by": "the first head"}
    again = connect(order)
    found = again.frame()
    assert (found["kind"], found["pid"], found["by"]) == (frames.ATTACHED, pid, "the first head")
    again.tell(frames.stop_line("SIGTERM"))
    assert again.frame() == {"kind": frames.ENDED, "code": 138}


def test_a_head_that_has_fallen_silent_is_replaced(connect: Starts, order: NodeOrder) -> None:
    head = connect(order, silent_s=1.5)
    pid = head.frame()["pid"]
    other = replace(order, head="second", head_name="the second head")
    for _ in range(6):  # one that is heard is not
        head.tell(frames.ALIVE)
        time.sleep(0.4)
    assert connect(other).frame()["kind"] == frames.BUSY
    time.sleep(2.6)  # and a tick of the loop
    found = connect(other).frame()
    assert (found["kind"], found["pid"], found["by"]) == (frames.ATTACHED, pid, "")


def test_another_version_is_refused_for_good(connect: Starts, order: NodeOrder) -> None:
    head = connect(replace(order, version="0.0.1"))
    found = head.frame()
    assert (found["kind"], found["code"]) == (frames.REFUSED, 3)
    assert "the head runs ftlaunch 0.0.1, this machine has " in found["why"]


def test_where_none_runs_none_is_started_when_only_looking(connect: Starts, order: NodeOrder, tmp_path: Path) -> None:
    assert connect(replace(order, start=False)).frame() == {"kind": frames.NONE}
    gone = connect(replace(order, folder=str(tmp_path / "gone")))
    assert gone.frame() == {"kind": frames.FAILED, "why": f"{tmp_path / 'gone'}: No such file or directory"}


def test_a_process_that_holds_the_name_and_does_not_answer_is_busy(connect: Starts, order: NodeOrder) -> None:
    holder = claim(order.run)
    assert holder is not None
    with holder:
        assert claim(order.run) is None
        head = connect(order)
        head.tell(frames.ALIVE)
        line = head.line(within_s=15)
        assert frames.parse_frame(order.marker, line) == {"kind": frames.BUSY, "by": "a process that does not answer"}


@pytest.mark.parametrize("text", ["", "nonsense\n", "[]\n", "{}\n", json.dumps({"version": "0.0.1"}) + "\n"])
def test_what_is_no_order_is_refused_in_words(text: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "launcher.fanout.node"],
        input=text,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=30,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("ftlaunch: error: ")
    assert "Traceback" not in done.stderr
