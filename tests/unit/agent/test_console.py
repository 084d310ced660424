"""What a person sees. Silence means standstill; progress is never hidden for a minute."""

from __future__ import annotations

import io
import re
import time
from datetime import datetime
from itertools import pairwise
from pathlib import Path

import pytest

from launcher.agent.console import Console


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def test_plain_lines_without_colour_where_nobody_watches() -> None:
    stream = io.StringIO()
    Console(stream).say("one\ntwo")
    lines = stream.getvalue().splitlines()
    assert [re.sub(r"\d\d:\d\d:\d\d", "TIME", line) for line in lines] == ["ftlaunch: TIME one", "ftlaunch: TIME two"]


def test_the_time_is_that_of_the_line() -> None:
    stream = io.StringIO()
    before = datetime.now().replace(microsecond=0)
    Console(stream).say("lost")
    shown = datetime.strptime(stream.getvalue(), "ftlaunch: %H:%M:%S lost\n")
    assert (shown - before).seconds <= 5, "of a day: midnight may have passed"


def test_a_terminal_shows_no_times() -> None:
    stream = Terminal()
    Console(stream).say("hello")
    assert ":" not in stream.getvalue()


def test_a_block_has_no_prefix() -> None:
    stream = io.StringIO()
    Console(stream).block("  a table\n  of two lines")
    assert stream.getvalue() == "  a table\n  of two lines\n"


def test_colour_on_a_terminal() -> None:
    stream = Terminal()
    Console(stream).say("hello")
    assert "\x1b[" in stream.getvalue()
    assert "hello" in stream.getvalue()


@pytest.mark.parametrize("step_s", [0.01, 1.0, 9.0, 11.0, 59.0])
def test_a_line_at_least_every_minute_while_steps_are_made(clock: list[float], step_s: float) -> None:
    stream = io.StringIO()
    console = Console(stream)
    shown_at, shown = [clock[0]], 0
    for step in range(1, int(600 / step_s)):
        clock[0] += step_s
        console.progress(step, 10**9, None, None)
        if len(stream.getvalue()) > shown:
            shown = len(stream.getvalue())
            shown_at.append(clock[0])
    gaps = [after - before for before, after in pairwise(shown_at)]
    assert max(gaps) <= 60.0
    assert len(shown_at) <= 75, "and not a line for every step"


@pytest.mark.parametrize("step_s", [0.01, 1.0, 11.0, 29.0, 31.0, 59.0])
def test_where_another_node_shows_the_progress_a_line_a_minute_is_enough(clock: list[float], step_s: float) -> None:
    stream = io.StringIO()
    console = Console(stream)
    console.is_echo = True
    shown_at, shown = [clock[0]], 0
    for step in range(1, int(1200 / step_s)):
        clock[0] += step_s
        console.progress(step, 10**9, None, None)
        if len(stream.getvalue()) > shown:
            shown = len(stream.getvalue())
            shown_at.append(clock[0])
    gaps = [after - before for before, after in pairwise(shown_at)]
    assert max(gaps) <= 60.0
    assert min(gaps[1:]) > 60.0 - step_s - 0.1


def test_on_another_node_too_the_first_and_the_last_step_are_shown_and_other_lines_count(clock: list[float]) -> None:
    stream = io.StringIO()
    console = Console(stream)
    console.is_echo = True
    for step in range(1, 101):
        clock[0] += 1.0
        if step % 40 == 0:
            console.say("a checkpoint was saved")
        console.progress(step, 100, None, None)
    lines = [line[len("ftlaunch: 00:00:00 ") :] for line in stream.getvalue().splitlines()]
    assert lines == ["step 1/100", "a checkpoint was saved", "a checkpoint was saved", "step 100/100"]


@pytest.mark.parametrize(("is_echo", "at_most_every_s"), [(False, 20.0), (True, 40.0)])
def test_long_work_is_shown_at_least_every_minute(clock: list[float], is_echo: bool, at_most_every_s: float) -> None:
    stream = io.StringIO()
    console = Console(stream)
    console.is_echo = is_echo
    shown_at = []
    for _ in range(100):
        clock[0] += 20.0
        before = len(stream.getvalue())
        console.long_work("step 3: 7 micro-batches")
        if len(stream.getvalue()) > before:
            shown_at.append(clock[0])
    assert {after - before for before, after in pairwise(shown_at)} == {at_most_every_s}


@pytest.mark.parametrize("is_echo", [False, True])
def test_steps_speak_for_themselves(clock: list[float], is_echo: bool) -> None:
    """Ranks count micro-batches of short steps, too."""
    stream = io.StringIO()
    console = Console(stream)
    console.is_echo = is_echo
    for step in range(1, 600):
        clock[0] += 1.0
        console.progress(step, 10**9, None, None)
        if step % 20 == 0:
            console.long_work(f"step {step}: 1 micro-batches")
    assert "micro-batches" not in stream.getvalue()


def test_nothing_is_shown_without_a_step(clock: list[float]) -> None:
    stream = io.StringIO()
    console = Console(stream)
    console.progress(1, 10, None, None)
    shown = stream.getvalue()
    clock[0] += 3600
    console.forget_mirrors()
    assert stream.getvalue() == shown


def test_the_last_step_is_always_shown(clock: list[float]) -> None:
    stream = io.StringIO()
    console = Console(stream)
    for step in (1, 2, 3):
        console.progress(step, 3, 0.51234, 2.0)
    lines = stream.getvalue().splitlines()
    assert lines[-1].partition(" step ")[1:] == (" step ", "3/3, loss 0.5123, 2.00 s/step, 0 s left")


@pytest.mark.parametrize(
    ("remaining", "left"), [(5, "5 s left"), (90, "1 min 30 s left"), (7200, "2 h 0 min left"), (0, "0 s left")]
)
def test_time_left(clock: list[float], remaining: int, left: str) -> None:
    stream = io.StringIO()
    Console(stream).progress(10, 10 + remaining, None, 1.0)
    assert left in stream.getvalue()


def test_a_line_wipes_the_bar_of_a_terminal_first() -> None:
    stream = Terminal()
    console = Console(stream)
    console.progress(12, 24, 1.0, 1.0)
    assert "[" + "#" * 8 + "." * 8 + "]" in stream.getvalue()
    console.say("a checkpoint was saved")
    assert "\r\x1b[2K" in stream.getvalue().partition("left")[2]


def test_a_ranks_log_is_shown_line_by_line_once(tmp_path: Path) -> None:
    stream, path = io.StringIO(), tmp_path / "rank-0.log"
    console = Console(stream)
    console.mirror(path, "rank 0")
    path.write_text("one\ntw")
    console.mirror(path, "rank 0")
    assert stream.getvalue() == "one\n", "a line that is still being written waits"
    with path.open("a") as log:
        log.write("o\nthree\n")
    console.mirror(path, "rank 0")
    console.mirror(path, "rank 0")
    console.forget_mirrors()
    assert stream.getvalue() == "one\ntwo\nthree\n"


def test_bars_that_redraw_themselves_and_foreign_bytes_do_no_harm(tmp_path: Path) -> None:
    stream, path = io.StringIO(), tmp_path / "rank-0.log"
    path.write_bytes(b" 10%\r 50%\r100%\r\n\xff\xfe\n")
    console = Console(stream)
    console.mirror(path, "rank 0")
    console.forget_mirrors()
    assert stream.getvalue().splitlines() == ["100%", "\ufffd\ufffd"]


def test_after_forgetting_a_new_log_of_the_same_name_is_read_from_its_start(tmp_path: Path) -> None:
    stream, path = io.StringIO(), tmp_path / "rank-0.log"
    console = Console(stream)
    path.write_text("first attempt, a long line\n")
    console.mirror(path, "rank 0")
    console.forget_mirrors()
    path.write_text("second\n")
    console.mirror(path, "rank 0")
    console.forget_mirrors()
    assert stream.getvalue().splitlines()[-1] == "second"


_NOISE = (
    "[W1130 18:29:47.126377976 socket.cpp:207] [c10d] The hostname of the client socket cannot be retrieved. err=-3\n"
)
_GAI = "[W1130 18:29:16.4 a.cpp:1] [c10d] The IPv6 network addresses of (a, 1) cannot be retrieved (gai error: 2)\n"
_TRACEBACK = "[rank0]: Traceback (most recent call last):\n  File 'a.py'\nRuntimeError: Connection closed by peer\n"


def test_what_nobody_can_act_on_is_left_to_the_log(tmp_path: Path) -> None:
    stream, path = io.StringIO(), tmp_path / "rank-0.log"
    path.write_text(_NOISE + _GAI)
    console = Console(stream)
    console.mirror(path, "rank 0")
    console.forget_mirrors()
    assert stream.getvalue() == _GAI


@pytest.mark.parametrize("drop", [True, False])
def test_a_ranks_last_traceback_waits_for_the_end(clock: list[float], tmp_path: Path, drop: bool) -> None:
    stream, path = io.StringIO(), tmp_path / "rank-0.log"
    console = Console(stream)
    path.write_text("one\n" + _TRACEBACK)
    console.mirror(path, "rank 0")
    clock[0] += 60.0
    for _ in range(2):
        console.mirror(path, "rank 0", ended=True)
    assert stream.getvalue() == "one\n"
    console.forget_mirrors(drop_held=drop)
    assert stream.getvalue() == "one\n" + ("" if drop else _TRACEBACK)


def test_a_traceback_that_a_rank_outlives_is_shown_and_the_next_one_waits_again(
    clock: list[float], tmp_path: Path
) -> None:
    stream, path = io.StringIO(), tmp_path / "rank-0.log"
    console = Console(stream)
    first = _TRACEBACK + "During handling of the above exception:\n" + _TRACEBACK
    path.write_text(first)
    console.mirror(path, "rank 0")
    clock[0] += 9.0
    console.mirror(path, "rank 0")
    assert stream.getvalue() == ""
    clock[0] += 2.0
    console.mirror(path, "rank 0")
    assert stream.getvalue() == first
    with path.open("a") as log:
        log.write("two\n" + _TRACEBACK)
    console.mirror(path, "rank 0")
    console.mirror(path, "rank 0", ended=True)
    console.forget_mirrors(drop_held=True)
    assert stream.getvalue() == first + "two\n"


def test_a_held_traceback_is_not_that_of_the_next_attempt(tmp_path: Path) -> None:
    stream, path = io.StringIO(), tmp_path / "rank-0.log"
    console = Console(stream)
    path.write_text(_TRACEBACK)
    console.mirror(path, "rank 0")
    console.forget_mirrors(drop_held=True)
    path.write_text("second\n")
    console.mirror(path, "rank 0")
    console.forget_mirrors()
    assert stream.getvalue() == "second\n"
