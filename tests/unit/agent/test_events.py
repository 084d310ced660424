"""Events: one JSON object a line, appended, never rewritten."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

from launcher.agent.events import AppendedLines, EventLog, events_path, read_json_lines

REPOSITORY = Path(__file__).parents[3]


def test_an_event_has_version_time_node_generation_and_fields(tmp_path: Path) -> None:
    moment = datetime(2026, 11, 30, 12, 0, 0, 123456, timezone.utc)
    log = EventLog(tmp_path, "n0", clock=lambda: moment)
    log.generation = 2
    log.emit("worker_exited", rank=1, exit_code=None, path=tmp_path, note="保险")
    text = events_path(tmp_path, "n0").read_text("utf-8")
    assert text.endswith("\n")
    assert json.loads(text) == {
        "v": 1,
        "t": "2026-11-30T12:00:00.123Z",
        "node": "n0",
        "gen": 2,
        "event": "worker_exited",
        "rank": 1,
        "exit_code": None,
        "path": str(tmp_path),
        "note": "保险",
    }
    assert "保险" in text


def test_the_clock_is_utc_now(tmp_path: Path) -> None:
    EventLog(tmp_path, "n0").emit("x")
    (event,) = read_json_lines(events_path(tmp_path, "n0"))
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", event["t"])
    age = datetime.now(timezone.utc) - datetime.fromisoformat(event["t"].replace("Z", "+00:00"))
    assert timedelta(0) <= age + timedelta(milliseconds=1) < timedelta(minutes=1)


def test_a_text_with_line_breaks_stays_one_line(tmp_path: Path) -> None:
    EventLog(tmp_path, "n0").emit("incident", evidence="a\nb\r\nc")
    assert events_path(tmp_path, "n0").read_bytes().count(b"\n") == 1


def test_a_later_start_appends(tmp_path: Path) -> None:
    for number in range(3):
        EventLog(tmp_path, "n0").emit("run_started", number=number)
    assert [event["number"] for event in read_json_lines(events_path(tmp_path, "n0"))] == [0, 1, 2]


def test_lines_of_several_writers_do_not_mix(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    code = (
        "import sys; from pathlib import Path; from launcher.agent.events import AppendedLines\n"
        "lines = AppendedLines(Path(sys.argv[1]))\n"
        "for i in range(300): lines.append({'who': sys.argv[2], 'i': i, 'pad': 'x' * (i % 97) * 50})"
    )
    writers = [subprocess.Popen([sys.executable, "-c", code, str(path), who], cwd=REPOSITORY) for who in "ab"]
    assert [writer.wait(timeout=60) for writer in writers] == [0, 0]
    records = list(read_json_lines(path))
    # A writer that opens while another writes may take its line for a torn one and end it: a blank line, nothing torn.
    assert len(records) == len([line for line in path.read_bytes().splitlines() if line]) == 600
    for who in "ab":
        assert [record["i"] for record in records if record["who"] == who] == list(range(300))


def test_what_was_written_before_a_kill_is_there(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    code = (
        "import os, sys; from pathlib import Path; from launcher.agent.events import AppendedLines\n"
        "AppendedLines(Path(sys.argv[1])).append({'a': 1}); os.kill(os.getpid(), 9)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], cwd=REPOSITORY, check=False, timeout=60)
    assert done.returncode == -signal.SIGKILL
    assert list(read_json_lines(path)) == [{"a": 1}]


def test_a_cut_off_last_line_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_bytes(b'{"a": 1}\n[1, 2]\n\n{"a": 2}\n{"a": "\xe4\xbf')
    assert [record["a"] for record in read_json_lines(path)] == [1, 2]
    assert list(read_json_lines(tmp_path / "gone.jsonl")) == []


def test_a_record_after_a_cut_off_line_is_not_lost(tmp_path: Path) -> None:
    """After a full disk or a power loss the next start appends: its first event must not drown in the half line."""
    path = tmp_path / "lines.jsonl"
    path.write_bytes(b'{"a": 1}\n{"a": 2, "b')
    lines = AppendedLines(path)
    lines.append({"a": 3})
    lines.append({"a": 4})
    lines.close()
    assert [record["a"] for record in read_json_lines(path)] == [1, 3, 4]


def test_the_file_is_not_handed_to_children(tmp_path: Path) -> None:
    lines = AppendedLines(tmp_path / "lines.jsonl")
    listed = subprocess.run(["ls", "-l", "/proc/self/fd"], capture_output=True, text=True, check=True, close_fds=False)
    assert "lines.jsonl" not in listed.stdout
    lines.close()
    assert os.path.isfile(tmp_path / "lines.jsonl")


def synced_paths(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    synced: list[str] = []
    fsync = os.fsync

    def note(fd: int) -> None:
        fsync(fd)
        synced.append(os.readlink(f"/proc/self/fd/{fd}"))

    monkeypatch.setattr(os, "fsync", note)
    return synced


@pytest.mark.parametrize("event", ["drill", "generation_started"])
def test_what_others_decide_by_is_durable_when_it_is_emitted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, event: str
) -> None:
    """A number used twice, or a drill carried out twice, would be the price of a lost machine."""
    log = EventLog(tmp_path, "n0")
    synced = synced_paths(monkeypatch)
    log.emit("checkpoint_saved")
    assert synced == []
    log.emit(event)
    events = tmp_path / "ftlaunch" / "events"
    assert synced == [str(log.path), str(events), str(events.parent)]
    log.emit("checkpoint_saved")
    assert len(synced) == 3


def test_a_line_that_could_not_be_made_durable_is_tried_again_with_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = EventLog(tmp_path, "n0")

    def broken(_: int) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as storage:
        storage.setattr(os, "fsync", broken)
        log.emit("generation_started")
    assert log.trouble.endswith("n0.jsonl: Input/output error")
    synced = synced_paths(monkeypatch)
    log.emit("checkpoint_saved")
    assert log.trouble == ""
    assert str(log.path) in synced
    assert [event["event"] for event in read_json_lines(log.path)] == ["generation_started", "checkpoint_saved"]
