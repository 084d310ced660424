"""What a run has done, counted: steps, redone steps, samples, time. From the agent's own records, for people and
events."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launcher.agent.events import read_json_lines


@dataclass(frozen=True)
class SampleCount:
    """Over the steps that count (the latest time each step was done): `seen` different samples, summed over the epochs,
    and how often one was given out a second time within its epoch (`twice`)."""

    seen: int
    twice: int


def samples_path(output_dir: Path, node: str) -> Path:
    return output_dir / "ftlaunch" / "samples" / f"{node}.jsonl"


def effective_samples(records: Iterable[Mapping[str, Any]], *, up_to_step: int | None = None) -> dict[int, list[int]]:
    """step -> sample ids of all ranks, from the latest generation that did the step.

    A step that an attempt finished and a restart did again counts once, as the weights know it: the later time.
    """
    latest: dict[int, int] = {}
    ids: dict[tuple[int, int], list[int]] = {}
    for record in records:
        step, generation = int(record["step"]), int(record["gen"])
        if up_to_step is not None and step > up_to_step:
            continue
        latest[step] = max(generation, latest.get(step, 0))
        ids.setdefault((step, generation), []).extend(record["ids"])
    return {step: ids[step, generation] for step, generation in sorted(latest.items())}


def count_samples(steps: Mapping[int, list[int]], steps_per_epoch: int) -> SampleCount:
    seen = twice = 0
    epochs: dict[int, list[int]] = {}
    for step, ids in steps.items():
        epochs.setdefault((step - 1) // steps_per_epoch, []).extend(ids)
    for ids in epochs.values():
        seen += len(set(ids))
        twice += len(ids) - len(set(ids))
    return SampleCount(seen, twice)


def read_samples(output_dir: Path) -> list[dict[str, Any]]:
    folder = output_dir / "ftlaunch" / "samples"
    return [record for path in sorted(folder.glob("*.jsonl")) for record in read_json_lines(path)]


@dataclass
class Progress:
    """Running figures of this start. Times are seconds on the supervisor's monotonic clock."""

    started_at_s: float
    best_step: int = 0
    max_steps: int | None = None
    steps_per_epoch: int | None = None
    steps_done: int = 0
    faults: list[str] = field(default_factory=list)
    productive_s: float = 0.0
    first_loss: float | None = None
    last_loss: float | None = None
    evaluations: dict[int, float] = field(default_factory=dict)
    answers: dict[str, list[tuple[str, str]]] = field(default_factory=dict)
    _last_step_at_s: float | None = None
    _recent_s: deque[float] = field(default_factory=lambda: deque(maxlen=20))

    def attempt_begins(self) -> None:
        self._last_step_at_s = None

    def step(self, step: int, now_s: float) -> None:
        """Rank 0 has finished `step`. Only steps that were not done before count as productive."""
        self.steps_done += 1
        if self._last_step_at_s is not None:
            self._recent_s.append(now_s - self._last_step_at_s)
        if step > self.best_step:
            if self._last_step_at_s is not None:
                self.productive_s += now_s - self._last_step_at_s
            self.best_step = step
        self._last_step_at_s = now_s

    def log(self, loss: float) -> None:
        self.first_loss = loss if self.first_loss is None else self.first_loss
        self.last_loss = loss

    def seconds_per_step(self) -> float | None:
        """Mean over the recent steps; None before the second step of an attempt."""
        return sum(self._recent_s) / len(self._recent_s) if self._recent_s else None

    def redone(self, started_at_step: int) -> int:
        """Steps that had to be done again because of faults in this start."""
        return max(0, self.steps_done - (self.best_step - started_at_step))

    def goodput(self, now_s: float) -> float:
        """Share of the wall time since the start in which new steps were made, 0 to 1."""
        elapsed_s = now_s - self.started_at_s
        return round(self.productive_s / elapsed_s, 4) if elapsed_s > 0 else 0.0
