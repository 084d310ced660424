"""The end of a run for a person: what it cost, what survived, what came out."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from launcher.agent.completion import read_final
from launcher.agent.ledger import Progress, count_samples, effective_samples, read_samples
from launcher.errors import ExitCode


@dataclass(frozen=True)
class RunSummary:
    """`samples_lost` and `samples_twice` are counted from the record of what every rank was given, over all starts."""

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


def summarise(output_dir: Path, progress: Progress, *, started_at_step: int) -> RunSummary:
    manifest = read_final(output_dir, hashes=False)
    if manifest is not None and manifest.step < progress.best_step:
        manifest = None  # an earlier end, which this start was to train beyond
    counted = count_samples(
        effective_samples(read_samples(output_dir), up_to_step=progress.best_step), progress.steps_per_epoch or 1 << 62
    )
    evaluations = sorted(progress.evaluations.items())
    base = dict(progress.answers.get("base", []))
    tuned = progress.answers.get("tuned", [])
    return RunSummary(
        steps=progress.best_step,
        planned_steps=progress.max_steps,
        steps_redone=progress.redone(started_at_step),
        faults=tuple(progress.faults),
        samples_seen=counted.seen,
        samples_lost=manifest.samples_seen - counted.seen if manifest else None,
        samples_twice=counted.twice,
        first_loss=progress.first_loss,
        last_loss=progress.last_loss,
        eval_loss_before=evaluations[0][1] if evaluations and evaluations[0][0] == 0 else None,
        eval_loss_after=evaluations[-1][1] if evaluations and evaluations[-1][0] > 0 else None,
        answers=tuple((question, base.get(question, "(earlier start)"), answer) for question, answer in tuned),
        final=str(output_dir / "final") if manifest else None,
    )


def render_summary(summary: RunSummary, exit_code: ExitCode, output_dir: Path) -> str:
    planned = f" of {summary.planned_steps}" if summary.planned_steps else ""
    faults = "; ".join(summary.faults) if summary.faults else "none"
    rows = [
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
    return f"{summary.samples_seen}{lost}, {summary.samples_twice} twice"


def _change(before: float | None, after: float | None) -> str:
    if after is None:
        return ""
    return f"{before:.4f} -> {after:.4f}" if before is not None else f"{after:.4f}"


def _one_line(text: str) -> str:
    return " ".join(text.split())
