"""A TCP connection between the couriers of two nodes of one run: sealed messages, and sealed stretches of bytes.

Invariants: nothing that is received is handed on before its seal is good, or, for `receive_into`, used before
`require_seal`; a seal is HMAC-SHA256 under a key of this connection and direction, made of the run's token and a random
number of either side, over the place in the sequence and the content. So nothing can be sent again, reordered,
reflected or taken from another connection, and the token never travels. Contents are not encrypted.
Every wait has a bound: without a byte for `STALL_S` the other end counts as gone.
"""

from __future__ import annotations

import hmac
import json
import secrets
import socket
import struct
import time
from typing import Any

from launcher.courier.messages import Cause, Failed

STALL_S = 20.0
MAX_FIRST_BYTES = 1 << 17  # before the other end has shown that it belongs to the run
MAX_MESSAGE_BYTES = 1 << 24
_PROTOCOL = b"ftlaunch courier 1\n"
_NONCE_BYTES = 16
_SEAL_BYTES = 32
_LENGTH = struct.Struct("!I")
_PLACE = struct.Struct("!Q")


class Secret:
    """What the couriers of a run share. Raises ValueError for an empty token."""

    def __init__(self, token: str, run_id: str) -> None:
        if not token:
            raise ValueError("an empty token keeps nobody out")
        self._key = hmac.digest(token.encode(), _PROTOCOL + run_id.encode(), "sha256")

    def of_connection(self, accepts: bytes, connects: bytes, direction: bytes) -> bytes:
        return hmac.digest(self._key, accepts + connects + direction, "sha256")


class _Sealing:
    """One direction."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._place = 0
        self._running = self._begin()

    def _begin(self) -> hmac.HMAC:
        self._place += 1
        return hmac.new(self._key, _PLACE.pack(self._place), "sha256")

    def add(self, data: bytes | bytearray | memoryview) -> None:
        self._running.update(data)

    def take(self) -> bytes:
        """The seal of what was added since the last one."""
        seal = self._running.digest()
        self._running = self._begin()
        return seal


class Channel:
    """All calls wait, and raise Failed(Cause.NETWORK) when the other end is gone, stalls or has not the run's token."""

    def __init__(
        self,
        connection: socket.socket,
        secret: Secret,
        who: str,
        *,
        connects: bool,
        within_s: float,
        stall_s: float | None = None,
    ) -> None:
        """`who`: the other end, for messages. `connects`: this end has made the connection. `within_s`: until
        `relax`."""
        self.who = who
        self._socket = connection
        self._stall_s = STALL_S if stall_s is None else stall_s
        self._deadline: float | None = time.monotonic() + within_s
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        own = secrets.token_bytes(_NONCE_BYTES)
        self.send_bytes(_PROTOCOL + own)
        hello = bytearray(len(_PROTOCOL) + _NONCE_BYTES)
        self._receive_exactly(memoryview(hello))
        if hello[: len(_PROTOCOL)] != _PROTOCOL:
            raise Failed(Cause.NETWORK, f"{who} is no courier of this version")
        theirs = bytes(hello[len(_PROTOCOL) :])
        accepting, connecting = (theirs, own) if connects else (own, theirs)
        out, back = (b"connects", b"accepts") if connects else (b"accepts", b"connects")
        self._sent = _Sealing(secret.of_connection(accepting, connecting, out))
        self._received = _Sealing(secret.of_connection(accepting, connecting, back))
        self._limit_bytes = MAX_FIRST_BYTES

    def relax(self) -> None:
        """The other end belongs to the run: from now on only stalls are bounded."""
        self._deadline = None
        self._limit_bytes = MAX_MESSAGE_BYTES

    def interrupt(self) -> None:
        """From another thread: whoever waits here fails."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # it is gone already

    def close(self) -> None:
        self._socket.close()

    # -- messages ------------------------------------------------------------------------------------------------------

    def send(self, **fields: Any) -> None:
        text = json.dumps(fields, ensure_ascii=False, separators=(",", ":")).encode()
        if len(text) > MAX_MESSAGE_BYTES:
            raise Failed(Cause.NETWORK, f"a message of {len(text)} bytes is not sent to {self.who}")
        self._sent.add(text)
        self.send_bytes(_LENGTH.pack(len(text)) + text + self._sent.take())

    def receive(self) -> dict[str, Any]:
        head = bytearray(_LENGTH.size)
        self._receive_exactly(memoryview(head))
        (num_bytes,) = _LENGTH.unpack(head)
        if num_bytes > self._limit_bytes:
            raise Failed(Cause.NETWORK, f"{self.who} announces a message of {num_bytes} bytes")
        text = bytearray(num_bytes)
        self._receive_exactly(memoryview(text))
        self._received.add(text)
        self.require_seal()
        message = json.loads(text)
        if not isinstance(message, dict):
            raise Failed(Cause.NETWORK, f"{self.who} sends what is no message")
        return message

    # -- stretches of bytes --------------------------------------------------------------------------------------------

    def send_block(self, block: memoryview) -> None:
        self._sent.add(block)
        self.send_bytes(block)

    def send_seal(self) -> None:
        """Of all blocks since the last seal or message."""
        self.send_bytes(self._sent.take())

    def receive_into(self, block: memoryview) -> int:
        """At least one byte; not to be used before `require_seal`."""
        num_bytes = self._receive(block)
        self._received.add(block[:num_bytes])
        return num_bytes

    def require_seal(self) -> None:
        seal = bytearray(_SEAL_BYTES)
        self._receive_exactly(memoryview(seal))
        if not hmac.compare_digest(seal, self._received.take()):
            raise Failed(Cause.NETWORK, f"{self.who} does not have this run's token, or what it sent was changed")

    # ----

    def send_bytes(self, data: bytes | memoryview) -> None:
        try:
            self._socket.settimeout(self._bound_s())
            self._socket.sendall(data)
        except TimeoutError:
            raise self._stalled() from None
        except OSError as error:
            raise Failed(Cause.NETWORK, f"the connection to {self.who} is lost: {error.strerror or error}") from error

    def _receive_exactly(self, block: memoryview) -> None:
        while block:
            block = block[self._receive(block) :]

    def _receive(self, block: memoryview) -> int:
        try:
            self._socket.settimeout(self._bound_s())
            num_bytes = self._socket.recv_into(block)
        except TimeoutError:
            raise self._stalled() from None
        except OSError as error:
            raise Failed(Cause.NETWORK, f"the connection to {self.who} is lost: {error.strerror or error}") from error
        if num_bytes == 0:
            raise Failed(Cause.NETWORK, f"{self.who} has closed the connection")
        return num_bytes

    def _bound_s(self) -> float:
        if self._deadline is None:
            return self._stall_s
        return max(0.001, min(self._stall_s, self._deadline - time.monotonic()))

    def _stalled(self) -> Failed:
        waited = "it did not introduce itself in time" if self._deadline else f"nothing moves for {self._stall_s:.0f} s"
        return Failed(Cause.NETWORK, f"the connection to {self.who} has stalled: {waited}")
