"""docs/benchmarks.md. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence

from scripts.bench_peers.table import OURS, Figures, Results, Row, names_of, rows, shown, word

_INTRODUCTION = """# Benchmarks

`make bench` writes this page: ftlaunch and other launchers, in turn, on the same job of the same machine. SmolLM2-135M,
LoRA (r 8) on `q_proj` and `v_proj`, ZeRO-2, 64 tokens a sample, one sample a rank and step, a checkpoint on disk every
5 steps. The others run a plain Trainer script that resumes from the newest checkpoint; ftlaunch runs a `job.yaml`.

Seconds are medians. *never*: not within 60 s (a hang, the end after SIGTERM), 120 s (a new step) or 240 s (the end of a
crash loop). A restart is measured from the signal to the end of the first step that had not been done before it.

![Bars of the medians](benchmarks.svg)
"""


def page(results: Results, notes: Mapping[str, Sequence[str]]) -> str:
    """`notes`: by launcher, and under "" for all."""
    found = rows(results)
    parts = [_INTRODUCTION, "## Medians\n", "\n".join(_medians(found)), ""]
    parts += ["## Targets\n", "\n".join(_targets(found)), ""]
    if phases := list(_phases(results)):
        parts += ["## Where ftlaunch's seconds go\n", "Seconds since the start or the fault, in one run each.\n"]
        parts += ["\n".join(phases), ""]
    if memory := list(_memory(results)):
        parts += [
            "## Memory by process\n",
            "MB resident, and MB with shared pages divided among those that share them.\n",
        ]
        parts += ["\n".join(memory), ""]
    parts += ["## What had to be done to make each work\n", "\n".join(_notes(results, notes)), ""]
    parts += ["## All values\n", "\n".join(_values(found)), ""]
    parts += ["## Machine and versions\n", "\n".join(_machine(results)), ""]
    return "\n".join(parts)


def _medians(found: Sequence[Row]) -> Iterator[str]:
    names = names_of(found)
    yield f"| | {' | '.join(names)} |"
    yield f"|---|{'---|' * len(names)}"
    for row in found:
        medians = (shown(row.cells[name].median, row.line.unit) if name in row.cells else "-" for name in names)
        yield f"| {row.line.title} ({row.line.unit}) | {' | '.join(medians)} |"


def _targets(found: Sequence[Row]) -> Iterator[str]:
    yield "| | target | |"
    yield "|---|---|---|"
    for row in found:
        for verdict in row.verdicts:
            yield f"| {row.line.title} | {verdict.text} | {word(verdict)} |"


def _phases(results: Results) -> Iterator[str]:
    for case, runs in results["cases"].items():
        timed = [run for run in runs.get(OURS, []) if run.get("phases")]
        if timed:
            typical = sorted(timed, key=_first_step_s)[(len(timed) - 1) // 2]
            yield f"- `{case}`: {typical['phases']}"


def _memory(results: Results) -> Iterator[str]:
    for name, runs in results["cases"].get("fresh2", {}).items():
        if measured := [run for run in runs if run.get("memory_parts")]:
            yield f"- {name}: {measured[-1]['memory_parts']}"


def _first_step_s(run: Figures) -> float:
    value = run["first_step_s"]
    assert isinstance(value, float)
    return value


def _notes(results: Results, notes: Mapping[str, Sequence[str]]) -> Iterator[str]:
    yield from (f"- {note}" for note in notes.get("", ()))
    for name, own in notes.items():
        if name in results["skipped"]:
            yield f"- **{name}** was not measured: {results['skipped'][name]}"
        elif name in results["versions"]:
            yield f"- **{name} {results['versions'][name]}**"
            yield from (f"  - {note}" for note in own)


def _values(found: Sequence[Row]) -> Iterator[str]:
    yield "| | | median | values |"
    yield "|---|---|---|---|"
    for row in found:
        for name in names_of([row]):
            cell = row.cells[name]
            values = ", ".join(shown(value, row.line.unit) for value in cell.values)
            if cell.why_not:
                values = f"{values}; {cell.why_not}" if values else cell.why_not
            yield f"| {row.line.title} | {name} | {shown(cell.median, row.line.unit)} | {values} |"


def _machine(results: Results) -> Iterator[str]:
    yield from (f"- {key}: {value}" for key, value in results["machine"].items())
    yield from (f"- {name}: {version}" for name, version in results["versions"].items())
    times = sorted(
        str(run["at"]) for runs in results["cases"].values() for one in runs.values() for run in one if "at" in run
    )
    if times:
        yield f"- measured from {times[0]} to {times[-1]}"
    step_s = [run["step_s"] for one in results["cases"].values() for run in one.get(OURS, []) if "step_s" in run]
    numbers = [float(value) for value in step_s if isinstance(value, int | float)]
    if numbers:
        yield f"- a step of two ranks takes {statistics.median(numbers):.2f} s"
