"""What an agent waits for: bounds end with a turn, timers do not, and long work does not stop the rest."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from launcher.event_loop import CalledOff, EventLoop


@pytest.fixture
def loop() -> Iterator[EventLoop]:
    loop = EventLoop()
    yield loop
    loop.close()


def test_a_timer_goes_on_when_bounds_are_cleared(loop: EventLoop) -> None:
    beats: list[float] = []
    bound: list[str] = []
    loop.every("beat", 0.02, lambda: beats.append(time.monotonic()))
    loop.set_bound("kill", 0.05, lambda: bound.append("kill"))
    loop.clear_bounds()
    end = time.monotonic() + 0.3
    while time.monotonic() < end:
        loop.wait()
    assert not bound
    assert 8 <= len(beats) <= 16
    loop.stop_timer("beat")
    num_beats = len(beats)
    loop.wait(0.05)
    assert len(beats) == num_beats


def test_a_timer_that_ends_itself_is_over(loop: EventLoop) -> None:
    beats: list[int] = []

    def beat() -> None:
        beats.append(1)
        loop.stop_timer("beat")

    loop.every("beat", 0.01, beat)
    for _ in range(5):
        loop.wait(0.02)
    assert beats == [1]


def test_heartbeats_go_on_while_work_is_done_aside(loop: EventLoop) -> None:
    beats: list[int] = []
    loop.every("beat", 0.02, lambda: beats.append(1))

    def work() -> str:
        time.sleep(0.3)
        return threading.current_thread().name

    assert loop.aside(work) != threading.current_thread().name
    assert len(beats) >= 8


def test_what_the_work_raises_is_raised(loop: EventLoop) -> None:
    with pytest.raises(ValueError, match="seven"):
        loop.aside(lambda: int("seven"))
    assert loop.aside(lambda: 7) == 7


def test_work_that_is_called_off_is_not_waited_for(loop: EventLoop) -> None:
    over = threading.Event()
    loop.every("soon", 0.05, over.set)
    began = time.monotonic()
    with pytest.raises(CalledOff):
        loop.aside(lambda: time.sleep(3), over.is_set)
    assert time.monotonic() - began < 1.5


def test_a_kept_bound_outlives_a_turn(loop: EventLoop) -> None:
    called: list[str] = []
    loop.set_bound("flush", 0.02, lambda: called.append("flush"), kept=True)
    loop.set_bound("kill", 0.02, lambda: called.append("kill"))
    loop.clear_bounds()
    loop.wait(0.1)
    loop.wait(0.01)
    assert called == ["flush"]


def test_quick_work_does_not_wait_for_the_tick(loop: EventLoop) -> None:
    began = time.monotonic()
    for _ in range(20):
        loop.aside(lambda: None)
    assert time.monotonic() - began < 1.0


def test_the_tick_comes_after_every_wait() -> None:
    ticks: list[int] = []
    loop = EventLoop(lambda: ticks.append(1))
    loop.wait(0)
    loop.wait(0)
    assert len(ticks) == 2
    loop.close()
