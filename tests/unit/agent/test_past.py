"""What an earlier start has left, wherever it can still be read."""

from __future__ import annotations

from pathlib import Path

from launcher.agent.events import EventLog
from launcher.agent.past import Past, read_past
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
