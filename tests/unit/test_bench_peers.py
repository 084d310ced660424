"""What `make bench` makes of the values that it has measured."""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import pytest

from launcher.config.load import load_job
from scripts.bench_peers.cases import CASES
from scripts.bench_peers.chart import svg
from scripts.bench_peers.job_files import Job, job_yaml
from scripts.bench_peers.launchers import Command, Launcher
from scripts.bench_peers.page import page
from scripts.bench_peers.phases import timeline
from scripts.bench_peers.running import NotMeasuredError, Run
from scripts.bench_peers.table import LINES, Figures, Results, Row, is_missed, rows, text_table, word

AT = "2026-12-01T02:43+00:00"


def results(case: str, **runs: list[Figures]) -> Results:
    versions = dict.fromkeys(runs, "1.0")
    return {"machine": {"processor": "two cores"}, "versions": versions, "skipped": {}, "cases": {case: runs}}


def runs(figure: str, *values: float | str | None, **also: float | str | None) -> list[Figures]:
    return [{figure: value, "at": AT, **also} for value in values]


def row(found: list[Row], figure: str) -> Row:
    return next(row for row in found if row.line.figure == figure)


def test_medians_ratio_and_verdicts() -> None:
    found = rows(
        results("kill", ftlaunch=runs("new_step_s", 2.0, 2.6, 1.0), torchrun=runs("new_step_s", 9.0, 8.0, 8.5))
    )
    killed = row(found, "new_step_s")
    assert {name: cell.median for name, cell in killed.cells.items()} == {"ftlaunch": 2.0, "torchrun": 8.5}
    assert [(verdict.is_met, verdict.text) for verdict in killed.verdicts] == [
        (True, "at most 0.25 x the fastest peer: 0.24 x torchrun"),
        (True, "at most 2.2 s"),
    ]


def test_the_fastest_peer_is_the_one_to_beat() -> None:
    peers = {"torchrun": runs("new_step_s", 9.0), "dlrover": runs("new_step_s", 7.0)}
    killed = row(rows(results("kill", ftlaunch=runs("new_step_s", 2.0), **peers)), "new_step_s")
    assert killed.verdicts[0].text.endswith("0.29 x dlrover")
    assert is_missed(killed)


@pytest.mark.parametrize(
    ("ours", "theirs", "is_met"),
    [(None, 9.0, False), (2.0, None, True), (None, None, False)],
    ids=["ours never", "theirs never", "both never"],
)
def test_what_never_happens_loses(ours: float | None, theirs: float | None, is_met: bool) -> None:
    found = rows(results("node", ftlaunch=runs("new_step_s", ours), torchrun=runs("new_step_s", theirs)))
    lost = row(found, "new_step_s")
    assert lost.verdicts[0].is_met is is_met
    assert "never" in text_table(found)


def test_without_a_peer_nothing_is_judged() -> None:
    skipped: list[Figures] = [{"why_not": "it is not for this Python", "at": AT}]
    found = rows(results("fresh8", ftlaunch=runs("first_step_s", 20.0), torchrun=skipped))
    assert [word(verdict) for verdict in found[0].verdicts] == ["not judged"]
    assert not is_missed(found[0])


def test_a_median_of_two_values_is_one_of_them() -> None:
    """With one run that never ended there is nothing between."""
    assert row(rows(results("sigterm", ftlaunch=runs("gone_s", None, 3.0))), "gone_s").cells["ftlaunch"].median == 3.0


@pytest.mark.parametrize(
    ("figures", "is_met"),
    [
        ([{"found_s": 4.0, "named": "rank 1", "spare_s": 0.4}], True),
        ([{"found_s": 4.0, "named": "rank 1", "spare_s": 0.4}, {"found_s": 9.0, "spare_s": -4.6}], False),
        ([{"found_s": 4.0, "named": "rank 0"}], False),
        ([{"found_s": None, "named": None}], False),
    ],
    ids=["in time", "once too late", "another rank named", "not found"],
)
def test_every_hang_is_found_in_time_and_the_right_rank_is_named(figures: list[Figures], is_met: bool) -> None:
    (found,) = rows(results("hang-loop", ftlaunch=figures))
    assert found.verdicts[0].is_met is is_met


def test_the_page_has_values_reasons_notes_and_phases() -> None:
    kept = results(
        "kill",
        ftlaunch=runs("new_step_s", 2.0, 2.2, 2.1, first_step_s=2.0, phases="decided 0.30, first step 2.00"),
        torchrun=[*runs("new_step_s", 8.5), {"why_not": "ended with [1] before a new step", "at": AT}],
    )
    kept["skipped"]["dlrover-run"] = "no telnetlib"
    text = page(kept, {"": ("for all",), "torchrun": ("its variable",), "dlrover-run": ("its master",)})
    for expected in (
        "| rank killed: first new step (s) | 2.10 | 8.50 |",
        "| rank killed: first new step | torchrun | 8.50 | 8.50; ended with [1] before a new step |",
        "- `kill`: decided 0.30, first step 2.00",
        "- for all",
        "- **torchrun 1.0**\n  - its variable",
        "- **dlrover-run** was not measured: no telnetlib",
        f"- measured from {AT} to {AT}",
    ):
        assert expected in text
    assert "its master" not in text


def test_the_picture_is_well_formed_and_its_bars_are_in_proportion() -> None:
    kept = results("kill", ftlaunch=runs("new_step_s", 2.0), torchrun=runs("new_step_s", 8.0), other=runs("x", 1.0))
    bars = [element for element in ET.fromstring(svg(rows(kept))).iter() if element.tag.endswith("rect")][1:]
    assert [int(bar.attrib["width"]) for bar in bars] == [105, 0, 420]  # ours, never, the longest


def test_the_timeline_ends_with_the_first_step_and_says_each_thing_once() -> None:
    events = [
        {"event": "worker_exited", "at": 10.05},
        {"event": "worker_exited", "at": 10.2},
        {"event": "phase", "name": "connecting", "at": 10.8},
        {"event": "checkpoint_saved", "at": 11.0},
        {"event": "first_step", "at": 12.0},
        {"event": "worker_exited", "at": 13.0},
    ]
    assert timeline(events, 10.0) == "death seen 0.05, connecting done 0.80, first step 2.00"


def test_nothing_of_a_run_outlives_it_and_a_run_that_ends_is_not_measured(tmp_path: Path) -> None:
    """Also what has left the launcher's session and whose parent has ended."""
    stray = "import subprocess as s; s.Popen(['sleep', '600'], start_new_session=True)"
    launcher = Launcher("any", version=str, commands=lambda job: [Command([sys.executable, "-c", stray])])
    with Run(launcher, Job(tmp_path / "job", num_steps=1)) as run:
        with pytest.raises(NotMeasuredError, match=r"ended with \[0\] before step 1"):
            run.until_step(1, timeout_s=20)
        assert not run.is_over()
    assert run.is_over()


def test_every_case_is_shown_and_is_a_job_that_ftlaunch_takes(tmp_path: Path) -> None:
    assert {line.case for line in LINES} == set(CASES)
    for case in CASES.values():
        folder = tmp_path / case.name
        folder.mkdir()
        job: Job = replace(case.job, folder=folder)
        assert load_job(job_yaml(job), [], {}).config.cluster.nproc_per_node == job.num_ranks
