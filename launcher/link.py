"""The channel between an agent and one of its ranks: whole JSON messages over a SOCK_SEQPACKET pair.

Why a socket pair and not a file, a store or signals:
- a message that a rank sent before it died is still there for the agent (the kernel keeps it);
- end-of-file tells each side at once that the other is gone;
- the signal wake-up descriptor can be the very same socket, so that a SIGTERM to a rank reaches the agent even while
  the rank's interpreter is inside a collective (`signal.set_wakeup_fd` writes the signal's number from C).

Messages are at most `MAX_MESSAGE_BYTES`: sample records are split by their sender, longer texts are cut.
"""

from __future__ import annotations

import json
import select
import signal
import socket
import time
from collections import deque
from typing import Any

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
MAX_MESSAGE_BYTES = 65536
_SHORT_TEXT = 4000
SEND_BOUND_S = 600.0

Message = dict[str, Any]


def pair() -> tuple[socket.socket, socket.socket]:
    """Agent's end and rank's end, both non-blocking."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in (ours, theirs):
        end.setblocking(False)
        # Room for a burst of step messages while the agent collects an incident.
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
    return ours, theirs


def encode(kind: str, fields: Message) -> bytes:
    return json.dumps({"kind": kind, **fields}, ensure_ascii=False, separators=(",", ":"), default=str).encode()


def decode(packet: bytes) -> Message | None:
    """A one-byte packet is a signal number written by `signal.set_wakeup_fd`; all else is JSON.

    None for signals that ask for nothing: `set_wakeup_fd` also reports SIGCHLD, for which torch's DataLoader has a
    handler.
    """
    if len(packet) == 1:
        return {"kind": "signal", "signal": packet[0]} if packet[0] in STOP_SIGNALS else None
    message: Message = json.loads(packet)
    return message


def _shortened(value: Any) -> Any:
    """Texts (messages, answers) may be cut; numbers and sample ids never are: their sender keeps them small."""
    return value[:_SHORT_TEXT] + " ..." if isinstance(value, str) and len(value) > _SHORT_TEXT else value


class Link:
    """One end of the channel. `send` may wait for room; `poll` never waits; `wait_for` is bounded."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._inbox: deque[Message] = deque()
        self.closed = False

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, kind: str, **fields: Any) -> bool:
        """Send one message. False when the other side is gone; TimeoutError when it has read nothing for
        SEND_BOUND_S."""
        packet = encode(kind, fields)
        if len(packet) > MAX_MESSAGE_BYTES:
            packet = encode(kind, {key: _shortened(value) for key, value in fields.items()})
        deadline = time.monotonic() + SEND_BOUND_S
        while True:
            try:
                self._socket.send(packet)
                return True
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"the other end has read no message for {SEND_BOUND_S:.0f} s") from None
                select.select([], [self._socket], [], 1.0)
            except (BrokenPipeError, ConnectionResetError):
                return (
                    False  # what the other end had said before it went is still to be read: `closed` is poll's to set
                )

    def poll(self) -> list[Message]:
        """Every message that is here now, oldest first."""
        self._receive()
        messages = list(self._inbox)
        self._inbox.clear()
        return messages

    def wait_for(self, kind: str, timeout_s: float) -> Message | None:
        """The next message of this kind; None at the bound or when the other side is gone. Others are kept for
        `poll`."""
        deadline = time.monotonic() + timeout_s
        while True:
            self._receive()
            for message in self._inbox:
                if message["kind"] == kind:
                    self._inbox.remove(message)
                    return message
            remaining_s = deadline - time.monotonic()
            if remaining_s <= 0 or self.closed:
                return None
            select.select([self._socket], [], [], remaining_s)

    def close(self) -> None:
        self._socket.close()
        self.closed = True

    def _receive(self) -> None:
        while not self.closed:
            try:
                packet = self._socket.recv(MAX_MESSAGE_BYTES * 4)
            except BlockingIOError:
                return
            except ConnectionResetError:
                # The other end died with unread messages. That is told once, before what it had sent itself.
                continue
            if not packet:
                self.closed = True
                return
            message = decode(packet)
            if message is not None:
                self._inbox.append(message)
