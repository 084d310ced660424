"""The listening side: takes requests from whoever connects, within bounds that a stranger cannot move.

Invariant: what is not whole and sealed within `REQUEST_S` is dropped, and costs the others nothing but its bytes.
"""

from __future__ import annotations

import errno
import resource
import socket
import time
from collections.abc import Callable
from typing import Any

from launcher.errors import UserError
from launcher.event_loop import EventLoop
from launcher.transport import framing
from launcher.transport.framing import NonsenseError, Reader, Received
from launcher.transport.notices import Notices
from launcher.transport.stream import MAX_UNSENT_BYTES, Stream

REQUEST_S = 5.0  # for a whole request, its answer taken included
IDLE_S = 90.0  # longer than the asking side keeps an idle connection
ENDING_S = 2.0  # a refused client may read the refusal before the connection goes
BACKLOG = 4096
MAX_CONNECTIONS = 20_000
FILES_WANTED = 65_536
FILES_FOR_OTHERS = 256
ACCEPTS_AT_ONCE = 64
REPEATABLE_BYTES = 2048


class Asker:
    """One connection that came in. addresses: of the agents whose sealed messages came over it."""

    def __init__(self, inbound: Inbound, connection: socket.socket, ip: str) -> None:
        self.ip = ip
        self.addresses: set[str] = set()
        self.since = time.monotonic()  # when it connected, or last said something whole
        self.known = False  # has shown the token
        self.ending = False
        self.question: Any = None  # what the transport has made of the last request
        self._inbound = inbound
        self._reader = Reader(answers=False)
        self._request_since = 0.0
        self._repeatable = b""  # the bytes of `_last`, when nothing else came with them
        self._last = Received()
        self.stream = Stream(inbound.loop, connection, self._on_ready)

    def answer(self, data: bytes, *, close: bool) -> None:
        self.stream.write(data)
        if close:
            self.end()

    def end(self) -> None:
        """Nothing more is read. Closing at once might destroy what was written last, so the other end closes first."""
        if not self.ending:
            self.ending, self.since = True, time.monotonic()
            self.stream.end()

    def is_overdue(self, now: float) -> bool:
        if self.ending:
            return now - self.since > ENDING_S
        if self._is_busy:
            return now - self._request_since > REQUEST_S
        return now - self.since > (IDLE_S if self.known else REQUEST_S)

    @property
    def _is_busy(self) -> bool:
        return self._reader.midst or self.stream.num_unsent_bytes > 0

    def _on_ready(self) -> None:
        if self.stream.closed:  # by what was handled just before, in the same turn of the loop
            return
        self.stream.flush()
        data = self.stream.read()
        if data is None:
            return
        if not data:
            self._inbound.drop(self)
        elif not self.ending:
            self._take(data)

    def _take(self, data: bytes) -> None:
        if not self._is_busy:
            if data == self._repeatable:  # most heartbeats are the one before, byte for byte: not parsed again
                self.since = time.monotonic()
                self._inbound.on_request(self, self._last)
                return
            self._request_since = time.monotonic()
        is_first = not self._reader.midst
        try:
            whole = self._reader.feed(data)
        except NonsenseError as error:
            self._inbound.notices.say(self.ip, "nonsense", f"{self.ip} sent what is no message: {error}")
            self.answer(framing.refusal(error.status, str(error)), close=True)
            return
        is_alone = is_first and len(whole) == 1 and not self._reader.midst
        self._repeatable = data if is_alone and len(data) <= REPEATABLE_BYTES else b""
        for request in whole:
            self._last = request
            if not self.ending:
                self.since = self._request_since = time.monotonic()
                self._inbound.on_request(self, request)
        if self.stream.num_unsent_bytes > MAX_UNSENT_BYTES:
            self._inbound.drop(self)


class Inbound:
    """on_request: called with each whole request, and with the same object when it is the last one again.

    on_lost: with the addresses of the agents that an ended connection was known to carry.
    """

    def __init__(
        self,
        loop: EventLoop,
        host: str,
        port: int,
        notices: Notices,
        on_request: Callable[[Asker, Received], None],
        on_lost: Callable[[set[str]], None],
    ) -> None:
        self.loop, self.notices, self.on_request = loop, notices, on_request
        self._on_lost = on_lost
        self._askers: dict[Asker, None] = {}  # in the order in which they came
        self._accepting = True
        self._max = min(MAX_CONNECTIONS, _raise_file_limit() - FILES_FOR_OTHERS)
        self._listener = _listen(host, port)
        self.port: int = self._listener.getsockname()[1]
        loop.register(self._listener, self._accept)

    def drop(self, asker: Asker) -> None:
        asker.stream.close()
        if asker in self._askers:
            del self._askers[asker]
            if asker.addresses:
                self._on_lost(asker.addresses)

    def tick(self, now: float) -> None:
        if not self._accepting:
            self._accepting = True
            self.loop.register(self._listener, self._accept)
        for asker in [asker for asker in self._askers if asker.is_overdue(now)]:
            self.drop(asker)

    def end(self, loop: EventLoop) -> None:
        """Accept nobody more, say goodbye to the others, on another loop. The other ends close, or `close` does."""
        self.loop.unregister(self._listener)
        self._listener.close()
        self.loop = loop
        for asker in list(self._askers):
            asker.stream.move(loop)
            asker.end()

    @property
    def is_empty(self) -> bool:
        return not self._askers

    def close(self) -> None:
        for asker in self._askers:
            asker.stream.close()
        self._askers.clear()

    def _accept(self) -> None:
        for _ in range(ACCEPTS_AT_ONCE):
            try:
                connection, (ip, _) = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    self.notices.say("", "files", f"cannot accept connections for now: {error.strerror}")
                    self.loop.unregister(self._listener)  # until the next tick: it would be called over and over
                    self._accepting = False
                    return
                continue  # that one is gone already
            if len(self._askers) >= self._max and not self._make_room():
                self.notices.say("", "full", f"{self._max} agents are connected: {ip} is turned away")
                connection.close()
                continue
            self._askers[Asker(self, connection, ip)] = None

    def _make_room(self) -> bool:
        """The oldest who has not shown the token goes."""
        stranger = next((asker for asker in self._askers if not asker.known), None)
        if stranger is not None:
            self.drop(stranger)
        return stranger is not None


def _raise_file_limit() -> int:
    """Each connection is an open file. The new soft limit (bounded: children inherit it) or the old one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    infinite = resource.RLIM_INFINITY
    wanted = FILES_WANTED if hard == infinite else min(hard, FILES_WANTED)
    if soft == infinite or soft >= wanted:
        return FILES_WANTED if soft == infinite else soft
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except (OSError, ValueError):
        return soft
    return wanted


def _listen(host: str, port: int) -> socket.socket:
    """Raises UserError."""
    try:
        listener = socket.create_server((host, port), backlog=BACKLOG)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise UserError(
                f"port {port} is taken on this machine (an agent listens there?). Set cluster.agent_port to a free "
                "port, the same on every node, or end what uses it: `ss -ltnp`"
            ) from None
        if error.errno == errno.EACCES:
            text = f"port {port} needs root. Set cluster.agent_port to a port above 1023, the same on every node"
            raise UserError(text) from None
        raise UserError(f"cannot listen on {host}:{port}: {error.strerror}") from None
    listener.setblocking(False)
    return listener
