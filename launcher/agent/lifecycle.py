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
    FINISHED = "finished"  # every rank reached the planned end
    STOPPED = "stopped"  # every rank saved at the agreed step and left
    ABANDONED = "abandoned"  # asked to stop, ended without an agreed save
    FAILED = "failed"  # a rank ended in a way that nobody asked for


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
    finished: bool = False
    stopped_at: int | None = None
    exit: RankExit | None = None


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


Action = Tell | KillGroup | Bound

SETTLE_AFTER_ERROR_S = 1.0  # the others' own tracebacks are evidence: which exception came first, and on which ranks
SETTLE_AFTER_SIGNAL_S = 0.0  # a killed rank leaves the others in a collective, where they have nothing to add
# A process that outlives SIGKILL this long hangs in a driver or on a dead file system; freeing hundreds of GiB of
# pinned
# memory takes tens of seconds, too.
KILLED_WITHIN_S = 120.0


class Lifecycle:
    """One generation with `num_ranks` ranks on this node."""

    def __init__(self, num_ranks: int, *, grace_s: float) -> None:
        self.ranks = [RankView(rank) for rank in range(num_ranks)]
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
        elif kind == "finished":
            view.finished = True
        elif kind == "stopped":
            view.stopped_at = int(message["step"])
        elif kind == "at_step" and self.save_at is None and self.stop_source is not None:
            # The first rank that waits at step k: no rank can finish step k + 1 before it goes on.
            self.save_at = int(message["step"]) + 1
            return [Tell("save_at", {"step": self.save_at})]
        elif kind == "signal":
            return self.on_stop_request(f"{signal_name(message['signal'])} to rank {rank}", to_agent=False)
        return []

    def on_exit(self, rank: int, exit_: RankExit) -> Sequence[Action]:
        view = self.ranks[rank]
        view.exit = exit_
        as_asked = exit_.clean and (view.finished or view.stopped_at is not None)
        if as_asked or self._killing:
            return []
        if self.first_failure is None:
            self.first_failure = view
            self._failed_before_stop = self.stop_source is None
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
        if not any(view.stepped for view in self.ranks):
            return self._kill("asked to stop before the first step of this attempt")
        return [Tell("prepare_save"), Bound("grace", self._grace_s)]

    def on_bound(self, name: str) -> Sequence[Action]:
        if name == "killed":
            self.undead = tuple(view.rank for view in self.ranks if view.exit is None)
            return []
        if name == "settled":
            return self._kill("a rank has failed")
        return self._kill(f"the save did not end within spot.grace_seconds ({self._grace_s:g} s)")

    # -- answers -------------------------------------------------------------------------------------------------------

    @property
    def over(self) -> bool:
        return all(view.exit is not None for view in self.ranks)

    @property
    def killing(self) -> bool:
        return self._killing

    @property
    def reached_step(self) -> int:
        return max(view.step for view in self.ranks)

    def ending(self) -> Ending:
        """Only meaningful once `over`."""
        if all(view.finished and view.exit is not None and view.exit.clean for view in self.ranks):
            return Ending.FINISHED
        if self.stop_source is None or self._failed_before_stop:
            return Ending.FAILED
        clean = all(view.stopped_at is not None and view.exit is not None and view.exit.clean for view in self.ranks)
        return Ending.STOPPED if clean else Ending.ABANDONED

    def _kill(self, reason: str) -> Sequence[Action]:
        if self._killing:
            return []
        self._killing = True
        return [KillGroup(reason), Bound("killed", KILLED_WITHIN_S)]
