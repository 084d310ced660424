"""What is said at the end, also where other nodes have done a part of it."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest

from launcher.agent.events import AppendedLines, EventLog
from launcher.agent.ledger import Progress, samples_path
from launcher.agent.summary import RunSummary, render_summary, summarise
from launcher.errors import ExitCode
from tests.unit.agent.test_completion import write_final


def record(output_dir: Path, node: str, *done: tuple[int, int, int]) -> None:
    """(generation, rank, step); the samples of rank r in step s are 10 s + r."""
    lines = AppendedLines(samples_path(output_dir, node))
    for generation, rank, step in done:
        lines.append({"gen": generation, "rank": rank, "step": step, "ids": [10 * step + rank]})
    lines.close()


def emit(output_dir: Path, node: str, generation: int, event: str, **fields: Any) -> None:
    log = EventLog(output_dir, node)
    log.generation = generation
    log.emit(event, **fields)


def progress_of(best_step: int, steps_done: int) -> Progress:
    return Progress(0.0, best_step=best_step, steps_done=steps_done, max_steps=100, steps_per_epoch=100)


def at_the_end(summary: RunSummary, output_dir: Path) -> dict[str, str]:
    lines = render_summary(summary, ExitCode.FINISHED, output_dir).splitlines()
    return {name.strip(): value for name, _, value in (line.strip().partition("  ") for line in lines if line)}


def test_one_node_counts_for_itself(tmp_path: Path) -> None:
    record(tmp_path, "n0", (1, 0, 1), (1, 0, 2), (2, 0, 2), (2, 0, 3))
    emit(tmp_path, "n0", 1, "generation_started", nodes=["n0"], reason="start")
    summary = summarise(tmp_path, progress_of(3, 4), started_at_step=0)
    assert (summary.steps, summary.steps_redone, summary.samples_seen, summary.nodes) == (3, 1, 3, ())
    assert "nodes" not in at_the_end(summary, tmp_path)


def test_a_new_leader_tells_what_the_old_one_had_seen(tmp_path: Path) -> None:
    """n0 leads, has a fault, is lost; n1 goes on alone from step 2 and has done fewer steps itself."""
    record(tmp_path, "n0", (2, 0, 1), (3, 0, 1), (4, 0, 1), (5, 0, 1), (5, 0, 2), (5, 0, 3))
    record(tmp_path, "n1", (4, 1, 1), (4, 1, 2), (5, 1, 1), (5, 1, 2), (5, 1, 3), (7, 0, 3), (7, 0, 4))
    for node in ("n0", "n1"):
        emit(tmp_path, node, 4, "generation_started", nodes=["n0", "n1"], reason="start")
        emit(tmp_path, node, 5, "generation_started", nodes=["n0", "n1"], reason="n0: rank 0 ended with SIGKILL")
    emit(tmp_path, "n0", 3, "incident", **{"class": "nccl_timeout", "culprit_rank": None})  # of an earlier start
    emit(tmp_path, "n0", 4, "evaluated", step=0, loss=4.5)
    emit(tmp_path, "n0", 4, "answered", model="base", question="why?", answer="no idea")
    emit(tmp_path, "n0", 4, "incident", **{"class": "host_oom", "culprit_rank": 0})
    emit(tmp_path, "n1", 7, "generation_started", nodes=["n1"], reason="lost n0 (10.0.0.1:1): silent for 3 s")
    emit(tmp_path, "n1", 7, "incident", **{"class": "unknown", "culprit_rank": 0})
    progress = progress_of(4, 5)
    progress.faults = ["unknown: rank 0 SIGKILL"]
    progress.evaluations = {4: 2.5}
    progress.answers = {"tuned": [("why?", "because")]}
    summary = summarise(tmp_path, progress, started_at_step=0, node="n1", after_generation=3)
    assert summary.steps_redone == 2  # step 1 by generation 5, step 3 by generation 7
    assert summary.faults == ("unknown: rank 0 SIGKILL", "host_oom: rank 0 on n0")
    assert (summary.eval_loss_before, summary.eval_loss_after) == (4.5, 2.5)
    assert summary.answers == (("why?", "no idea", "because"),)
    assert summary.nodes == ("n0, n1", "n1 (lost n0 (10.0.0.1:1): silent for 3 s)")
    shown = at_the_end(summary, tmp_path)
    assert shown["nodes"].strip() == "n0, n1; then n1 (lost n0 (10.0.0.1:1): silent for 3 s)"
    assert "2 redone" in shown["steps"]


def test_a_node_that_was_lost_and_came_back_is_told(tmp_path: Path) -> None:
    for generation, reason in ((1, "start"), (2, "n1: rank 1 was killed"), (3, "lost n1 (10.0.0.2:1): silent")):
        emit(tmp_path, "n0", generation, "generation_started", nodes=["n0", "n1"], reason=reason)
    summary = summarise(tmp_path, progress_of(1, 1), started_at_step=0, node="n0", after_generation=0)
    assert summary.nodes == ("n0, n1", "n0, n1 (lost n1 (10.0.0.2:1): silent)")


def test_records_of_other_nodes_are_waited_for(tmp_path: Path) -> None:
    write_final(tmp_path, 2)  # its manifest counts 16 samples
    record(tmp_path, "n0", *((1, rank, step) for rank in range(4) for step in (1, 2)))
    late = [(1, rank, step) for rank in range(4, 8) for step in (1, 2)]
    other = threading.Timer(0.3, record, (tmp_path, "n1", *late))
    other.start()
    began = time.monotonic()
    summary = summarise(tmp_path, progress_of(2, 2), started_at_step=0, node="n0", after_generation=0)
    other.join()
    assert (summary.samples_seen, summary.samples_lost) == (16, 0)
    assert time.monotonic() - began < 2.0


def test_a_sample_that_stays_lost_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("launcher.agent.summary._RECORDS_WITHIN_S", 0.5)
    write_final(tmp_path, 2)
    record(tmp_path, "n0", (1, 0, 1), (1, 0, 2))
    emit(tmp_path, "n0", 1, "generation_started", nodes=["n0", "n1"], reason="start")
    summary = summarise(tmp_path, progress_of(2, 2), started_at_step=0, node="n0", after_generation=0)
    assert at_the_end(summary, tmp_path)["samples"].strip() == "2, 14 lost (or not to be seen here yet), 0 twice"
    began = time.monotonic()
    alone = summarise(tmp_path, progress_of(2, 2), started_at_step=0)
    assert time.monotonic() - began < 0.3, "nobody else writes"
    assert at_the_end(alone, tmp_path)["samples"].strip() == "2, 14 lost, 0 twice"
