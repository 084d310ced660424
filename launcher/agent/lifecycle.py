"""The life of one generation as a pure state machine: events in, actions out. No clock, no process, no socket in here.

States: ranks start, train, and end in one of four ways (`Ending`). Two things can come from outside: a rank's exit and
the wish to stop. The machine decides who is told what and when the whole group is killed; the supervisor only carries
it out.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from launcher.link import Message


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


class Ending(Enum):
    """Of this node's ranks."""

    FINISHED = "finished"  # every rank reached the planned end
    STOPPED = "stopped"  # every rank saved at the agreed step and left
    ABANDONED = "abandoned"  # asked to stop, ended without an agreed save
    FAILED = "failed"  # a rank ended in a way that nobody asked for
    WITHDRAWN = "withdrawn"  # killed because the generation is over on other nodes


@dataclass(frozen=True)
class RankExit:
    """Exit code or signal, one of them None; `at_s` on the supervisor's monotonic clock."""

    code: int | None
    signal: int | None
    at_s: float
    killed_by_us: bool = False

    @property
    def clean(self) -> bool:
        return self.code == 0


@dataclass
class RankView:
    """What the agent knows of one rank."""

    rank: int
    step: int = 0
    stepped: bool = False  # has finished an optimizer step in this generation
    phase: str = "starting"
    has_trained: bool = False  # it has come to its first step, if not through it
    finished: bool = False
    stopped_at: int | None = None
    exit: RankExit | None = None
    last_words: str = ""  # the end of its traceback, which its log has as well, unless the disk is full


@dataclass(frozen=True)
class Tell:
    """Send this message to all ranks that still run."""

    kind: str
    fields: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class KillGroup:
    reason: str


@dataclass(frozen=True)
class Bound:
    """Call `on_bound(name)` after this many seconds, unless the generation has ended by then."""

    name: str
    seconds: float


@dataclass(frozen=True)
class StopAsked:
    """A stop signal has reached a rank: all nodes have to agree on what follows."""

    source: str


@dataclass(frozen=True)
class WaitsAt:
    """A rank waits at the end of this step, to be told at which one to save: all nodes have to agree on it."""

    step: int


Action = Tell | KillGroup | Bound | StopAsked | WaitsAt

SETTLE_AFTER_ERROR_S = 0.5  # the others' own tracebacks are evidence: which exception came first, and on which ranks
SETTLE_AFTER_SIGNAL_S = 0.0  # a killed rank leaves the others in a collective, where they have nothing to add
# A process that outlives SIGKILL this long hangs in a driver or on a dead file system; freeing hundreds of GiB of
# pinned memory takes tens of seconds, too.
KILLED_WITHIN_S = 120.0


class Lifecycle:
    """One generation's ranks on this node, `ranks` being their global numbers.

    `alone`: no other node takes part, so stop and agreed save are decided here. Otherwise `StopAsked` and `WaitsAt` say
    what the nodes have to agree on, and `prepare_save`, `agree_on_save`, `withdraw` what they have agreed on.
    """

    def __init__(self, ranks: range, *, grace_s: float, alone: bool = True) -> None:
        self.ranks = {rank: RankView(rank) for rank in ranks}
        self._alone = alone
        self._withdrawn = False
        self.first_failure: RankView | None = None
        self.stop_source: str | None = None
        self.save_at: int | None = None
        self._grace_s = grace_s
        self.undead: tuple[int, ...] = ()  # ranks that did not die of SIGKILL: stuck in the kernel
        self._killing = False
        self._num_agent_signals = 0
        self._failed_before_stop = False

    # -- events --------------------------------------------------------------------------------------------------------

    def on_message(self, rank: int, message: Message) -> Sequence[Action]:
        view = self.ranks[rank]
        kind = message["kind"]
        if kind == "step":
            view.step, view.stepped, view.phase = int(message["step"]), True, "training"
        elif kind == "phase":
            view.phase = str(message["name"])
            view.has_trained = view.has_trained or view.phase == "training"
        elif kind == "finished":
            view.finished = True
        elif kind == "stopped":
            view.stopped_at = int(message["step"])
        elif kind == "last_words":
            view.last_words = str(message["text"])
        elif kind == "at_step" and self.save_at is None and self.stop_source is not None:
            # The first rank that waits at step k: no rank can finish step k + 1 before it goes on.
            step = int(message["step"])
            return self.agree_on_save(step + 1) if self._alone else [WaitsAt(step)]
        elif kind == "signal":
            source = f"{signal_name(message['signal'])} to rank {rank}"
            return self.on_stop_request(source, to_agent=False) if self._alone else [StopAsked(source)]
        return []

    def on_exit(self, rank: int, exit_: RankExit) -> Sequence[Action]:
        view = self.ranks[rank]
        view.exit = exit_
        as_asked = exit_.clean and (view.finished or view.stopped_at is not None)
        if as_asked or self._killing:
            return []
        if self.first_failure is None:
            self.first_failure = view
            # With other nodes a save is no end: a node joins or leaves, and the run goes on.
            self._failed_before_stop = self.stop_source is None or not self._alone
        if self.stop_source is not None:
            return self._kill(f"rank {rank} ended while the run was stopping")
        settle_s = SETTLE_AFTER_SIGNAL_S if exit_.signal is not None else SETTLE_AFTER_ERROR_S
        return [Bound("settled", settle_s)] if settle_s else self._kill(f"rank {rank} was killed")

    def on_stop_request(self, source: str, *, to_agent: bool = True) -> Sequence[Action]:
        """First time: agree on a save when training runs, else end. A second signal to the agent: end at once.

        A signal that reached a rank (Slurm and process groups send it to everybody) never counts as the second one.
        """
        self._num_agent_signals += to_agent
        if self.stop_source is not None:
            return self._kill("asked to stop a second time") if self._num_agent_signals > 1 else []
        self.stop_source = source
        if not self.stepped:
            return self._kill("asked to stop before the first step of this attempt")
        return [Tell("prepare_save"), Bound("grace", self._grace_s)]

    def prepare_save(self, source: str) -> Sequence[Action]:
        """The nodes want to agree on a save, after which the ranks leave."""
        if self.stop_source is not None:
            return []
        self.stop_source = source
        return [Tell("prepare_save")]

    def agree_on_save(self, step: int) -> Sequence[Action]:
        if self.save_at is not None:
            return []
        self.save_at = step
        return [Tell("save_at", {"step": step})]

    def on_hang(self, rank: int) -> Sequence[Action]:
        """Nothing moves any more. `rank`: the one that is behind, or any where none is."""
        if self._killing or self.first_failure is not None:
            return []
        self.first_failure = self.ranks[rank]
        self._failed_before_stop = self.stop_source is None or not self._alone
        return self._kill(f"rank {rank} hangs")

    def withdraw(self, reason: str) -> Sequence[Action]:
        """The generation is over for this node, whatever its ranks do."""
        self._withdrawn = True
        return self._kill(reason)

    def on_bound(self, name: str) -> Sequence[Action]:
        if name == "killed":
            self.undead = tuple(view.rank for view in self.ranks.values() if view.exit is None)
            return []
        if name == "settled":
            return self._kill("a rank has failed")
        return self._kill(f"the save did not end within spot.grace_seconds ({self._grace_s:g} s)")

    # -- answers -------------------------------------------------------------------------------------------------------

    @property
    def over(self) -> bool:
        return all(view.exit is not None for view in self.ranks.values())

    @property
    def killing(self) -> bool:
        return self._killing

    @property
    def reached_step(self) -> int:
        return max(view.step for view in self.ranks.values())

    @property
    def stepped(self) -> bool:
        """Whether a rank of this node has finished an optimizer step in this generation."""
        return any(view.stepped for view in self.ranks.values())

    @property
    def trained(self) -> bool:
        """Whether a rank of this node has begun to train in this generation."""
        return any(view.has_trained for view in self.ranks.values())

    def ending(self) -> Ending:
        """Only meaningful once `over`."""
        views = self.ranks.values()
        if all(view.finished and view.exit is not None and view.exit.clean for view in views):
            return Ending.FINISHED
        if self._withdrawn and self.first_failure is None:
            return Ending.WITHDRAWN
        if self.stop_source is None or self._failed_before_stop:
            return Ending.FAILED
        clean = all(view.stopped_at is not None and view.exit is not None and view.exit.clean for view in views)
        return Ending.STOPPED if clean else Ending.ABANDONED

    def _kill(self, reason: str) -> Sequence[Action]:
        if self._killing:
            return []
        self._killing = True
        return [KillGroup(reason), Bound("killed", KILLED_WITHIN_S)]
