"""Where ftlaunch's seconds go between a fault, or the start, and the first step, as its events tell it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from scripts.bench_peers.running import Run

_MARKS = {
    "preflight": "checked",
    "worker_exited": "death seen",
    "decision": "decided",
    "generation_started": "ranks started",
    "resumed": "state loaded",
    "first_step": "first step",
}


def phases_after(run: Run, since: float) -> str:
    return timeline([event for event in run.events() if event["at"] > since], since)


def timeline(events: list[dict[str, Any]], since: float) -> str:
    """`events` in the order of their time `at`; what has happened since, each with its second, to the first step."""
    marks = []
    told = set()
    for event in events:
        name = event["event"]
        text = f"{event['name']} done" if name == "phase" else _MARKS.get(name)
        if text is None or text in told:
            continue
        told.add(text)
        marks.append(f"{text} {event['at'] - since:.2f}")
        if name == "first_step":
            break
    return ", ".join(marks)
