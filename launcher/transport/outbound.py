"""The asking side: gets messages to one agent over as many connections as it takes.

A request that is not answered within `HEDGE_S` holds nothing up: what comes next goes over another connection, and the
late answer is used when it comes. So a lost packet, which TCP repeats after a second or more, silences nobody.

Invariant: `Links.on_unreachable` means that the kernel of that machine has refused a connection. Whatever else goes
wrong is silence.
"""

from __future__ import annotations

import errno
import ipaddress
import socket
import time
from collections import deque
from dataclasses import dataclass
from typing import Protocol

from launcher.cluster.messages import Beat, Message
from launcher.event_loop import EventLoop
from launcher.transport.body import MAX_BODY_BYTES, join
from launcher.transport.framing import NonsenseError, Reader, Received
from launcher.transport.notices import Notices
from launcher.transport.stream import Stream

HEDGE_S = 0.6
ANSWER_S = 6.0  # no answer for so long: the connection is given up, in silence
IDLE_S = 30.0
MAX_CHANNELS = 6
MAX_WAITING = 8192
WAITING_S = 3.0  # what has waited for so long is of no use any more
BATCH_BYTES = 1024 * 1024
BATCH_MESSAGES = 1000
# After a lost connection. A dying process may still seem to listen for a moment, so the first probes follow soon; an
# agent that drops every connection must not be called in a circle, so the pauses grow.
PROBE_AGAIN_S, MAX_PROBE_AGAIN_S = 0.02, 2.0
REFUSED_S = 0.5
_CONNECTING = (errno.EINPROGRESS, errno.EALREADY, errno.EINTR)
_NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL, errno.ENOBUFS, errno.ENOMEM)


class Links(Protocol):
    """What a peer needs of the transport it belongs to."""

    loop: EventLoop
    notices: Notices

    def ask(self, host: bytes, batch: Batch) -> bytes:
        """The request, whole; sets the batch's seal."""

    def on_answer(self, address: str, batch: Batch, answer: Received) -> bool:
        """False: it was none of ours, and the connection is of no use."""

    def on_unreachable(self, address: str) -> None: ...

    def flush_soon(self, peer: Peer) -> None:
        """Have `peer.flush` called before long."""


@dataclass(slots=True, eq=False)
class Waiting:
    message: Message
    encoded: bytes
    since: float


@dataclass(slots=True)
class Batch:
    """What travels in one request. again: it had been sent before, over a connection that was lost."""

    items: list[Waiting]
    again: bool = False
    seal: bytes = b""

    @property
    def body(self) -> bytes:
        return join([item.encoded for item in self.items])

    @property
    def matters(self) -> bool:
        """At the end a heartbeat is not worth waiting for."""
        return not all(isinstance(item.message, Beat) for item in self.items)


class Channel:
    """One connection to a peer, with at most one request on its way. batch: it, until its answer is here."""

    def __init__(self, peer: Peer, batch: Batch | None, now: float) -> None:
        self.batch = batch
        self.since = now  # when the request was handed over, or when the connection became idle
        self.connected = False
        self._peer = peer
        self._reader = Reader(answers=True)
        self.stream = Stream(
            peer.links.loop, socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_CLOEXEC), self._on_ready
        )

    def open(self, to: tuple[str, int]) -> None:
        error = self.stream.connect(to)
        if error not in _CONNECTING:
            self._on_connect(error)

    @property
    def is_idle(self) -> bool:
        return self.connected and self.batch is None

    def send(self, batch: Batch, now: float) -> None:
        self.batch, self.since = batch, now
        self.stream.write(self._peer.links.ask(self._peer.host, batch))

    def _on_connect(self, error: int) -> None:
        if error == 0 and self.stream.is_to_itself():
            error = errno.ECONNREFUSED
        if error:
            self._peer.on_no_connection(self, error)
            return
        self.connected = True
        self.stream.stop_watching_writing()
        self._peer.on_connected()
        if self.batch:
            self.send(self.batch, self.since)
        else:
            self._peer.on_idle(self)

    def _on_ready(self) -> None:
        if self.stream.closed:  # by what was handled just before, in the same turn of the loop
            return
        if not self.connected:
            self._on_connect(self.stream.connect_error())
            return
        self.stream.flush()
        data = self.stream.read()
        if data is None:
            return
        if data:
            self._take(data)
        else:
            self._peer.on_lost(self)

    def _take(self, data: bytes) -> None:
        try:
            answers = self._reader.feed(data)
        except NonsenseError as error:
            self._peer.on_nonsense(self, str(error))
            return
        for answer in answers:
            if self.batch is None:
                self._peer.on_nonsense(self, "an answer to nothing")
                return
            batch, self.batch, self.since = self.batch, None, time.monotonic()
            self._peer.on_answer(self, batch, answer)


class Peer:
    """Messages to one address."""

    def __init__(self, links: Links, address: str) -> None:
        """Raises ValueError when the address is not "IPv4:port"."""
        ip, _, port = address.rpartition(":")
        self._to = (str(ipaddress.IPv4Address(ip)), int(port))
        if not 0 < self._to[1] < 65536:
            raise ValueError(f"there is no port {port}")
        self.links, self.address, self.host = links, address, address.encode()
        self._waiting: deque[Waiting] = deque()
        self._beat: Waiting | None = None  # among those that wait, if it still waits
        self._again: Batch | None = None  # goes before what waits
        self._channels: list[Channel] = []  # the one that has answered last is the last
        self._probe_due = False
        self._probe_at = 0.0  # not before
        self._refused_at = float("-inf")
        self._probe_again_s = PROBE_AGAIN_S

    @property
    def is_unused(self) -> bool:
        return not self._waiting and not self._channels and not self._probe_due

    @property
    def is_settled(self) -> bool:
        """Nothing that matters is on its way."""
        waits = self._again or any(not isinstance(item.message, Beat) for item in self._waiting)
        return not waits and not any(channel.batch and channel.batch.matters for channel in self._channels)

    def add(self, message: Message, encoded: bytes, now: float) -> None:
        """Of heartbeats only the newest is worth sending."""
        item = Waiting(message, encoded, now)
        if isinstance(message, Beat):
            if self._beat is not None and self._beat in self._waiting:
                self._waiting.remove(self._beat)
            self._beat = item
        if len(self._waiting) >= MAX_WAITING:
            self._waiting.popleft()
        self._waiting.append(item)

    def flush(self, now: float) -> bool:
        """Send what waits, as far as it can be; False when something still waits."""
        while self._waiting and now - self._waiting[0].since > WAITING_S:
            self._waiting.popleft()
        for channel in [channel for channel in reversed(self._channels) if channel.is_idle]:
            if self._waiting or self._again:
                channel.send(self._next_batch(), now)
        if self._waiting or self._again:
            if any(now - channel.since < HEDGE_S for channel in self._channels):
                return False  # it will be free in a moment
            if len(self._channels) >= MAX_CHANNELS:
                self._forget(min(self._channels, key=lambda channel: channel.since))
            self._connect(self._next_batch(), now)
        elif self._probe_due and now >= self._probe_at:
            self._probe_at = now + self._probe_again_s
            self._probe_again_s = min(2 * self._probe_again_s, MAX_PROBE_AGAIN_S)
            if len(self._channels) < MAX_CHANNELS and all(channel.connected for channel in self._channels):
                self._connect(None, now)
            self._probe_due = False  # one that is being connected will tell
        return not self._waiting and not self._probe_due

    def probe(self, now: float) -> None:
        """Find out whether an agent still listens there; `on_unreachable` tells if not."""
        if self._is_gone(now):
            return
        self._probe_due = True
        if not self.flush(now):
            self.links.flush_soon(self)

    def tick(self, now: float) -> None:
        for channel in list(self._channels):
            if now - channel.since > (IDLE_S if channel.is_idle else ANSWER_S):
                self._forget(channel)

    def move(self, loop: EventLoop) -> None:
        for channel in self._channels:
            channel.stream.move(loop)

    def close(self) -> None:
        for channel in list(self._channels):
            self._forget(channel)

    # ---- from the channels ----

    def on_connected(self) -> None:
        self._refused_at = float("-inf")

    def on_idle(self, channel: Channel) -> None:
        if not self.flush(time.monotonic()):
            self.links.flush_soon(self)

    def on_answer(self, channel: Channel, batch: Batch, answer: Received) -> None:
        self._probe_again_s = PROBE_AGAIN_S
        ours = self.links.on_answer(self.address, batch, answer)
        if channel.stream.closed:
            return
        if not ours or not answer.keep_alive:
            self._forget(channel)
        else:
            self._channels.remove(channel)
            self._channels.append(channel)
        self.on_idle(channel)

    def on_no_connection(self, channel: Channel, error: int) -> None:
        self._forget(channel)
        if error == errno.ECONNREFUSED:
            self._waiting.clear()
            self._again, self._probe_due = None, False
            self._refused_at = time.monotonic()
            self.links.on_unreachable(self.address)
        elif error in _NO_ROOM:
            text = f"cannot connect to {self.address} for now: {errno.errorcode.get(error, error)}"
            self.links.notices.say("", "no room", text)

    def on_lost(self, channel: Channel) -> None:
        """Reset or closed: the agent may be gone, or have been started anew. What was on its way is sent once more."""
        self._forget(channel)
        now = time.monotonic()
        if self._is_gone(now):
            return
        batch = channel.batch
        if batch and not batch.again and now - channel.since < WAITING_S and not self._again:
            self._again = Batch(batch.items, again=True)
        self.probe(now)

    def on_nonsense(self, channel: Channel, text: str) -> None:
        self.links.notices.say(self.address, "nonsense", f"{self.address} is no agent of ftlaunch: {text}")
        self._forget(channel)

    # ----

    def _is_gone(self, now: float) -> bool:
        """It has just been told: what happens to the agent's other connections is no news."""
        return now - self._refused_at < REFUSED_S

    def _connect(self, batch: Batch | None, now: float) -> None:
        self._probe_due = False
        try:
            channel = Channel(self, batch, now)
        except OSError as error:  # too many open files
            self.links.notices.say("", "no room", f"cannot connect to {self.address} for now: {error.strerror}")
            return
        self._channels.append(channel)
        channel.open(self._to)

    def _forget(self, channel: Channel) -> None:
        channel.stream.close()
        if channel in self._channels:
            self._channels.remove(channel)

    def _next_batch(self) -> Batch:
        if self._again:
            batch, self._again = self._again, None
            return batch
        items: list[Waiting] = []
        num_bytes = 0
        while self._waiting and len(items) < BATCH_MESSAGES:
            num_bytes += len(self._waiting[0].encoded) + 1
            if items and num_bytes > BATCH_BYTES:
                break
            items.append(self._waiting.popleft())
        return Batch(items)


def is_too_large(encoded: bytes) -> bool:
    return len(encoded) + 2 > MAX_BODY_BYTES
