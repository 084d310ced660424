"""What earlier starts of this run, and the other nodes of this one, have left in the event stream."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from launcher.agent.events import read_json_lines
from launcher.checkpoint.commit import highest_staged


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
