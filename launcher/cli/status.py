"""`ftlaunch status OUTPUT_DIR`: where a run stands, live or afterwards, read from its own records. Changes nothing."""

from __future__ import annotations

import argparse
import fcntl
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from launcher.agent.events import read_json_lines
from launcher.errors import UserError


@dataclass(frozen=True)
class Status:
    """`state`: "running", "ended", or "gone" (it ended without a word: the machine was lost, or the agent was
    killed)."""

    state: str  # also "unknown": no end was recorded, and the file system has no locks that would tell
    run_id: str | None = None
    holder: str | None = None
    generation: int = 0
    step: int = 0
    saved_step: int | None = None
    faults: tuple[str, ...] = ()
    last_event: str | None = None
    last_event_at: str | None = None
    exit_code: int | None = None
    reason: str | None = None
    goodput: float | None = None


def main(options: argparse.Namespace) -> int:
    if len(options.paths) != 1:
        raise UserError("status: give one output folder: ftlaunch status OUTPUT_DIR")
    output_dir = options.paths[0]
    files = sorted((output_dir / "ftlaunch" / "events").glob("*.jsonl"))
    if not files:
        raise UserError(f"status: {output_dir} holds no run of ftlaunch (no ftlaunch/events/)")
    events = sorted((event for path in files for event in read_json_lines(path)), key=lambda event: str(event.get("t")))
    status = summarise(events, holder=lock_holder(output_dir), step=latest_step(output_dir))
    print(
        json.dumps({"v": 1, **asdict(status)}, ensure_ascii=False, indent=2)
        if options.json
        else "\n".join(render(status))
    )
    return 0


UNKNOWN_HOLDER = "unknown: this file system has no locks"


def lock_holder(output_dir: Path) -> str | None:
    """Who holds the run's lock now; None when nobody does; `UNKNOWN_HOLDER` where that cannot be told."""
    try:
        with (output_dir / "ftlaunch" / "lock").open("rb") as stream:
            try:
                fcntl.flock(stream, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return stream.read(200).decode("utf-8", "replace").strip() or "unknown process"
            except OSError:
                return UNKNOWN_HOLDER
            return None
    except FileNotFoundError:
        return None


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


def summarise(events: Iterable[Mapping[str, Any]], *, holder: str | None, step: int) -> Status:
    """The latest start counts for state, faults and end; checkpoints count over all starts."""
    run_id: str | None = None
    generation, saved = 0, None
    faults: list[str] = []
    ended: Mapping[str, Any] = {}
    last: Mapping[str, Any] = {}
    for event in events:
        last = event
        name = event.get("event")
        if name == "run_started":
            run_id, faults, ended = event.get("run_id"), [], {}
        elif name == "generation_started":
            generation = int(event.get("gen", 0))
        elif name == "checkpoint_saved":
            saved = event.get("step")
        elif name == "incident":
            faults.append(str(event.get("class")))
        elif name == "run_ended":
            ended = event
    if holder == UNKNOWN_HOLDER:
        state = "ended" if ended else "unknown"
    else:
        state = "running" if holder else ("ended" if ended else "gone")
    return Status(
        state=state,
        run_id=run_id,
        holder=holder,
        generation=generation,
        step=step,
        saved_step=saved,
        faults=tuple(faults),
        last_event=last.get("event"),
        last_event_at=last.get("t"),
        exit_code=ended.get("exit_code"),
        reason=ended.get("reason"),
        goodput=ended.get("goodput"),
    )


def render(status: Status) -> Iterator[str]:
    words = {
        "running": f"running ({status.holder})",
        "ended": f"ended with exit code {status.exit_code}: {status.reason}",
        "unknown": "running or lost: no end is recorded and this file system has no locks; see the last event's time",
        "gone": "ended without a word: its machine was lost or its agent was killed; the same command continues it",
    }
    yield f"state       {words[status.state]}"
    yield f"run         {status.run_id}, attempt {status.generation}"
    yield f"step        {status.step}, saved up to {status.saved_step if status.saved_step is not None else 'nothing'}"
    yield f"faults      {', '.join(status.faults) if status.faults else 'none'} (since the latest start)"
    yield f"last event  {status.last_event} at {status.last_event_at}"
    if status.goodput is not None:
        yield f"goodput     {status.goodput:.0%} of the time went into new steps"
