"""Who trains together with this node, as the supervisor sees it: turn after turn, until the run is over.

`Alone` is a run on one node; `ClusterCrew` (`cluster_crew.py`) one of several, where membership decides.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from launcher.agent.peer_tier import Place
from launcher.cluster.messages import WrittenFile
from launcher.errors import ExitCode
from launcher.progress_record import RankProgress


@dataclass(frozen=True)
class Seat:
    """A node's place in a generation."""

    name: str
    ip: str
    num_ranks: int


@dataclass(frozen=True)
class Turn:
    """One generation, as this node takes part in it. The first seat leads: it has rank 0 and the store.

    master_port: None where this node may choose a free one.
    """

    number: int
    reason: str
    seats: tuple[Seat, ...]
    index: int
    master_port: int | None = None

    @property
    def mine(self) -> Seat:
        return self.seats[self.index]

    @property
    def leads(self) -> bool:
        return self.index == 0

    @property
    def master_addr(self) -> str:
        return self.seats[0].ip

    @property
    def num_nodes(self) -> int:
        return len(self.seats)

    @property
    def world_size(self) -> int:
        return sum(seat.num_ranks for seat in self.seats)

    @property
    def ranks(self) -> range:
        """Global numbers of this node's ranks."""
        first = sum(seat.num_ranks for seat in self.seats[: self.index])
        return range(first, first + self.mine.num_ranks)


@dataclass(frozen=True)
class Orders:
    """What the ranks of a turn are told: the same on every node. `spec` is a `RankSpec` as JSON."""

    spec: str
    resume_step: int


@dataclass(frozen=True)
class RunOver:
    exit_code: ExitCode
    reason: str


class Ranks(Protocol):
    """What a crew may ask of the supervisor, about the ranks of the turn that it has taken."""

    @property
    def have_stepped(self) -> bool:
        """Whether one has finished an optimizer step in this turn."""

    def withdraw(self, reason: str) -> None:
        """End them now; the supervisor says `ranks_gone` when they are."""

    def prepare_save(self, reason: str) -> bool:
        """Make each wait at the end of its step; False where not all have been started yet."""

    def agree_on_save(self, step: int) -> None: ...

    def publish(self, step: int, files: Sequence[WrittenFile]) -> None:
        """On the leader: every node has written its part of the checkpoint of `step`. Answered by `Crew.published`."""

    def save_settled(self, step: int, error: str) -> None:
        """The checkpoint of `step` has its name; or it will not get it, and why."""

    def hung(self, ranks: Sequence[RankProgress]) -> None:
        """These are the ranks of all nodes, and all stand still."""


class Crew(Protocol):
    """The supervisor takes a turn and tells how it went: `failed`, `give_up`, `finished`, `saved` or `abandoned`."""

    alone: bool
    peer_place: Callable[[str], Place] | None  # of a run id; None where nodes do not keep each other's snapshots

    def next_turn(self) -> Turn | RunOver:
        """Waits until there is one, handling what happens."""

    def orders(self, turn: Turn, prepare: Callable[[], Orders]) -> Orders | None:
        """Of the leader, who makes them with `prepare`. None when the turn is over meanwhile."""

    def withdrawn(self, turn: Turn) -> bool:
        """Whether the turn is over for this node, whatever its ranks do."""

    def over(self) -> bool:
        """Whether the run is over: `next_turn` would say so."""

    def goes_on(self, turn: Turn) -> bool:
        """Whether the turn's generation is still the one that counts, though this node's ranks may be gone."""

    def may_commit(self, turn: Turn) -> str:
        """Empty where a checkpoint of this turn may be committed; else why not."""

    def waits_at(self, step: int) -> None:
        """A rank of this node waits at the end of `step` to be told where to save."""

    def part_written(self, turn: Turn, step: int, files: Sequence[WrittenFile], error: str) -> None:
        """This node's files of the checkpoint of `step` are in the output folder; or why they are not."""

    def published(self, turn: Turn, step: int, error: str) -> None:
        """What has become of `Ranks.publish`."""

    def leave(self, source: str, *, at_once: bool) -> None:
        """This node has to go. `at_once`: without a save."""

    def ranks_gone(self, turn: Turn) -> None:
        """None of this node's ranks runs any more."""

    def stand_still(self, turn: Turn, ranks: Sequence[RankProgress]) -> None:
        """This node's ranks have, for too long; said at each look. Answered by `Ranks.hung` once all nodes' do."""

    def failed(self, turn: Turn, reason: str) -> None:
        """Ranks have failed, for a reason that is not known yet; the turn is over for all nodes."""

    def give_up(self, turn: Turn, exit_code: ExitCode, reason: str) -> None:
        """No further attempt has a point: the run ends on all nodes."""

    def drop_out(self, exit_code: ExitCode, reason: str) -> None:
        """This node cannot go on; the others may, without it."""

    def will_not_come(self, exit_code: ExitCode, reason: str) -> None:
        """Another node has ended for good, before the first turn."""

    def finished(self, turn: Turn, reason: str) -> None:
        """The planned end; on the leader it has been proven."""

    def saved(self, turn: Turn, step: int | None) -> None:
        """The ranks have saved at the agreed step and left."""

    def abandoned(self, turn: Turn, kept: str) -> None:
        """The ranks ended without an agreed save or a failure of their own. `kept`: what there is to resume."""

    def couriers(self) -> Mapping[str, str]:
        """Addresses of the other nodes' couriers, by name, as far as they are known in this turn."""

    def courier_listens(self, address: str) -> None:
        """This node's courier does. "": it does not."""

    def tick(self) -> None:
        """Called after every wait of the loop."""

    def close(self) -> None: ...


class Alone:
    """A run on one node: the next turn follows the last, until something ends the run."""

    alone = True
    peer_place: Callable[[str], Place] | None = None

    def __init__(self, seat: Seat, *, first: int, master_port: int | None, stop_exit_code: ExitCode) -> None:
        self._seat, self._next, self._master_port = seat, first, master_port
        self._stop_exit_code = stop_exit_code
        self._stop_source = ""
        self._reason = "start"
        self._over: RunOver | None = None
        self._ranks: Ranks | None = None

    def next_turn(self) -> Turn | RunOver:
        if self._over is not None:
            return self._over
        if self._stop_source:
            return self._stopped("nothing was running")
        turn = Turn(self._next, self._reason, (self._seat,), 0, self._master_port)
        # A port of the user's choice serves the first attempt only: a store must never be met again by a later one.
        self._next, self._master_port = self._next + 1, None
        return turn

    def orders(self, turn: Turn, prepare: Callable[[], Orders]) -> Orders | None:
        return prepare()

    def withdrawn(self, turn: Turn) -> bool:
        return False

    def over(self) -> bool:
        return self._over is not None

    def goes_on(self, turn: Turn) -> bool:
        return True

    def may_commit(self, turn: Turn) -> str:
        return ""

    def start(self, ranks: Ranks) -> None:
        self._ranks = ranks

    def waits_at(self, step: int) -> None:
        """`Lifecycle` has decided already."""

    def part_written(self, turn: Turn, step: int, files: Sequence[WrittenFile], error: str) -> None:
        assert self._ranks is not None  # turns are taken after `start`
        if error:
            self._ranks.save_settled(step, error)
        else:
            self._ranks.publish(step, files)

    def published(self, turn: Turn, step: int, error: str) -> None:
        assert self._ranks is not None  # turns are taken after `start`
        self._ranks.save_settled(step, error)

    def stand_still(self, turn: Turn, ranks: Sequence[RankProgress]) -> None:
        assert self._ranks is not None  # turns are taken after `start`
        self._ranks.hung(ranks)

    def leave(self, source: str, *, at_once: bool) -> None:
        self._stop_source = self._stop_source or source

    def ranks_gone(self, turn: Turn) -> None:
        """Nobody waits for it."""

    def failed(self, turn: Turn, reason: str) -> None:
        self._reason = reason

    def give_up(self, turn: Turn, exit_code: ExitCode, reason: str) -> None:
        self._over = RunOver(exit_code, reason)

    def drop_out(self, exit_code: ExitCode, reason: str) -> None:
        self._over = RunOver(exit_code, reason)

    def will_not_come(self, exit_code: ExitCode, reason: str) -> None:
        """There is no other node."""

    def finished(self, turn: Turn, reason: str) -> None:
        self._over = RunOver(ExitCode.FINISHED, reason)

    def saved(self, turn: Turn, step: int | None) -> None:
        self._over = self._stopped(f"all ranks saved at step {step}")

    def abandoned(self, turn: Turn, kept: str) -> None:
        self._over = self._stopped(f"no save at an agreed step; {kept}")

    def couriers(self) -> Mapping[str, str]:
        return {}

    def courier_listens(self, address: str) -> None:
        """There is nobody to tell."""

    def tick(self) -> None:
        """There is nobody to talk to."""

    def close(self) -> None:
        """There is nothing open."""

    def _stopped(self, what: str) -> RunOver:
        reason = f"stopped by {self._stop_source}: {what}; the same command continues the run"
        return RunOver(self._stop_exit_code, reason)
