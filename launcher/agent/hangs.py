"""A standstill that has lasted too long is looked into: who is behind, where every rank is, and whether it has ended by
itself meanwhile. What follows is decided elsewhere.

Invariant: nothing is killed here, and nothing is called a hang that has moved again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from launcher.agent.crew import Turn
from launcher.agent.events import EventLog
from launcher.agent.generation import RankProcess
from launcher.agent.hang_watch import HangWatch, process_state
from launcher.agent.stacks import FlightRecorder, innermost_frames, take_stacks, with_native_frames
from launcher.diagnose.hang import HangEvidence, describe
from launcher.event_loop import EventLoop
from launcher.policy.hang import Finding, HangSeconds, who_is_behind
from launcher.progress_record import RankProgress

_RANKS_OF_AN_EVENT = 16


@dataclass(frozen=True)
class Hang:
    """`is_ours`: the rank that is behind is one of this node; or none is, and this node leads. `stacks`: of this node's
    ranks."""

    finding: Finding
    evidence: HangEvidence
    is_ours: bool
    stacks: Mapping[int, str]

    @property
    def step(self) -> int | None:
        """The last one that the named rank has finished."""
        return self.finding.culprit.step if self.finding.culprit is not None else None


class Hangs:
    def __init__(
        self,
        loop: EventLoop,
        events: EventLog,
        say: Callable[[str], None],
        hang_seconds: HangSeconds,
        logs: Path,
        flight: FlightRecorder | None = None,
    ) -> None:
        """`flight`: where there are GPUs."""
        self.watch = HangWatch(loop, hang_seconds, events.node)
        self._loop, self._events, self._say, self._logs, self._flight = loop, events, say, logs, flight
        self._standing: tuple[RankProgress, ...] = ()
        self._told_of = 0  # generation whose ranks here are known to be victims

    def begin(self, turn: Turn) -> None:
        """Raises OSError where there is no memory for the records."""
        self._standing = ()
        self.watch.begin(turn.ranks)

    def variables(self, generation: int) -> Mapping[str, str]:
        """What ranks need in their environment so that more can be known of them."""
        return self._flight.variables(generation) if self._flight is not None else {}

    def hear(self, ranks: Sequence[RankProgress]) -> None:
        """All ranks of all nodes stand still, for longer than they should."""
        self._standing = tuple(ranks)

    @property
    def are_heard_of(self) -> bool:
        return bool(self._standing)

    def look_into(self, turn: Turn, processes: Sequence[RankProcess]) -> Hang | None:
        """None where it has moved again, or all has been said already. Takes a second or two, in which what happens is
        handled; it is known to be a hang, and recorded, within the first tenths."""
        ranks, self._standing = self._standing, ()
        finding = who_is_behind(ranks)
        culprit = finding.culprit
        is_ours = culprit.rank in turn.ranks if culprit is not None else turn.leads
        if not is_ours and self._told_of == turn.number:
            return None
        pids = {process.rank: process.pid for process in processes if process.exit is None}
        stacks: dict[int, str] = self._loop.aside(partial(take_stacks, pids))
        if self.watch.has_moved():
            self._standing = ()
            self._say("the ranks stood still, and go on: no hang")
            return None
        frames = {rank: frame for rank, text in stacks.items() if (frame := innermost_frames(text))}
        evidence = describe(finding.culprits, finding.waiting, ranks, frames, is_certain=finding.is_certain)
        if is_ours:
            self._record(finding, evidence, ranks)
        else:
            self._told_of = turn.number
            self._say(f"the ranks here wait for another node: {evidence.what}")
        may_pause = {rank: pid for rank, pid in pids.items() if process_state(pid) not in ("T", "t", "")}
        stacks = self._loop.aside(partial(self._look_deeper, turn, stacks, may_pause))
        self._keep(turn, stacks)
        self._standing = ()  # it has been said again meanwhile
        return Hang(finding, evidence, is_ours, stacks)

    def close(self) -> None:
        self.watch.end()
        if self._flight is not None:
            self._flight.close()

    def _look_deeper(self, turn: Turn, stacks: Mapping[int, str], may_pause: Mapping[int, int]) -> dict[int, str]:
        deeper = with_native_frames(stacks, may_pause)
        if self._flight is not None:
            self._flight.ask(turn.ranks)
        return deeper

    def _keep(self, turn: Turn, stacks: Mapping[int, str]) -> None:
        """Beside the logs, on every node: the bundle is written by the one whose rank is behind."""
        folder = self._logs / f"gen-{turn.number}"
        try:
            for rank, text in stacks.items():
                (folder / f"stacks-{rank}.log").write_text(text, "utf-8")
        except OSError as error:
            self._say(f"the stacks could not be written: {error}")

    def _record(self, finding: Finding, evidence: HangEvidence, ranks: Sequence[RankProgress]) -> None:
        culprit = finding.culprit
        still_s = min(rank.still_s for rank in ranks)
        self._events.emit(
            "hang",
            rank=culprit.rank if culprit is not None else None,
            step=culprit.step if culprit is not None else None,
            how=finding.how.value,
            certain=finding.is_certain,
            still_seconds=still_s,
            bound_seconds=round(self.watch.bound_s, 3),
            what=evidence.what,
            ranks=[asdict(rank) for rank in ranks[:_RANKS_OF_AN_EVENT]],
        )
        who = f"rank {culprit.rank} hangs" if culprit is not None else "all ranks hang"
        self._say(f"{who}: nothing has moved for {still_s:.1f} s")
