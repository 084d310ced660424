"""Snapshots on the next node and of the previous one, by way of the courier.

Invariants: what other nodes have sent whole lies in memory of this process, which no courier writes to any more, so it
outlives every courier; of each node the newest `NUM_SETS` whole sets are kept, and one goes only when a newer one is
whole. One set is sent at a time and one waits: of those that wait the newest wins.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass

from launcher.agent.courier_client import CourierClient, Reply
from launcher.agent.resume_folder import HeldSnapshot
from launcher.checkpoint.snapshot import SnapshotIdentity, read_snapshot
from launcher.courier.channel import STALL_S
from launcher.courier.messages import Cause, Failure, identities_from
from launcher.courier.wire import Parcel, close_all

_TIER = "peer"
# When a node is lost the others may be a step behind it, so the last two steps are needed. In a generation's first step
# the newer one of those before it is of a past that was given up: then it takes three.
NUM_SETS = 3


@dataclass(frozen=True)
class Sent:
    """The other node's agent has all of them."""

    num_bytes: int
    seconds: float


@dataclass(frozen=True)
class Fetched:
    """The descriptors are the receiver's."""

    snapshots: tuple[HeldSnapshot, ...]
    seconds: float


@dataclass(frozen=True)
class Place:
    """This node among the others. `host`: an address of it, or 0.0.0.0. `token`: the run's, at least as secret as the
    model. `limit_bytes`: of what one other node may send; 0: none."""

    node: str
    run_id: str
    token: str
    host: str
    port: int = 0
    limit_bytes: int = 0
    stall_s: float = STALL_S


@dataclass(frozen=True)
class _Sending:
    address: str
    snapshots: tuple[tuple[SnapshotIdentity, int], ...]
    on_done: Callable[[Sent | Failure], None]


class PeerTier:
    """On the agent's loop, as its courier is."""

    def __init__(
        self,
        courier: CourierClient,
        place: Place,
        *,
        own: Callable[[], Iterable[HeldSnapshot]],
        on_listening: Callable[[int | Failure], None],
        on_kept: Callable[[str, int], None] = lambda source, step: None,
    ) -> None:
        """`own`: what this node's ranks have now, for nodes that ask. `on_listening`: the port, told again when a new
        courier listens. `on_kept`: a step of another node is whole here."""
        self._courier = courier
        self._place = place
        self._port = place.port
        self._own = own
        self._on_listening = on_listening
        self._on_kept = on_kept
        self._held: dict[str, tuple[HeldSnapshot, ...]] = {}
        self._sending: tuple[int, _Sending] | None = None
        self._waiting: _Sending | None = None
        questions = {"kept": self._keep, "wanted": self._give, "inventory": self._list}
        courier.answer_with(questions, on_replaced=self._listen)
        self._listen()

    # -- what others have sent -----------------------------------------------------------------------------------------

    def inventory(self) -> list[SnapshotIdentity]:
        """Of other nodes' snapshots that are here."""
        return [held.snapshot.identity for held_set in self._held.values() for held in held_set]

    @contextmanager
    def lent(self) -> Iterator[list[HeldSnapshot]]:
        """The snapshots themselves: they stay while the block lasts, whatever arrives meanwhile. Raises OSError where
        no descriptors are to be had."""
        lent: list[HeldSnapshot] = []
        try:
            for held in [held for held_set in self._held.values() for held in held_set]:
                lent.append(HeldSnapshot(held.snapshot, os.dup(held.fd), _TIER))
            yield lent
        finally:
            close_all(held.fd for held in lent)

    def forget_all_but(self, nodes: Collection[str]) -> None:
        """Give back the memory of nodes that do not send to this one any more."""
        for source in self._held.keys() - set(nodes):
            close_all(held.fd for held in self._held.pop(source))

    # -- to and from other nodes ---------------------------------------------------------------------------------------

    def send(
        self,
        address: str,
        snapshots: Sequence[tuple[SnapshotIdentity, int]],
        on_done: Callable[[Sent | Failure], None],
    ) -> None:
        """All snapshots that this node has of one step, to the courier at `address` (host:port).

        The slots must stay as they are until the answer. While another set is on its way this one waits, and one that
        waits already fails as SUPERSEDED. A set on its way to another address is called off.
        """
        sending = _Sending(address, tuple(snapshots), on_done)
        superseded, self._waiting = self._waiting, None
        if superseded is not None:
            failure = Failure(Cause.SUPERSEDED, "a newer step is to be sent")
            self._courier.later(lambda: superseded.on_done(failure))
        if self._sending is not None and self._sending[1].address == address:
            self._waiting = sending
            return
        if self._sending is not None:
            self._courier.cancel(self._sending[0])  # its end is not waited for: that node may be the one that is lost
        self._begin(sending)

    def call_off_sending(self) -> None:
        """What is on its way or waits fails as CANCELLED, unless it is there already."""
        if self._waiting is not None:
            waiting, self._waiting = self._waiting, None
            failure = Failure(Cause.CANCELLED, "the agent has called it off")
            self._courier.later(lambda: waiting.on_done(failure))
        if self._sending is not None:
            self._courier.cancel(self._sending[0])

    def fetch(
        self, address: str, wanted: Sequence[SnapshotIdentity], on_done: Callable[[Fetched | Failure], None]
    ) -> int:
        """Copies of these snapshots, which the node at `address` has of its own ranks or of others. All or none.

        Returns the request's number, for `CourierClient.cancel`.
        """

        def answered(outcome: Parcel | Failure) -> None:
            on_done(outcome if isinstance(outcome, Failure) else _fetched(outcome, wanted))

        return self._courier.ask(
            "fetch", answered, address=address, snapshots=[asdict(identity) for identity in wanted]
        )

    def ask_inventory(self, address: str, on_done: Callable[[list[SnapshotIdentity] | Failure], None]) -> int:
        """Which snapshots the node at `address` could give."""

        def answered(outcome: Parcel | Failure) -> None:
            on_done(outcome if isinstance(outcome, Failure) else identities_from(outcome.message["snapshots"]))

        return self._courier.ask("ask_inventory", answered, address=address)

    def close(self) -> None:
        """Give all memory back. The courier is closed by whoever has opened it."""
        self._waiting = None
        self._courier.answer_with({}, on_replaced=lambda: None)
        self.forget_all_but(())

    def _begin(self, sending: _Sending) -> None:
        def answered(outcome: Parcel | Failure) -> None:
            if self._sending == (number, sending):
                self._sending = None
                waiting, self._waiting = self._waiting, None
                if waiting is not None:
                    self._begin(waiting)
            if isinstance(outcome, Failure):
                sending.on_done(outcome)
            else:
                sending.on_done(Sent(int(outcome.message["num_bytes"]), float(outcome.message["seconds"])))

        number = self._courier.ask(
            "send",
            answered,
            fds=[fd for _, fd in sending.snapshots],
            address=sending.address,
            snapshots=[asdict(identity) for identity, _ in sending.snapshots],
        )
        self._sending = (number, sending)

    def _listen(self) -> None:
        def answered(outcome: Parcel | Failure) -> None:
            if isinstance(outcome, Failure):
                if outcome.cause is not Cause.LOST:  # then the next courier is asked already
                    self._on_listening(outcome)
                return
            self._port = int(outcome.message["port"])  # the next courier gets it again: others know it
            self._on_listening(self._port)

        self._courier.ask("listen", answered, **{**asdict(self._place), "port": self._port})

    # -- what the courier asks -----------------------------------------------------------------------------------------

    def _keep(self, parcel: Parcel) -> Reply:
        source = str(parcel.message["source"])
        if parcel.fds_lost:
            return Reply({"refused": "the limit of open files is reached"})
        arrived = _held(parcel.fds, identities_from(parcel.message["snapshots"]))
        if arrived is None:
            return Reply({"refused": "no descriptors are to be had, or a snapshot is damaged"})
        before = self._held.get(source, ())
        moments = sorted({_moment([held]) for held in before}, reverse=True)
        if moments and moments[0] > _moment(arrived):
            close_all(held.fd for held in arrived)
            return Reply({"refused": "a newer step is held"})
        stay = {moment for moment in moments if moment != _moment(arrived)}
        stay = set(sorted(stay, reverse=True)[: NUM_SETS - 1])
        close_all(held.fd for held in before if _moment([held]) not in stay)
        self._held[source] = (*arrived, *(held for held in before if _moment([held]) in stay))
        self._on_kept(source, arrived[0].snapshot.identity.step)
        return Reply({"refused": ""})

    def _give(self, parcel: Parcel) -> Reply:
        there = {held.snapshot.identity: held.fd for held_set in self._held.values() for held in held_set}
        there |= {held.snapshot.identity: held.fd for held in self._own()}
        wanted = identities_from(parcel.message["snapshots"])
        missing = [f"step {identity.step} of rank {identity.rank}" for identity in wanted if identity not in there]
        if missing:
            return Reply({"missing": ", ".join(missing)})
        return Reply({"missing": ""}, [there[identity] for identity in wanted])

    def _list(self, parcel: Parcel) -> Reply:
        there = {*self.inventory(), *(held.snapshot.identity for held in self._own())}
        return Reply({"snapshots": [asdict(identity) for identity in there]})


def _moment(held_set: Sequence[HeldSnapshot]) -> tuple[int, int]:
    return max((held.snapshot.identity.generation, held.snapshot.identity.step) for held in held_set)


def _held(fds: Sequence[int], identities: Sequence[SnapshotIdentity]) -> tuple[HeldSnapshot, ...] | None:
    """With descriptors of their own; None where one is not what it should be, or no more are to be had."""
    held: list[HeldSnapshot] = []
    try:
        for identity, fd in zip(identities, fds, strict=True):
            snapshot = read_snapshot(fd)
            if snapshot is None or snapshot.identity != identity:
                raise OSError("not the snapshot that was announced")
            held.append(HeldSnapshot(snapshot, os.dup(fd), _TIER))
    except OSError:
        close_all(one.fd for one in held)
        return None
    return tuple(held)


def _fetched(parcel: Parcel, wanted: Sequence[SnapshotIdentity]) -> Fetched | Failure:
    held = None if parcel.fds_lost else _held(parcel.fds, wanted)
    close_all(parcel.fds)
    if held is None:
        return Failure(Cause.LOST, "what was fetched did not reach the agent: the limit of open files is reached")
    return Fetched(held, float(parcel.message["seconds"]))
