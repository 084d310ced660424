"""`ftlaunch status OUTPUT_DIR`: where a run stands, live or afterwards, read from its own records. Changes nothing."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from launcher.agent.events import read_json_lines
from launcher.agent.living import agents_of, epoch_of, first_generation, life_of_lock
from launcher.agent.standing import NodeStanding, Standing, in_time, stands_alone, stands_together
from launcher.errors import UserError
from launcher.host.storage import find_mount, why_locks_stay_here


def main(options: argparse.Namespace) -> int:
    if len(options.paths) != 1:
        raise UserError("status: give one output folder: ftlaunch status OUTPUT_DIR")
    standing = look_at(options.paths[0])
    print(
        json.dumps({"v": 1, **asdict(standing)}, ensure_ascii=False, indent=2)
        if options.json
        else "\n".join(render(standing))
    )
    return 0


def look_at(output_dir: Path) -> Standing:
    files = sorted((output_dir / "ftlaunch" / "events").glob("*.jsonl"))
    if not files:
        raise UserError(f"status: {output_dir} holds no run of ftlaunch (no ftlaunch/events/)")
    events: dict[str, list[dict[str, Any]]] = {}
    for path in files:  # on an object mount a node's records are in parts: n0.jsonl, n0.part-0001.jsonl
        of_node = events.setdefault(path.name.partition(".")[0], [])
        of_node += [event for event in read_json_lines(path) if "event" in event]
    everything = in_time(event for of_node in events.values() for event in of_node)
    started: dict[str, Any] = next((dict(e) for e in reversed(everything) if e["event"] == "run_started"), {})
    epoch = epoch_of(output_dir, started)
    step = latest_step(output_dir)
    locks_stay_here = why_locks_stay_here(find_mount(output_dir.resolve()))
    if epoch is None:
        return stands_alone(everything, life_of_lock(output_dir, locks_stay_here), step=step)
    agents = agents_of(output_dir, epoch, locks_stay_here)
    return stands_together(events, agents, first_generation=first_generation(output_dir, epoch), step=step)


def latest_step(output_dir: Path) -> int:
    """The last step that any rank has finished, from the end of each node's sample record."""
    latest = 0
    for path in (output_dir / "ftlaunch" / "samples").glob("*.jsonl"):
        with path.open("rb") as stream:
            stream.seek(0, 2)
            stream.seek(max(0, stream.tell() - 65536))
            for line in stream.read().splitlines():
                try:
                    latest = max(latest, int(json.loads(line)["step"]))
                except (ValueError, KeyError, TypeError):
                    continue  # the first line of the piece is mostly cut
    return latest


def render(standing: Standing) -> Iterator[str]:
    several = bool(standing.nodes)
    ranks = f": {standing.world_size} rank(s) on {', '.join(standing.members)}" if several and standing.members else ""
    saved = standing.saved_step if standing.saved_step is not None else "nothing"
    since = "since the last time that no node was up" if several else "since the latest start"
    yield f"state       {_state(standing)}"
    yield f"run         {standing.run_id}, attempt {standing.generation}{ranks}"
    yield f"step        {standing.step}, saved up to {saved}"
    yield f"faults      {', '.join(standing.faults) if standing.faults else 'none'} ({since})"
    yield f"last event  {standing.last_event} at {standing.last_event_at}"
    if standing.goodput is not None:
        yield f"goodput     {standing.goodput:.0%} of the time went into new steps"
    hosts = {node.name: node.host or "?" for node in standing.nodes}
    name_width, host_width = (max(map(len, names), default=0) for names in (hosts, hosts.values()))
    for index, node in enumerate(standing.nodes):
        row = f"{node.name:{name_width}}  {hosts[node.name]:{host_width}}  {node.state:8}  {_last_word(node)}"
        yield f"{'' if index else 'nodes':12}{row}"


def _state(standing: Standing) -> str:
    nodes = standing.nodes
    match standing.state:
        case "running":
            num_up = sum(node.state in ("training", "waiting") for node in nodes)
            return f"running ({f'{num_up} of {len(nodes)} nodes are up' if nodes else standing.holder})"
        case "ended":
            return f"ended with exit code {standing.exit_code}: {standing.reason}"
        case "gone":
            who = "the machines were lost or the agents were" if nodes else "its machine was lost or its agent was"
            return f"ended without a word: {who} killed; the same command continues it"
        case _:
            why = "locks do not reach other machines" if nodes else "this file system has no locks"
            return f"running or lost: no end is recorded and {why}; see the last event's time"


def _last_word(node: NodeStanding) -> str:
    if node.state == "ended":
        return f"exit code {node.exit_code}: {node.reason}"
    return f"last {node.last_event} at {node.last_event_at}" if node.last_event else "has said nothing yet"
