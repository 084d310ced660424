"""What arrives from other nodes: sets of snapshots, one of each rank of the sending node, over several connections.

Invariants: a set is handed over whole or not at all; what has been handed over is never written to again (each snapshot
lies in memory of its own, which the agent owns from then on); of one node only one set arrives at a time, so that its
memory is at most that of the last whole one and this one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from launcher.checkpoint.snapshot import SnapshotIdentity
from launcher.courier.messages import Cause, Failed
from launcher.courier.wire import close_all


@dataclass
class ArrivingSet:
    """`source`: the node that sends. `sending`: what tells two sendings of one step apart."""

    source: str
    sending: str
    expected: frozenset[SnapshotIdentity]
    fds: dict[SnapshotIdentity, int] = field(default_factory=dict)
    interrupts: list[Callable[[], None]] = field(default_factory=list)
    num_connections: int = 0  # that may still bring some of it
    over: bool = False  # handed over, or given up

    @property
    def moment(self) -> tuple[int, int]:
        return max((identity.generation, identity.step) for identity in self.expected)


class Intake:
    """For all connections; each from a thread of its own. `hand_over(source, snapshots)`: until the agent has them;
    raises Failed where it does not take them. The descriptors are closed afterwards."""

    def __init__(self, hand_over: Callable[[str, Sequence[tuple[SnapshotIdentity, int]]], None]) -> None:
        self._hand_over = hand_over
        self._arriving: dict[str, ArrivingSet] = {}
        self._turn = threading.Lock()

    def join(
        self, source: str, sending: str, expected: frozenset[SnapshotIdentity], interrupt: Callable[[], None]
    ) -> ArrivingSet:
        """The set that a connection belongs to; one of an earlier sending of this node is given up.

        `interrupt`: called when the set is given up. Raises Failed where a newer one is arriving.
        """
        with self._turn:
            arriving = self._arriving.get(source)
            if arriving is None or (arriving.sending, arriving.expected) != (sending, expected):
                new = ArrivingSet(source, sending, expected)
                if arriving is not None and arriving.moment > new.moment:
                    raise Failed(Cause.NETWORK, f"a newer step of {source} is arriving")
                self._drop(arriving)
                arriving = self._arriving[source] = new
            arriving.interrupts.append(interrupt)
            arriving.num_connections += 1
            return arriving

    def add(self, arriving: ArrivingSet, identity: SnapshotIdentity, fd: int) -> None:
        """A whole snapshot, whose descriptor belongs to the set from now on. The last one waits until the agent has all
        of them. Raises Failed; then the set is given up."""
        with self._turn:
            if arriving.over or identity in arriving.fds:
                close_all([fd])
                raise Failed(Cause.NETWORK, f"the set that {arriving.source} sends is not wanted any more")
            arriving.fds[identity] = fd
            if arriving.fds.keys() != arriving.expected:
                return
            arriving.over = True
            if self._arriving.get(arriving.source) is arriving:
                del self._arriving[arriving.source]
        try:
            self._hand_over(arriving.source, sorted(arriving.fds.items(), key=lambda item: item[0].rank))
        finally:
            close_all(arriving.fds.values())

    def leave(self, arriving: ArrivingSet, *, failed: bool) -> None:
        """A connection has ended. A set that it leaves unfinished, with no other to wait for, is given up."""
        with self._turn:
            arriving.num_connections -= 1
            if failed or arriving.num_connections == 0:
                self._drop(arriving)

    def _drop(self, arriving: ArrivingSet | None) -> None:
        if arriving is None or arriving.over:
            return
        arriving.over = True
        if self._arriving.get(arriving.source) is arriving:
            del self._arriving[arriving.source]
        close_all(arriving.fds.values())
        for interrupt in arriving.interrupts:
            interrupt()
