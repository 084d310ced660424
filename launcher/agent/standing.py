"""Where a run stands, from its events and from which of its agents live. Pure; for `ftlaunch status`.

Every start of a node writes `preflight` first, then `run_started`, and `run_ended` last. Attempts are numbered over
all starts, so what belongs to the present epoch of several nodes is known by its attempt, not by anybody's clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from launcher.agent.living import Agent, Life
from launcher.errors import ExitCode

Event = Mapping[str, Any]

_STOPPED = (ExitCode.STOPPED, ExitCode.STOPPED_143)
_RANKS_ARE_GONE = ("worker_exited", "group_killed")


@dataclass(frozen=True)
class NodeStanding:
    """One of several nodes. `state`: "training"; "waiting" (its agent is alive and its ranks are not: it waits for
    others, or is between two attempts); "ended", "gone" or "unknown" as of the run, but for this node alone."""

    name: str
    state: str
    host: str | None
    pid: int | None
    exit_code: int | None
    reason: str | None
    last_event: str | None
    last_event_at: str | None
    faults: tuple[str, ...]


@dataclass(frozen=True)
class Standing:
    """`state`: "running", "ended", or "gone" (it ended without a word: the machines were lost, or the agents were
    killed). `members`: the nodes of the latest attempt. `nodes` is empty for a run on one node."""

    state: str  # also "unknown": no end was recorded, and no locks would tell
    run_id: str | None = None
    holder: str | None = None
    generation: int = 0
    world_size: int | None = None
    members: tuple[str, ...] = ()
    step: int = 0
    saved_step: int | None = None
    faults: tuple[str, ...] = ()
    last_event: str | None = None
    last_event_at: str | None = None
    exit_code: int | None = None
    reason: str | None = None
    goodput: float | None = None
    nodes: tuple[NodeStanding, ...] = ()


def in_time(events: Iterable[Event]) -> list[Event]:
    return sorted(events, key=_time)


def latest_start(events: Sequence[Event]) -> Sequence[Event]:
    """What a node has written since it was started last."""
    begin = 0
    for index, event in enumerate(events):
        before = events[index - 1]["event"] if index else None
        if event["event"] == "preflight" or (event["event"] == "run_started" and before != "preflight"):
            begin = index
    return events[begin:]


def stands_alone(events: Sequence[Event], agent: Agent | None, *, step: int) -> Standing:
    """Of a run on one node; events in time. The latest start counts for state, faults and end; checkpoints count over
    all starts."""
    run_id: str | None = None
    faults: list[str] = []
    ended: Event = {}
    attempt: Event = {}
    for event in events:
        name = event["event"]
        if name == "run_started":
            run_id, faults, ended = event.get("run_id"), [], {}
        elif name == "generation_started":
            attempt = event
        elif name == "incident":
            faults.append(str(event.get("class")))
        elif name == "run_ended":
            ended = event
    life = agent.life if agent else Life.GONE
    running = {Life.ALIVE: "running", Life.UNKNOWN: "unknown", Life.GONE: "gone"}[life]
    last = events[-1] if events else {}
    return Standing(
        state="ended" if ended and life is not Life.ALIVE else running,
        run_id=run_id,
        holder=_holder(agent) if agent else None,
        generation=int(attempt.get("gen", 0)),
        world_size=attempt.get("world_size"),
        members=tuple(attempt.get("nodes", ())),
        step=step,
        saved_step=_saved_step(events),
        faults=tuple(faults),
        last_event=last.get("event"),
        last_event_at=last.get("t"),
        exit_code=ended.get("exit_code"),
        reason=ended.get("reason"),
        goodput=ended.get("goodput"),
    )


def stands_together(
    events: Mapping[str, Sequence[Event]], agents: Sequence[Agent], *, first_generation: int | None, step: int
) -> Standing:
    """Of a run on several nodes. events: each node's own, as it wrote them; agents: those of the epoch.

    first_generation: with which the epoch began; None before there was one.
    """
    everything = in_time(event for of_node in events.values() for event in of_node)
    in_epoch = [e for e in everything if first_generation is not None and int(e.get("gen", 0)) >= first_generation]
    attempts = [event for event in in_epoch if event["event"] == "generation_started"]
    attempt: Event = max(attempts, key=lambda event: int(event["gen"]), default={})
    starts = {agent.node: latest_start(events.get(agent.node, ())) for agent in agents}
    faults = {
        name: tuple(str(e.get("class")) for e in in_epoch if e["event"] == "incident" and e.get("node") == name)
        for name in starts
    }
    state, ended = _state_and_end(agents, starts)
    alive = [agent for agent in agents if agent.life is Life.ALIVE]
    last = everything[-1] if everything else {}
    return Standing(
        state=state,
        run_id=next((e["run_id"] for e in reversed(everything) if e["event"] == "run_started"), None),
        holder="; ".join(f"{agent.node}: {_holder(agent)}" for agent in alive) or None,
        generation=int(attempt.get("gen", 0)),
        world_size=attempt.get("world_size"),
        members=tuple(attempt.get("nodes", ())),
        step=step,
        saved_step=_saved_step(everything),
        faults=tuple(f"{name}: {fault}" for name, of_node in faults.items() for fault in of_node),
        last_event=last.get("event"),
        last_event_at=last.get("t"),
        exit_code=ended.get("exit_code"),
        reason=ended.get("reason"),
        goodput=ended.get("goodput"),
        nodes=tuple(_node(agent, starts[agent.node], attempt, faults[agent.node]) for agent in agents),
    )


def _node(agent: Agent, start: Sequence[Event], attempt: Event, faults: tuple[str, ...]) -> NodeStanding:
    ended = _end_of(start) if agent.life is not Life.ALIVE else {}
    last = start[-1] if start else {}
    if agent.life is Life.ALIVE:
        state = "training" if _ranks_run(start, attempt) else "waiting"
    else:
        state = "ended" if ended else agent.life.value
    return NodeStanding(
        name=agent.node,
        state=state,
        host=agent.host,
        pid=agent.pid if agent.life is Life.ALIVE else None,
        exit_code=ended.get("exit_code"),
        reason=ended.get("reason"),
        last_event=last.get("event"),
        last_event_at=last.get("t"),
        faults=faults,
    )


def _ranks_run(start: Sequence[Event], attempt: Event) -> bool:
    for event in reversed(start):
        if event["event"] in (*_RANKS_ARE_GONE, "run_ended"):
            return False
        if event["event"] == "generation_started":
            return event.get("gen") == attempt.get("gen")
    return False


def _state_and_end(agents: Sequence[Agent], starts: Mapping[str, Sequence[Event]]) -> tuple[str, Event]:
    """One node's end is the run's where it is told to all (the planned end, a fault that stays), or where no other has
    said anything since: one that had to leave, or was not let in, ends by itself."""
    if any(agent.life is Life.ALIVE for agent in agents):
        return "running", {}
    ends = {name: _end_of(start) for name, start in starts.items()}
    told_to_all = [end for name, end in ends.items() if end and _is_told_to_all(end, starts[name])]
    if told_to_all:
        return "ended", max(told_to_all, key=_time)
    if any(agent.life is Life.UNKNOWN and not ends[agent.node] for agent in agents):
        return "unknown", {}
    took_part = [s for s in starts.values() if s and (_has_trained(s) or _end_of(s).get("exit_code") in _STOPPED)]
    last_word = max(took_part or [s for s in starts.values() if s], key=lambda start: _time(start[-1]), default=())
    ended = _end_of(last_word)
    return ("ended" if ended else "gone"), ended


def _is_told_to_all(end: Event, start: Sequence[Event]) -> bool:
    code = end.get("exit_code")
    return code == ExitCode.FINISHED or (code not in _STOPPED and _has_trained(start))


def _has_trained(start: Sequence[Event]) -> bool:
    return any(event["event"] == "generation_started" for event in start)


def _end_of(start: Sequence[Event]) -> Event:
    return next((event for event in reversed(start) if event["event"] == "run_ended"), {})


def _saved_step(events: Sequence[Event]) -> int | None:
    return next((event.get("step") for event in reversed(events) if event["event"] == "checkpoint_saved"), None)


def _holder(agent: Agent) -> str | None:
    """Of a lock: who has it now."""
    match agent.life:
        case Life.ALIVE:
            return agent.holder or "unknown process"
        case Life.UNKNOWN:
            return "unknown: this file system has no locks"
        case Life.GONE:
            return None


def _time(event: Event) -> str:
    return str(event.get("t"))
