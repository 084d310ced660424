"""The replay that the documents' figures come from: its arithmetic, its traces, and what it says of the policy."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[3] / "scripts" / "sim_save_interval.py"


@pytest.fixture(scope="module")
def sim() -> ModuleType:
    spec = importlib.util.spec_from_file_location("sim_save_interval", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look for their annotations
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("up_s", "lost_s"),
    [
        (5.0, 0.0),  # no longer than the restart
        (10.0 + 8.0, 8.0),  # no snapshot yet
        (10.0 + 4 * 2.0 + 3.0 - 0.1, 10.9),  # one has begun, and is safe only in a moment
        (10.0 + 4 * 2.0 + 3.0, 11.0 - 8.0),
        (10.0 + 2 * 9.0 + 2.0, 20.0 - 16.0),  # two cycles of four steps and a stall
    ],
)
def test_what_one_failure_costs(sim: ModuleType, up_s: float, lost_s: float) -> None:
    job = sim.Job("", step_s=2.0, stall_s=1.0, seal_s=3.0, restart_s=10.0)
    assert sim.lost_s(up_s, job, 4) == pytest.approx(lost_s)


@pytest.mark.parametrize("mean_s", [300.0, 3600.0])
def test_the_chosen_interval_is_near_the_best(
    sim: ModuleType, mean_s: float, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sim, "NUM_POISSON_FAILURES", 1000)
    failures = sim.poisson(mean_s, 0)
    assert all(sim.report(failures, job) for job in sim.JOBS)
    assert len(capsys.readouterr().out.splitlines()) == len(sim.JOBS)


def test_a_bad_choice_would_be_seen(sim: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten times too rare, or too often."""
    monkeypatch.setattr(sim, "NUM_POISSON_FAILURES", 1000)
    failures, job = sim.poisson(300.0, 0), sim.JOBS[3]
    chosen = sim.choose_interval(
        sim.IntervalInputs(
            budget=job.budget,
            step_s=job.step_s,
            stall=sim.Stall(job.stall_s, job.stall_s),
            failures=failures.of(job),
        )
    )
    good = sim.lost_of(failures, job, chosen.every_steps)
    for wrong in (1, 10 * chosen.every_steps):
        assert not sim.is_as_promised(chosen, sim.lost_of(failures, job, wrong), good, job.budget)


def test_traces_are_read(sim: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("0,add,n1\n0,add,n2\n60000,remove,n1\n60000,remove,n2\n120000,add,n3\n")
    (tmp_path / "b.txt").write_text(
        "2021-12-10, 13:00:00, 80\n2021-12-10, 13:02:00, 70\n2021-12-10, 13:01:00, 80\n2021-12-10, 13:03:00, 75\n"
    )
    (tmp_path / "README.md").write_text("nothing")
    spread, alive = sim.real_traces(tmp_path)
    assert (spread.name, spread.num_nodes, len(spread.times_s)) == ("a", 2, sim.NUM_REPLAYS)
    assert (alive.name, alive.num_nodes, len(alive.times_s)) == ("b", 80, sim.NUM_REPLAYS)
    assert 120 <= alive.times_s[0] <= 120 + sim.MOVED_BY_S
    assert list(alive.times_s) == sorted(alive.times_s)


def test_without_traces_it_says_so(sim: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert list(sim.real_traces(None)) == list(sim.real_traces(tmp_path)) == []
    assert "left out" in capsys.readouterr().out
