"""What earlier starts of this run, and the other nodes of this one, have left in the event stream."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from launcher.agent.events import read_json_lines
from launcher.checkpoint.commit import highest_staged
from launcher.policy.save_interval import FailureHistory


@dataclass(frozen=True)
class Past:
    """`run_id` is empty for a new run; `fired_drills` are the numbers of the drills that have been carried out.

    `last_generation`: the highest number that an event or a staging folder tells of; either may be lost with a machine.
    """

    run_id: str
    last_generation: int
    fired_drills: frozenset[int]


def read_past(output_dir: Path) -> Past:
    run_id, generation, fired = "", highest_staged(output_dir), set()
    for path in sorted((output_dir / "ftlaunch" / "events").glob("*.jsonl")):
        for event in read_json_lines(path):
            if event.get("event") == "generation_started":
                generation = max(generation, int(event.get("gen", 0)))
            if event.get("event") == "run_started":
                run_id = run_id or str(event["run_id"])
            if event.get("event") == "drill":
                fired.add(int(event["number"]))
    return Past(run_id, generation, frozenset(fired))


def read_failures(output_dir: Path) -> FailureHistory:
    """Faults and preemptions of all generations that have ended, and the time in which all have trained.

    A generation counts once, however many nodes saw it fail: by an incident that a restart may mend, a notice, a lost
    node, or because its start was killed without another word. It has trained from its first step until the last event
    of the node that wrote most of it: events are rare, so where an agent was killed this is too short, which errs
    towards saving often. Read it after this start's own `run_started`: what stands before one without a `run_ended` was
    killed.
    """
    generations: dict[int, _Generation] = {}
    for path in sorted((output_dir / "ftlaunch" / "events").glob("*.jsonl")):
        _read_node(path, generations)
    trained = [generation for generation in generations.values() if generation.trained_s is not None]
    return FailureHistory(
        num_faults=sum(generation.interrupted for generation in trained),
        trained_s=sum(generation.trained_s or 0.0 for generation in trained),
    )


@dataclass
class _Generation:
    trained_s: float | None = None  # None: no step was made
    interrupted: bool = False


def _read_node(path: Path, generations: dict[int, _Generation]) -> None:
    """One node's events, in the order in which it wrote them."""
    first_step_at: datetime | None = None
    current = _Generation()
    ended = True  # whether the node has said how the start came to its end
    for event in read_json_lines(path):
        name, at = event.get("event"), _time_of(event)
        if name == "run_started" and not ended:
            current.interrupted = True  # killed, or lost with its machine
        if name == "generation_started":
            if str(event.get("reason", "")).startswith("lost "):
                current.interrupted = True
            current, first_step_at = generations.setdefault(int(event["gen"]), _Generation()), None
        if name in ("run_started", "run_ended"):
            ended = name == "run_ended"
        if name == "notice" or (name == "incident" and event.get("retryable")):
            current.interrupted = True
        if name == "first_step":
            first_step_at = at
        if first_step_at is not None and at is not None and name != "run_started":
            current.trained_s = max(current.trained_s or 0.0, (at - first_step_at).total_seconds())
        if name == "run_started":
            current, first_step_at = _Generation(), None


def _time_of(event: dict[str, Any]) -> datetime | None:
    try:
        return datetime.strptime(str(event.get("t")), "%Y-%m-%dT%H:%M:%S.%fZ")
    except ValueError:
        return None
