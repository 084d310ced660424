"""What an earlier start has left, wherever it can still be read."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest

from launcher.agent.events import EventLog
from launcher.agent.past import Past, read_failures, read_past
from launcher.policy.save_interval import FailureHistory
from tests.unit.checkpoint.checkpoint_folders import stage


def test_nothing(tmp_path: Path) -> None:
    assert read_past(tmp_path) == Past("", 0, frozenset())


def test_the_events_of_all_nodes(tmp_path: Path) -> None:
    for name, generation, drill in (("n0", 4, 1), ("n1", 7, 3)):
        log = EventLog(tmp_path, name)
        log.emit("run_started", run_id="feedface")
        log.generation = generation
        log.emit("generation_started")
        log.emit("drill", number=drill)
    assert read_past(tmp_path) == Past("feedface", 7, frozenset({1, 3}))


def test_a_number_that_only_a_staging_folder_tells_of_is_not_used_again(tmp_path: Path) -> None:
    """The machine that wrote the event is lost, and the storage had not got it yet."""
    log = EventLog(tmp_path, "n0")
    log.generation = 4
    log.emit("generation_started")
    stage(tmp_path, 20, generation=6)
    assert read_past(tmp_path).last_generation == 6


# -- how often it has failed -------------------------------------------------------------------------------------------

Told = tuple[float, str, int, dict[str, Any]]  # second, event, generation, fields


def tell(folder: Path, node: str, *events: Told) -> None:
    now = [0.0]
    begin = datetime(2026, 11, 30, tzinfo=timezone.utc)
    log = EventLog(folder, node, lambda: begin + timedelta(seconds=now[0]))
    for second, event, generation, fields in events:
        now[0], log.generation = second, generation
        log.emit(event, **fields)


def begun(second: float, generation: int, reason: str = "start") -> list[Told]:
    """A generation that makes its first step ten seconds after it has begun."""
    return [
        (second, "generation_started", generation, {"reason": reason}),
        (second + 10, "first_step", generation, {"step": 1}),
    ]


def incident(second: float, generation: int, *, retryable: bool = True) -> Told:
    return (second, "incident", generation, {"class": "x", "retryable": retryable})


START: Told = (0, "run_started", 0, {"run_id": "feedface"})


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        pytest.param([], FailureHistory(0, 0.0), id="nothing"),
        pytest.param([START, *begun(0, 1), (70, "run_ended", 1, {})], FailureHistory(0, 60.0), id="no fault"),
        pytest.param(
            [START, *begun(0, 1), incident(70, 1), *begun(72, 2, "x"), (102, "run_ended", 2, {})],
            FailureHistory(1, 80.0),
            id="a fault; the restart is no training",
        ),
        pytest.param(
            [START, *begun(0, 1), incident(70, 1, retryable=False), (70, "run_ended", 1, {})],
            FailureHistory(0, 60.0),
            id="a mistake in the job is no failure of the machine",
        ),
        pytest.param(
            [START, *begun(0, 1), (60, "notice", 1, {}), (70, "run_ended", 1, {})],
            FailureHistory(1, 60.0),
            id="a preemption with a notice",
        ),
        pytest.param(
            [START, *begun(0, 1), (70, "checkpoint_saved", 1, {}), START, *begun(1000, 2)],
            FailureHistory(1, 60.0),
            id="an agent that was killed has trained until it last said something",
        ),
        pytest.param(
            [START, *begun(0, 1), (70, "run_ended", 1, {}), START, *begun(1000, 2), (1020, "checkpoint_saved", 2, {})],
            FailureHistory(0, 70.0),
            id="a start that goes on",
        ),
        pytest.param(
            [START, (0, "generation_started", 1, {"reason": "start"}), incident(5, 1), (6, "run_ended", 1, {})],
            FailureHistory(0, 0.0),
            id="a start that never trained",
        ),
    ],
)
def test_failures_of_one_node(tmp_path: Path, events: list[Told], expected: FailureHistory) -> None:
    tell(tmp_path, "n0", *events)
    assert read_failures(tmp_path) == expected


def test_a_failure_that_several_nodes_saw_is_one(tmp_path: Path) -> None:
    """n1 is lost, n0 goes on without it, and lets it in again: joining is no failure."""
    lost, joins = "lost n1 (silent for 3 s)", "n1 wants to join"
    more = [*begun(72, 2, lost), (108, "worker_exited", 2, {}), *begun(110, 3, joins), (150, "run_ended", 3, {})]
    tell(tmp_path, "n0", START, *begun(0, 1), (70, "group_killed", 1, {"reason": lost}), *more)
    tell(tmp_path, "n1", START, *begun(0, 1), (69, "checkpoint_saved", 1, {}), START, *begun(111, 3, joins))
    assert read_failures(tmp_path) == FailureHistory(1, 60.0 + 26.0 + 30.0)


def test_events_that_are_damaged_are_left_out(tmp_path: Path) -> None:
    tell(tmp_path, "n0", START, *begun(0, 1), incident(70, 1))
    with (tmp_path / "ftlaunch" / "events" / "n0.jsonl").open("ab") as stream:
        stream.write(b'{"event": "checkpoint_saved", "t": "yesterday"}\n{"event": "inci')
    assert read_failures(tmp_path) == FailureHistory(1, 60.0)
