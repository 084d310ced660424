"""The courier among those of the other nodes: takes in what the previous node sends, sends to the next one, gives out
what is asked for.

Invariants: a connection that has not shown the run's token within `INTRODUCE_S` is closed, and there are few of them;
each connection has a thread of its own, so one that stalls holds up nothing else; a sender hears of success only
when this node's agent has the snapshots.
"""

from __future__ import annotations

import secrets
import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from launcher.checkpoint.snapshot import Snapshot, SnapshotIdentity
from launcher.courier.channel import Channel, Secret
from launcher.courier.intake import Intake
from launcher.courier.job import Job
from launcher.courier.messages import Cause, Failed, identities_from
from launcher.courier.passage import receive_snapshot, send_snapshot
from launcher.courier.slots import expected_snapshot
from launcher.courier.wire import Parcel, close_all

INTRODUCE_S = 10.0
CONNECT_S = 5.0
AGENT_WAIT_S = 15.0  # shorter than `channel.STALL_S`: the other node waits meanwhile
NUM_STREAMS = 4  # a stream makes and checks seals with one core at each end
_MAX_STRANGERS = 16
_ACCEPT_AGAIN_S = 0.1
_MAX_NOTICES = 100

Numbered = tuple[SnapshotIdentity, int]


class AskAgent(Protocol):
    def __call__(self, kind: str, timeout_s: float, fds: Sequence[int] = (), **fields: Any) -> Parcel | None: ...


@dataclass(frozen=True)
class Membership:
    """`node`: this node's name, under which others keep what it sends. `limit_bytes`: of what one other node may send;
    0: none."""

    node: str
    run_id: str
    secret: Secret
    limit_bytes: int
    stall_s: float


class Peers:
    def __init__(self, ask: AskAgent, notice: Callable[[str], None]) -> None:
        self._ask = ask
        self._notice = notice
        self._noticed: set[str] = set()
        self._intake = Intake(self._hand_over)
        self._strangers: dict[socket.socket, None] = {}  # connected, not introduced yet; oldest first
        self._turn = threading.Lock()
        self._listening: socket.socket | None = None
        self._membership: Membership | None = None

    def listen(self, membership: Membership, host: str, port: int) -> int:
        """The port: `port` if it is free, else another. Raises Failed where `host` is not an address of this node."""
        if self._listening is not None:
            # shutdown wakes the thread that accepts; close alone would leave it waiting, and the port taken.
            self._listening.shutdown(socket.SHUT_RDWR)
            self._listening.close()
        self._membership = membership
        try:
            try:
                self._listening = socket.create_server((host, port), backlog=64)
            except OSError:
                if port == 0:
                    raise
                self._listening = socket.create_server((host, 0), backlog=64)
        except OSError as error:
            raise Failed(Cause.NETWORK, f"the courier cannot listen at {host}: {error.strerror}") from error
        server = self._listening
        threading.Thread(target=self._accept, args=(server, membership), name="accept", daemon=True).start()
        return int(server.getsockname()[1])

    # -- to other nodes ------------------------------------------------------------------------------------------------

    def send(self, address: str, expected: Sequence[SnapshotIdentity], fds: Sequence[int], job: Job) -> dict[str, Any]:
        """Returns once the other node's agent has all of them. Raises Failed."""
        snapshots = [(expected_snapshot(fd, identity), fd) for identity, fd in zip(expected, fds, strict=True)]
        job.bytes_total = sum(snapshot.num_bytes for snapshot, _ in snapshots)
        membership = self._joined()
        asked = {
            "op": "keep",
            "source": membership.node,
            "sending": secrets.token_hex(8),
            "set": [asdict(identity) for identity in expected],
            "num_bytes": job.bytes_total,
        }

        def send_share(channel: Channel, share: list[tuple[Snapshot, int]]) -> None:
            for snapshot, fd in share:
                send_snapshot(channel, fd, snapshot, job.add_bytes)
                _require_yes(channel)

        with ExitStack() as connections:
            # All before the first byte: while there is one, the other end waits for the rest of the set.
            streams = []
            for share in _shares(snapshots, lambda item: item[0].num_bytes):
                channel = connections.enter_context(closing(self._connect(address, membership, job)))
                channel.send(**asked, snapshots=[asdict(snapshot.identity) for snapshot, _ in share])
                _require_yes(channel)
                streams.append((channel, share))
            _in_parallel(send_share, streams, job)
        return {"num_bytes": job.bytes_total}

    def fetch(self, address: str, wanted: Sequence[SnapshotIdentity], job: Job) -> dict[str, Any]:
        """`job.fds`: in the order of `wanted`. Raises Failed, and OSError where the memory is not to be had."""
        membership = self._joined()
        fds: dict[SnapshotIdentity, int] = {}

        def fetch_share(channel: Channel, share: list[SnapshotIdentity]) -> None:
            for identity in share:
                fds[identity] = receive_snapshot(channel, identity, job.bytes_total, job.add_bytes)

        try:
            with ExitStack() as connections:
                streams = []
                for share in _shares(list(wanted), lambda _: 1):
                    channel = connections.enter_context(closing(self._connect(address, membership, job)))
                    channel.send(op="fetch", snapshots=[asdict(identity) for identity in share])
                    job.bytes_total += int(_require_yes(channel)["num_bytes"])
                    streams.append((channel, share))
                _in_parallel(fetch_share, streams, job)
        except BaseException:
            close_all(fds.values())
            raise
        job.fds = [fds[identity] for identity in wanted]
        return {"num_bytes": job.bytes_total}

    def inventory(self, address: str, job: Job) -> dict[str, Any]:
        """What the other node could give. Raises Failed."""
        with closing(self._connect(address, self._joined(), job)) as channel:
            channel.send(op="inventory")
            return {"snapshots": _require_yes(channel)["snapshots"]}

    def _connect(self, address: str, membership: Membership, job: Job) -> Channel:
        host, _, port = address.rpartition(":")
        try:
            connection = socket.create_connection((host, int(port)), timeout=CONNECT_S)
        except (OSError, ValueError) as error:
            raise Failed(Cause.NETWORK, f"no connection to the courier at {address}: {error}") from error
        try:
            channel = Channel(
                connection,
                membership.secret,
                f"the courier at {address}",
                connects=True,
                within_s=INTRODUCE_S + AGENT_WAIT_S,
                stall_s=membership.stall_s,
            )
        except BaseException:
            connection.close()
            raise
        job.on_interrupt(channel.interrupt)
        return channel

    def _joined(self) -> Membership:
        if self._membership is None:
            raise Failed(Cause.DEFECT, "this courier was not told its run yet")
        return self._membership

    # -- from other nodes ----------------------------------------------------------------------------------------------

    def _accept(self, server: socket.socket, membership: Membership) -> None:
        while True:
            try:
                connection, (ip, *_) = server.accept()
            except OSError:
                if server.fileno() < 0 or server is not self._listening:
                    return
                time.sleep(_ACCEPT_AGAIN_S)  # the connection has gone again, or no descriptor is free
                continue
            with self._turn:
                self._strangers[connection] = None
                if len(self._strangers) > _MAX_STRANGERS:
                    self._turn_away(next(iter(self._strangers)))
            threading.Thread(
                target=self._serve, args=(connection, str(ip), membership), name="peer", daemon=True
            ).start()

    def _serve(self, connection: socket.socket, ip: str, membership: Membership) -> None:
        introduced = False
        try:
            with closing(connection):
                channel = Channel(
                    connection,
                    membership.secret,
                    ip,
                    connects=False,
                    within_s=INTRODUCE_S,
                    stall_s=membership.stall_s,
                )
                asked = channel.receive()
                channel.relax()
                with self._turn:
                    self._strangers.pop(connection, None)
                introduced = True
                self._answer(channel, asked, membership)
        except Failed as failure:
            if not introduced:  # else the node that asked tells its own people
                self._notice_once(f"the courier has closed a connection from {ip}: {failure}")
        except Exception as error:  # noqa: BLE001 - the edge of a connection: the others go on
            traceback.print_exc()
            self._notice_once(f"the courier has closed a connection from {ip}: {type(error).__name__}: {error}")
        finally:
            with self._turn:
                self._strangers.pop(connection, None)

    def _turn_away(self, stranger: socket.socket) -> None:
        """Its thread ends at once. Who belongs to the run introduces itself within milliseconds."""
        del self._strangers[stranger]
        with suppress(OSError):  # it is gone already
            stranger.shutdown(socket.SHUT_RDWR)

    def _answer(self, channel: Channel, asked: dict[str, Any], membership: Membership) -> None:
        answers = {"keep": self._keep, "fetch": self._give, "inventory": self._list}
        answer = answers.get(str(asked.get("op")))
        if answer is None:
            channel.send(no=f"there is no {asked.get('op')!r}")
            return
        answer(channel, asked, membership)

    def _keep(self, channel: Channel, asked: dict[str, Any], membership: Membership) -> None:
        whole = frozenset(identities_from(asked["set"]))
        share = identities_from(asked["snapshots"])
        num_bytes = int(asked["num_bytes"])
        with _told(channel):
            if not whole.issuperset(share) or any(identity.run_id != membership.run_id for identity in whole):
                raise Failed(Cause.NETWORK, "these are not snapshots of one set of this run")
            if membership.limit_bytes and num_bytes > membership.limit_bytes:
                raise Failed(
                    Cause.REFUSED, f"{num_bytes} bytes are more than the {membership.limit_bytes} that are kept here"
                )
            arriving = self._intake.join(str(asked["source"]), str(asked["sending"]), whole, channel.interrupt)
        failed = True
        try:
            channel.send(yes=True)
            for identity in share:
                with _told(channel):
                    fd = receive_snapshot(channel, identity, num_bytes)
                    self._intake.add(arriving, identity, fd)
                channel.send(yes=True)
            failed = False
        finally:
            self._intake.leave(arriving, failed=failed)

    def _give(self, channel: Channel, asked: dict[str, Any], membership: Membership) -> None:
        wanted = identities_from(asked["snapshots"])
        with _told(channel):
            found = self._ask("wanted", AGENT_WAIT_S, snapshots=[asdict(identity) for identity in wanted])
            if found is None:
                raise Failed(Cause.NETWORK, f"the agent of {membership.node} does not answer")
        try:
            with _told(channel):
                if len(found.fds) != len(wanted):
                    raise Failed(Cause.INCOMPLETE, f"{membership.node} does not have {found.message['missing']}")
                snapshots = [expected_snapshot(fd, identity) for identity, fd in zip(wanted, found.fds, strict=True)]
            channel.send(yes=True, num_bytes=sum(snapshot.num_bytes for snapshot in snapshots))
            for snapshot, fd in zip(snapshots, found.fds, strict=True):
                send_snapshot(channel, fd, snapshot)
        finally:
            close_all(found.fds)

    def _list(self, channel: Channel, asked: dict[str, Any], membership: Membership) -> None:
        found = self._ask("inventory", AGENT_WAIT_S)
        if found is None:
            channel.send(no=f"the agent of {membership.node} does not answer")
            return
        channel.send(yes=True, snapshots=found.message["snapshots"])

    def _hand_over(self, source: str, snapshots: Sequence[Numbered]) -> None:
        identities = [asdict(identity) for identity, _ in snapshots]
        answer = self._ask("kept", AGENT_WAIT_S, [fd for _, fd in snapshots], source=source, snapshots=identities)
        if answer is None:
            raise Failed(Cause.NETWORK, "the agent does not answer")
        if answer.message["refused"]:
            raise Failed(Cause.REFUSED, str(answer.message["refused"]))

    def _notice_once(self, text: str) -> None:
        if text not in self._noticed and len(self._noticed) < _MAX_NOTICES:
            self._noticed.add(text)
            self._notice(text)


@contextmanager
def _told(channel: Channel) -> Iterator[None]:
    """A failure in here, where the other end waits for an answer, is told it."""
    try:
        yield
    except Failed as failure:
        channel.send(no=str(failure))
        raise


def _require_yes(channel: Channel) -> dict[str, Any]:
    """The other end belongs to the run, and does as asked."""
    answer = channel.receive()
    channel.relax()
    if "no" in answer:
        raise Failed(Cause.NETWORK, f"{channel.who} answers: {answer['no']}")
    return answer


def _shares(items: list[Any], size_of: Callable[[Any], int]) -> list[list[Any]]:
    """At most NUM_STREAMS lists of about the same size."""
    shares: list[list[Any]] = [[] for _ in range(min(NUM_STREAMS, len(items)))]
    for item in sorted(items, key=size_of, reverse=True):
        min(shares, key=lambda share: sum(map(size_of, share))).append(item)
    return [share for share in shares if share]


def _in_parallel(
    work: Callable[[Channel, list[Any]], None], streams: Sequence[tuple[Channel, list[Any]]], job: Job
) -> None:
    """A thread for each stream. Raises the first failure, at which the others are interrupted, once all have ended."""
    failures: list[BaseException] = []

    def run(channel: Channel, share: list[Any]) -> None:
        try:
            work(channel, share)
        except BaseException as failure:  # noqa: BLE001 - raised again below, in the thread that asked
            failures.append(failure)
            job.interrupt()

    threads = [threading.Thread(target=run, args=stream, name="stream", daemon=True) for stream in streams]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    job.require_wanted()
    if failures:
        raise failures[0]
