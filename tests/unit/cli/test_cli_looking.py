"""`status`, `checkpoints` and `diagnose`: they look at what a run has left, and change nothing."""

from __future__ import annotations

import fcntl
import json
from pathlib import Path

import pytest

from launcher.agent.events import AppendedLines, EventLog
from launcher.agent.ledger import samples_path
from launcher.cli.main import main
from tests.unit.checkpoint.checkpoint_folders import save


def run_of(output_dir: Path, *, ended: bool) -> None:
    events = EventLog(output_dir, "n0")
    events.emit("run_started", run_id="abc")
    events.generation = 2
    events.emit("generation_started", reason="start")
    events.emit("checkpoint_saved", step=10)
    events.emit("incident", **{"class": "host_oom"})
    if ended:
        events.emit("run_ended", exit_code=138, reason="stopped by SIGTERM", steps=12, goodput=0.5)
    samples = AppendedLines(samples_path(output_dir, "n0"))
    samples.append({"gen": 2, "rank": 0, "step": 12, "ids": [1]})


def answer(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, object]:
    assert main([*arguments, "--json"]) == 0
    document: dict[str, object] = json.loads(capsys.readouterr().out)
    return document


def test_status_of_a_run_that_ended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_of(tmp_path, ended=True)
    status = answer(capsys, "status", str(tmp_path))
    assert (status["state"], status["exit_code"], status["step"], status["saved_step"]) == ("ended", 138, 12, 10)
    assert status["faults"] == ["host_oom"]
    assert main(["status", str(tmp_path)]) == 0
    assert "ended with exit code 138: stopped by SIGTERM" in capsys.readouterr().out


def test_status_of_a_run_whose_machine_was_lost(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_of(tmp_path, ended=False)
    assert answer(capsys, "status", str(tmp_path))["state"] == "gone"


def test_status_of_a_living_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_of(tmp_path, ended=False)
    with (tmp_path / "ftlaunch" / "lock").open("w") as lock:
        lock.write("pid 7 on here")
        lock.flush()
        fcntl.flock(lock, fcntl.LOCK_EX)
        status = answer(capsys, "status", str(tmp_path))
    assert (status["state"], status["holder"]) == ("running", "pid 7 on here")


def test_status_of_a_second_start_forgets_how_the_first_ended(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_of(tmp_path, ended=True)
    EventLog(tmp_path, "n0").emit("run_started", run_id="abc")
    status = answer(capsys, "status", str(tmp_path))
    assert (status["state"], status["exit_code"], status["faults"]) == ("gone", None, [])


def test_status_of_a_folder_without_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", str(tmp_path)]) == 2
    assert "holds no run" in capsys.readouterr().err


def test_checkpoints_says_which_is_taken_and_why_others_are_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for step in (10, 20, 30):
        save(tmp_path, step)
    (tmp_path / "checkpoint-30" / "MANIFEST.json").unlink()
    document = answer(capsys, "checkpoints", str(tmp_path))
    rows = document["checkpoints"]
    assert isinstance(rows, list)
    assert [(row["step"], row["whole"], row["resumes"]) for row in rows] == [
        (30, False, False),
        (20, True, True),
        (10, True, False),
    ]
    assert "no MANIFEST.json" in rows[0]["reason"]


def test_checkpoints_finds_a_flipped_bit_only_with_verify(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = save(tmp_path, 10)
    path = folder / "scheduler.pt"
    content = bytearray(path.read_bytes())
    content[0] ^= 1
    path.write_bytes(content)
    assert main(["checkpoints", str(tmp_path)]) == 0
    assert "a start resumes here" in capsys.readouterr().out
    assert main(["checkpoints", str(tmp_path), "--verify"]) == 0
    assert "refused: scheduler.pt does not have the content" in capsys.readouterr().out


def test_diagnose_names_cause_and_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "rank-0.log"
    log.write_text("Traceback (most recent call last):\n  File \"train.py\", line 3, in <module>\nKeyError: 'labels'\n")
    verdict = answer(capsys, "diagnose", str(log))
    assert verdict["class"] == "user_code"
    assert main(["diagnose", str(log)]) == 0
    assert "KeyError: 'labels'" in capsys.readouterr().out
    assert main(["diagnose"]) == 2
