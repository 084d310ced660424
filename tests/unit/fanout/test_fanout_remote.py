"""A node as its head sees it, with small scripts in the place of ssh."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from launcher.event_loop import EventLoop
from launcher.fanout import frames, remote
from launcher.fanout.remote import RemoteNode, State, Task
from launcher.fanout.screen import Screen

MARKER = "0123456789abcdef"
Makes = Callable[..., RemoteNode]


class Heard(Screen):
    """What would be shown, in the place of standard error."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, text: str) -> None:
        self.lines += text.splitlines()

    def show(self, name: str, line: bytes) -> None:
        self.lines.append(f"[{name}] {line.decode()}")


@pytest.fixture
def loop() -> Iterator[EventLoop]:
    loop = EventLoop()
    yield loop
    loop.close()


@pytest.fixture
def heard() -> Heard:
    return Heard()


@pytest.fixture
def make(loop: EventLoop, heard: Heard, tmp_path: Path) -> Iterator[Makes]:
    """Each connection runs the next one of the scripts, the last one again and again."""
    made: list[RemoteNode] = []

    def build(*scripts: str) -> RemoteNode:
        for number, script in enumerate(scripts):
            (tmp_path / f"{number}.sh").write_text("read order\n" + script)
        turn = (
            f"cd {tmp_path}; n=$(cat turn 2>/dev/null || echo 0); "
            f"[ -e $((n + 1)).sh ] && echo $((n + 1)) > turn; exec sh $n.sh"
        )
        task = Task("n1", "host", ("sh", "-c", turn), "ssh host true", MARKER, b"start\n", b"look\n")
        made.append(RemoteNode(task, loop, heard, lambda: None))
        return made[-1]

    yield build
    for node in made:
        node.close()


def says(*found: bytes) -> str:
    return "".join(f"printf '%s' '{frame.decode()}'\n" for frame in found)


def wait_for(loop: EventLoop, what: Callable[[], bool], within_s: float = 10.0) -> None:
    deadline = time.monotonic() + within_s
    while not what():
        assert time.monotonic() < deadline
        loop.wait(0.05)


def test_another_version_is_final_and_not_tried_again(make: Makes, loop: EventLoop, heard: Heard) -> None:
    why = "the head runs ftlaunch 2, this machine has 1: install the same on both"
    node = make(says(frames.frame(MARKER, frames.REFUSED, why=why, code=3)) + "exit 3\n")
    node.connect()
    wait_for(loop, lambda: node.state is State.OVER)
    assert (node.final_code, node.last_line) == (3, why)
    assert heard.lines == [f"n1 (host): {why}. It is not tried again"]


def test_the_last_line_is_the_error_where_there_is_one(make: Makes, loop: EventLoop) -> None:
    started, ended = frames.frame(MARKER, frames.STARTED, pid=7), frames.frame(MARKER, frames.ENDED, code=2)
    node = make(says(started) + "echo first\necho 'ftlaunch: error: no such model'\necho remedy\n" + says(ended))
    node.connect()
    wait_for(loop, lambda: node.state is State.OVER)
    assert (node.final_code, node.last_line) == (2, "ftlaunch: error: no such model")


def test_what_got_lost_on_a_dead_connection_comes_again_and_only_that(
    make: Makes, loop: EventLoop, heard: Heard
) -> None:
    attached = frames.frame(MARKER, frames.ATTACHED, pid=7, by="", begins=0, unheard=8)
    gap = frames.frame(MARKER, frames.ATTACHED, pid=7, by="", begins=100, unheard=100)
    node = make(
        says(frames.frame(MARKER, frames.STARTED, pid=7)) + "echo one\nexit 255\n",  # "two" was on its way
        says(attached) + "echo one\necho two\necho three\nexit 255\n",
        says(gap) + "echo late\n" + says(frames.frame(MARKER, frames.ENDED, code=0)),
    )
    node.connect()
    wait_for(loop, lambda: node.state is State.OVER)
    assert [line for line in heard.lines if line.startswith("[")] == ["[n1] one", "[n1] two", "[n1] three", "[n1] late"]
    lost = [line for line in heard.lines if "not received" in line]
    assert len(lost) == 1
    assert lost[0].startswith(f"n1 (host): {100 - len('one two three ')} bytes of its output from ")
    assert lost[0].endswith("ftlaunch/events/n1.jsonl and ftlaunch/logs/")


def test_a_head_that_comes_anew_begins_where_the_last_one_went_away(make: Makes, loop: EventLoop, heard: Heard) -> None:
    attached = frames.frame(MARKER, frames.ATTACHED, pid=7, by="", begins=0, unheard=4)
    node = make(says(attached) + "echo one\necho two\n" + says(frames.frame(MARKER, frames.ENDED, code=0)))
    node.connect()
    wait_for(loop, lambda: node.state is State.OVER)
    assert [line for line in heard.lines if line.startswith("[")] == ["[n1] two"]


def test_a_machine_that_goes_and_comes_is_one_kind_of_trouble(
    make: Makes, loop: EventLoop, heard: Heard, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = make(
        "echo 'ssh: connect to host h port 22: Connection timed out' >&2; exit 255\n",
        "echo 'ssh: connect to host h port 22: No route to host' >&2; exit 255\n",
        "echo 'h: Permission denied (publickey).' >&2; exit 255\n",
    )
    for _ in range(3):
        wait_for(loop, lambda: node.state is State.PAUSING)
        node.connect()
    wait_for(loop, lambda: node.state is State.PAUSING)
    first = [line for line in heard.lines if "no agent could be started" in line]
    assert [line.rpartition(": ")[2] for line in first] == ["Connection timed out", "Permission denied (publickey)."]
    assert node.trouble == "h: Permission denied (publickey)."
    monkeypatch.setattr(remote, "_AGAIN_AFTER_S", 0.0)
    node.connect()
    wait_for(loop, lambda: node.state is State.PAUSING)
    assert heard.lines[-1].startswith("n1 (host): still no agent could be started: h: Permission denied"), heard.lines
