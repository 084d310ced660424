"""What is said of the ranks' messages, on the node that shows the progress of all and on the others."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from launcher.agent.console import Console
from launcher.agent.events import AppendedLines, EventLog, read_json_lines
from launcher.agent.ledger import Progress
from launcher.agent.recorder import RunRecorder
from launcher.policy.save_interval import IntervalInputs, Stall, choose_interval


@pytest.mark.parametrize(("ranks", "is_said"), [(range(0, 2), True), (range(2, 4), False)])
def test_phases_are_said_on_the_node_of_rank_0_only(tmp_path: Path, ranks: range, is_said: bool) -> None:
    stream = io.StringIO()
    events = EventLog(tmp_path, f"n{int(not is_said)}")
    recorder = RunRecorder(events, AppendedLines(tmp_path / "samples.jsonl"), Console(stream), Progress(0.0))
    recorder.attempt_begins(0.0, ranks)
    recorder.message(ranks.start, {"kind": "phase", "name": "evaluating"})
    recorder.message(ranks.start, {"kind": "phase", "name": "training", "max_steps": 7, "steps_per_epoch": 7})
    assert ("evaluating ..." in stream.getvalue()) is is_said
    assert recorder.progress.max_steps == 7, "what is not said counts all the same"
    recorder.message(
        ranks.start, {"kind": "drill", "number": 1, "signal": "SIGKILL", "step": 3, "at": "step_end", "batch": 1}
    )
    assert "gets SIGKILL after step 3" in stream.getvalue(), "faults are said everywhere"
    recorder.close()


def test_how_often_snapshots_are_taken_is_an_event_with_its_inputs(tmp_path: Path) -> None:
    events = EventLog(tmp_path, "n0")
    recorder = RunRecorder(
        events, AppendedLines(tmp_path / "samples.jsonl"), Console(io.StringIO()), Progress(started_at_s=0.0)
    )
    chosen = choose_interval(IntervalInputs(budget=0.01, step_s=1.0, stall=Stall(0.5, 0.5)))
    told = {"step": 12, "every_steps": chosen.every_steps, "reason": chosen.reason.value, "text": chosen.text}
    recorder.message(0, {"kind": "memory_interval", **told, "inputs": chosen.inputs_of_event()})
    recorder.close()
    (event,) = read_json_lines(events.path)
    assert event["event"] == "memory_interval"
    assert (event["step"], event["every_steps"], event["reason"]) == (12, 50, "budget")
    assert event["inputs"] == chosen.inputs_of_event()
    assert "every 50 steps" in event["text"]
