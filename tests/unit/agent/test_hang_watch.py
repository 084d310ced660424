"""The watch itself, on processes that stand in for ranks and a clock that runs as told."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from launcher import progress_record
from launcher.agent import hang_watch, stacks
from launcher.agent.generation import RankProcess
from launcher.agent.hang_watch import HangWatch
from launcher.event_loop import EventLoop
from launcher.link import Link
from launcher.progress_record import Phase, ProgressRecord, RankProgress


class Scene:
    """Two ranks in the middle of training, with steps of a second."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 1000.0
        monkeypatch.setattr(progress_record, "time", self)
        monkeypatch.setattr(hang_watch, "time", self)
        self.loop = EventLoop()
        self.watch = HangWatch(self.loop, "auto", "n0")
        self.watch.begin(range(2))
        self.ranks = [ProgressRecord(self.watch.record_of(rank)) for rank in (0, 1)]
        unused: Any = None
        link: Link = unused
        self.processes = [RankProcess(rank, os.getpid(), -1, link, Path()) for rank in (0, 1)]
        self.found: list[Sequence[RankProgress]] = []
        self.watch.watch(lambda: self.processes, self.found.append)
        for record in self.ranks:
            record.enter(Phase.TRAINING)
        for step in range(1, 5):
            self.pass_s(1.0)
            for record in self.ranks:
                record.step_ended(step)

    def monotonic(self) -> float:
        return self.now_s

    def pass_s(self, seconds: float) -> None:
        """Second by second, with a look after each."""
        while seconds > 0:
            self.now_s += min(1.0, seconds)
            seconds -= 1.0
            self.watch._look()


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    scene = Scene(monkeypatch)
    yield scene
    scene.watch.end()
    scene.loop.close()


def test_a_standstill_is_told_at_two_seconds_and_twice_the_step(scene: Scene) -> None:
    scene.pass_s(3.0)
    assert not scene.found
    scene.pass_s(1.0)
    (ranks,) = scene.found
    assert [(rank.rank, rank.step, rank.still_s) for rank in ranks] == [(0, 4, 4.0), (1, 4, 4.0)]
    assert scene.watch.bound_s == pytest.approx(4.0)


def test_one_rank_that_moves_is_enough(scene: Scene) -> None:
    for _ in range(20):
        scene.pass_s(3.0)
        scene.ranks[1].micro_batch_begins()
    assert not scene.found


def test_the_time_in_which_the_agent_was_away_counts_for_nothing(scene: Scene) -> None:
    scene.now_s += 3600.0
    scene.pass_s(1.0)
    assert not scene.found
    scene.pass_s(4.0)
    assert scene.found[0][0].still_s == pytest.approx(4.0)


def test_a_pause_that_ended_by_itself_is_no_hang_the_next_time(scene: Scene) -> None:
    scene.pass_s(4.0)
    assert not scene.watch.has_moved()
    scene.now_s += 0.5
    scene.ranks[0].micro_batch_begins()
    assert scene.watch.has_moved()
    scene.found.clear()
    scene.pass_s(5.0)
    assert not scene.found
    scene.pass_s(1.0)
    assert scene.found


def test_without_py_spy_it_is_said_in_place_of_the_stack(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacks, "find_py_spy", lambda: None)
    assert "py-spy is not installed" in stacks.take_stacks({3: os.getpid()})[3]


def test_the_stack_of_a_stopped_process_and_its_innermost_frame(tmp_path: Path) -> None:
    program = tmp_path / "stuck.py"
    program.write_text("import os, signal\ndef stuck():\n    os.kill(os.getpid(), signal.SIGSTOP)\nstuck()\n")
    process = subprocess.Popen([os.sys.executable, str(program)])
    try:
        os.waitpid(process.pid, os.WUNTRACED)
        assert hang_watch.process_state(process.pid) == "T"
        stack = stacks.take_stacks({0: process.pid})[0]
        assert stacks.innermost_frames(stack) == "stuck (stuck.py:3) < <module> (stuck.py:4)", stack
    finally:
        process.kill()
        process.wait()


def test_nccl_is_asked_for_its_dump_through_its_pipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacks, "_FLIGHT_WITHIN_S", 0.0)
    flight = stacks.FlightRecorder(tmp_path / "logs", tmp_path / "pipes", {})
    set_by_us = flight.variables(3)
    pipe = Path(f"{set_by_us['TORCH_NCCL_DEBUG_INFO_PIPE_FILE']}1.pipe")
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    flight.ask(range(2))  # rank 0 has no pipe: it does not use NCCL
    assert os.read(reader, 10)
    os.close(reader)
    assert set_by_us["TORCH_NCCL_DEBUG_INFO_TEMP_FILE"] == str(tmp_path / "logs" / "gen-3" / "nccl-rank-")
    flight.close()
    assert not (tmp_path / "pipes").exists()


@pytest.mark.parametrize("name", ["TORCH_NCCL_DEBUG_INFO_TEMP_FILE", "TORCH_FR_DUMP_TEMP_FILE"])
def test_where_the_user_has_said_where_dumps_go_nothing_is_changed(tmp_path: Path, name: str) -> None:
    assert stacks.FlightRecorder(tmp_path, tmp_path, {name: "/x"}).variables(1) == {}
