"""From the values of all runs to rows with medians and verdicts. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypedDict

OURS = "ftlaunch"
Figures = dict[str, float | str | None]


class Results(TypedDict):
    """What `.bench/results.json` keeps. Runs of a case by launcher, each with its figures and the time as `at`, or with
    `why_not` instead of figures; a figure that is null did not come within its bound."""

    machine: dict[str, str]
    versions: dict[str, str]
    skipped: dict[str, str]
    cases: dict[str, dict[str, list[Figures]]]


@dataclass(frozen=True)
class Cell:
    """`values` of the runs that have been measured; infinite: not within the bound."""

    values: tuple[float, ...] = ()
    why_not: str | None = None

    @property
    def median(self) -> float | None:
        return statistics.median_low(self.values) if self.values else None  # never between a number and infinity


Cells = dict[str, Cell]


@dataclass(frozen=True)
class Verdict:
    text: str
    is_met: bool | None  # None: there is nothing to compare


@dataclass(frozen=True)
class AtMost:
    bound: float

    def verdict(self, cells: Cells, unit: str) -> Verdict:
        ours = cells[OURS].median if OURS in cells else None
        return Verdict(f"at most {self.bound:g} {unit}", None if ours is None else ours <= self.bound)


@dataclass(frozen=True)
class Ratio:
    bound: float
    peer: str | None = None  # None: the fastest of those that came to an end

    def verdict(self, cells: Cells, unit: str) -> Verdict:
        text = f"at most {self.bound:g} x {self.peer or 'the fastest peer'}"
        ours = cells[OURS].median if OURS in cells else None
        theirs = {
            name: cell.median
            for name, cell in cells.items()
            if name != OURS and cell.median is not None and self.peer in (None, name)
        }
        if ours is None or not theirs:
            return Verdict(text, None)
        fastest = min(theirs, key=lambda name: theirs[name])
        if math.isinf(theirs[fastest]):
            return Verdict(f"{text}: no peer gets there", not math.isinf(ours))
        ratio = ours / theirs[fastest]
        return Verdict(f"{text}: {ratio:.2f} x {fastest}", ratio <= self.bound)


@dataclass(frozen=True)
class InTime:
    """Every run has kept its own bound: `figure` is what was left of it."""

    text: str

    def verdict(self, cells: Cells, unit: str) -> Verdict:
        values = cells[OURS].values if OURS in cells else ()
        return Verdict(self.text, min(values) >= 0 if values else None)


Target = AtMost | Ratio | InTime


@dataclass(frozen=True)
class Line:
    """A row to be: one figure of a case. `judged` is the figure that its targets look at, where it is another."""

    case: str
    figure: str
    title: str
    unit: str = "s"
    targets: tuple[Target, ...] = ()
    judged: str | None = None


_FOUND = InTime("found within 3 s and two steps, and the right rank named")
LINES = (
    Line("fresh2", "first_step_s", "fresh start, 2 ranks: first step", targets=(Ratio(1.0, "torchrun"),)),
    Line("fresh8", "first_step_s", "fresh start, 8 ranks: first step", targets=(Ratio(0.5, "torchrun"),)),
    Line("kill", "new_step_s", "rank killed: first new step", targets=(Ratio(0.25), AtMost(2.2))),
    Line("kill", "first_step_s", "rank killed: first step again"),
    Line("kill", "redone_steps", "rank killed: steps done twice", "steps"),
    Line("hang-sigstop", "found_s", "rank stopped (SIGSTOP): found", targets=(_FOUND,), judged="spare_s"),
    Line("hang-loop", "found_s", "rank in `while True`: found", targets=(_FOUND,), judged="spare_s"),
    Line("hang-collective", "found_s", "rank stays out of a collective: found", targets=(_FOUND,), judged="spare_s"),
    Line("node", "new_step_s", "one of two nodes killed: first new step", targets=(Ratio(0.5),)),
    Line("node", "redone_steps", "one of two nodes killed: steps done twice", "steps"),
    Line("sigterm", "gone_s", "SIGTERM: all saved and gone"),
    Line("sigterm", "lost_steps", "SIGTERM: steps that no checkpoint has", "steps"),
    Line("crashloop", "restarts", "crash loop by user code: useless restarts", "restarts"),
    Line("crashloop", "ended_s", "crash loop by user code: given up"),
    Line("fresh2", "memory_mb", "memory of what is no rank (shared pages divided)", "MB"),
    Line("fresh2", "agent_mb", "memory of the launcher's own process (resident)", "MB", (AtMost(80),)),
)


@dataclass(frozen=True)
class Row:
    line: Line
    cells: Cells
    verdicts: tuple[Verdict, ...]


def is_missed(row: Row) -> bool:
    return any(verdict.is_met is False for verdict in row.verdicts)


def rows(results: Results) -> list[Row]:
    """Of the cases that have been run."""
    found = []
    for line in LINES:
        runs = results["cases"].get(line.case)
        if not runs:
            continue
        cells = {name: cell(runs[name], line.figure) for name in runs}
        judged = cells
        if line.judged:  # a run without it (not found, another rank named) has missed its bound by far
            judged = {name: cell(runs[name], line.judged, missing=-math.inf) for name in runs}
        verdicts = tuple(target.verdict(judged, line.unit) for target in line.targets)
        found.append(Row(line, cells, verdicts))
    return found


def cell(runs: Sequence[Figures], figure: str, missing: float = math.inf) -> Cell:
    measured = [run for run in runs if "why_not" not in run]
    reasons = [str(run["why_not"]) for run in runs if "why_not" in run]
    values = []
    for run in measured:
        value = run.get(figure)
        values.append(float(value) if isinstance(value, int | float) else missing)
    return Cell(tuple(values), reasons[0] if reasons else None)


def shown(value: float | None, unit: str) -> str:
    if value is None:
        return "-"
    if math.isinf(value):
        return "never"
    return f"{value:.2f}" if unit == "s" else f"{value:.0f}"


def names_of(found: Sequence[Row]) -> list[str]:
    """ftlaunch first, the others in the order of their names."""
    names = {name for row in found for name in row.cells}
    return sorted(names, key=lambda name: (name != OURS, name))


def text_table(found: Sequence[Row]) -> str:
    names = names_of(found)
    width = max((len(row.line.title) for row in found), default=0) + 10
    text = [f"{'medians':{width}}" + "".join(f"{name:>13}" for name in names)]
    for row in found:
        title = f"{row.line.title} ({row.line.unit})"
        cells = (row.cells.get(name, Cell()) for name in names)
        text.append(f"{title:{width}}" + "".join(f"{shown(cell.median, row.line.unit):>13}" for cell in cells))
        text += [f"  {word(verdict)}: {verdict.text}" for verdict in row.verdicts]
    return "\n".join(text)


def word(verdict: Verdict) -> str:
    return {True: "met", False: "MISSED", None: "not judged"}[verdict.is_met]
