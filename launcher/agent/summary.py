"""The end of a run for a person: what it cost, what survived, what came out.

With several nodes whoever leads at the end tells of all of them: what the others have seen is in their records.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.agent.completion import read_final
from launcher.agent.events import read_json_lines
from launcher.agent.ledger import Progress, SampleCount, count_samples, effective_samples, read_samples
from launcher.errors import ExitCode

_RECORDS_WITHIN_S = 5.0  # what another machine has just written comes a little later to a shared folder
_LOOK_EVERY_S = 0.2


@dataclass(frozen=True)
class RunSummary:
    """`samples_lost` and `samples_twice` are counted from the record of what every rank was given, over all starts.

    nodes: with several, which trained at first, and which then and why, wherever that changed.
    """

    steps: int
    planned_steps: int | None
    steps_redone: int
    faults: tuple[str, ...]
    samples_seen: int
    samples_lost: int | None
    samples_twice: int
    first_loss: float | None
    last_loss: float | None
    eval_loss_before: float | None
    eval_loss_after: float | None
    answers: tuple[tuple[str, str, str], ...]  # question, base model's answer, tuned model's answer
    final: str | None
    nodes: tuple[str, ...] = ()


def summarise(
    output_dir: Path,
    progress: Progress,
    *,
    started_at_step: int,
    node: str = "n0",
    after_generation: int | None = None,
) -> RunSummary:
    """`node`: this one. `after_generation`: the last number before this start, where other nodes take part."""
    manifest = read_final(output_dir, hashes=False)
    if manifest is not None and manifest.step < progress.best_step:
        manifest = None  # an earlier end, which this start was to train beyond
    expected = manifest.samples_seen if manifest else None
    several = after_generation is not None
    others = _Others.read(output_dir, node, after_generation) if after_generation is not None else _Others()
    records, counted = _read_samples(output_dir, progress, expected if several else None)
    evaluations = sorted((others.evaluations | progress.evaluations).items())
    base = dict((*others.answers.get("base", ()), *progress.answers.get("base", ())))
    tuned = progress.answers.get("tuned", []) or others.answers.get("tuned", [])
    redone = progress.redone(started_at_step)
    return RunSummary(
        steps=progress.best_step,
        planned_steps=progress.max_steps,
        steps_redone=redone if after_generation is None else _count_redone(records, after_generation),
        faults=(*progress.faults, *others.faults),
        samples_seen=counted.seen,
        samples_lost=expected - counted.seen if expected is not None else None,
        samples_twice=counted.twice,
        first_loss=progress.first_loss,
        last_loss=progress.last_loss,
        eval_loss_before=evaluations[0][1] if evaluations and evaluations[0][0] == 0 else None,
        eval_loss_after=evaluations[-1][1] if evaluations and evaluations[-1][0] > 0 else None,
        answers=tuple((question, base.get(question, "(earlier start)"), answer) for question, answer in tuned),
        final=str(output_dir / "final") if manifest else None,
        nodes=others.nodes,
    )


class _Others:
    """What the other nodes have seen during this start."""

    def __init__(self) -> None:
        self.faults: list[str] = []
        self.evaluations: dict[int, float] = {}
        self.answers: dict[str, list[tuple[str, str]]] = {}
        self.nodes: tuple[str, ...] = ()

    @classmethod
    def read(cls, output_dir: Path, node: str, after_generation: int) -> _Others:
        found = cls()
        generations: dict[int, Mapping[str, Any]] = {}
        for path in sorted((output_dir / "ftlaunch" / "events").glob("*.jsonl")):
            for event in read_json_lines(path):
                if int(event.get("gen", 0)) <= after_generation:
                    continue
                if event.get("event") == "generation_started":
                    generations[event["gen"]] = event
                elif event.get("node") != node:
                    found._add(event)
        found.nodes = _changes([event for _, event in sorted(generations.items())])
        return found

    def _add(self, event: Mapping[str, Any]) -> None:
        match event.get("event"):
            case "incident":
                rank = event.get("culprit_rank")
                whose = f"rank {rank} on {event['node']}" if rank is not None else event["node"]
                self.faults.append(f"{event['class']}: {whose}")
            case "evaluated":
                self.evaluations[int(event["step"])] = float(event["loss"])
            case "answered":
                self.answers.setdefault(event["model"], []).append((event["question"], event["answer"]))


def _changes(generations: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """The first nodes, then each time that others trained or one had been lost. Faults of ranks stand elsewhere."""
    found: list[str] = []
    before: list[str] = []
    for event in generations:
        nodes, reason = event["nodes"], str(event["reason"])
        if not found:
            found.append(", ".join(nodes))
        elif nodes != before or reason.startswith("lost "):
            found.append(f"{', '.join(nodes)} ({reason})")
        before = nodes
    return tuple(found)


def _count_redone(records: Iterable[Mapping[str, Any]], after_generation: int) -> int:
    """How often a step was done that an earlier generation of this start had done; the first rank speaks for all."""
    done = {(r["gen"], r["step"]) for r in records if r["rank"] == 0 and r["gen"] > after_generation}
    return len(done) - len({step for _, step in done})


def _read_samples(
    output_dir: Path, progress: Progress, expected: int | None
) -> tuple[list[dict[str, Any]], SampleCount]:
    """`expected`: wait a little for the records of so many samples."""
    deadline = time.monotonic() + _RECORDS_WITHIN_S
    while True:
        records = read_samples(output_dir)
        steps = effective_samples(records, up_to_step=progress.best_step)
        counted = count_samples(steps, progress.steps_per_epoch or 1 << 62)
        if expected is None or counted.seen >= expected or time.monotonic() > deadline:
            return records, counted
        time.sleep(_LOOK_EVERY_S)  # a folder that is shared has no event for what others write


def render_summary(summary: RunSummary, exit_code: ExitCode, output_dir: Path) -> str:
    planned = f" of {summary.planned_steps}" if summary.planned_steps else ""
    faults = "; ".join(summary.faults) if summary.faults else "none"
    rows = [
        ("nodes", "; then ".join(summary.nodes)),
        ("steps", f"{summary.steps}{planned}, {summary.steps_redone} redone"),
        ("faults survived" if exit_code is ExitCode.FINISHED else "faults", f"{len(summary.faults)} ({faults})"),
        ("samples", _samples(summary)),
        ("training loss", _change(summary.first_loss, summary.last_loss)),
        ("evaluation loss", _change(summary.eval_loss_before, summary.eval_loss_after)),
        ("result", summary.final or f"not finished; progress is in {output_dir}"),
    ]
    width = max(len(name) for name, _ in rows)
    lines = ["", *(f"  {name:{width}}  {value}" for name, value in rows if value)]
    for question, base, tuned in summary.answers:
        lines += [
            "",
            f"  question     {question}",
            f"  base model   {_one_line(base)}",
            f"  tuned model  {_one_line(tuned)}",
        ]
    return "\n".join([*lines, ""])


def _samples(summary: RunSummary) -> str:
    lost = "" if summary.samples_lost is None else f", {summary.samples_lost} lost"
    if summary.samples_lost and summary.nodes:
        lost += " (or not to be seen here yet)"
    return f"{summary.samples_seen}{lost}, {summary.samples_twice} twice"


def _change(before: float | None, after: float | None) -> str:
    if after is None:
        return ""
    return f"{before:.4f} -> {after:.4f}" if before is not None else f"{after:.4f}"


def _one_line(text: str) -> str:
    return " ".join(text.split())
