"""How fast two nodes talk over TCP: a small server on each, and the client's side of each test.

Nothing here waits longer than its bound, and who does not know the server's secret gets no answer.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass

CONNECT_WITHIN_S = 3.0
LATENCY_ROUNDS = 50
_SECRET_BYTES = 16
_REACH, _PING, _SINK = b"r", b"p", b"s"
_BLOCK = bytes(1 << 18)
_SEND_BUFFER_BYTES = 1 << 20  # what may still be under way when the time is up
_RESULT = struct.Struct("!dd")  # bytes, seconds


@dataclass(frozen=True)
class SpeedAddress:
    host: str
    port: int
    secret: str


@dataclass(frozen=True)
class PairSpeed:
    """From `source` to `target`. One stream of TCP: on links above some 20 Gb/s a lower bound."""

    source: str
    target: str
    bytes_per_s: float
    latency_s: float  # half of a round trip


@contextmanager
def speed_server(host: str) -> Iterator[SpeedAddress]:
    """Answers the tests of other nodes on a free port of `host`, in threads of its own, until the block ends."""
    secret = secrets.token_bytes(_SECRET_BYTES)
    listener = socket.create_server((host, 0), backlog=64)
    stop = threading.Event()

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return  # closed
            threading.Thread(target=_answer, args=(connection, secret, stop), daemon=True).start()

    threading.Thread(target=serve, name="speed server", daemon=True).start()
    try:
        yield SpeedAddress(host, listener.getsockname()[1], secret.hex())
    finally:
        stop.set()
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()


def why_unreachable(address: SpeedAddress, timeout_s: float = CONNECT_WITHIN_S) -> str:
    """ "" where the server answers."""
    try:
        with _connected(address, _REACH, timeout_s) as connection:
            return "" if connection.recv(1) == _REACH else "closed without an answer"
    except OSError as error:
        return str(error)


def measure(source: str, target: str, address: SpeedAddress, seconds: float) -> PairSpeed:
    """Latency first, then `seconds` of sending. Raises OSError."""
    return PairSpeed(source, target, _bandwidth(address, seconds), _latency(address))


def _latency(address: SpeedAddress) -> float:
    """The quickest of some rounds: what the link takes, not what the processor was busy with."""
    with _connected(address, _PING, CONNECT_WITHIN_S) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        best = float("inf")
        for _ in range(LATENCY_ROUNDS):
            began = time.perf_counter()
            connection.sendall(_PING)
            if connection.recv(1) != _PING:
                raise ConnectionError("closed in the middle of the test")
            best = min(best, time.perf_counter() - began)
        return best / 2


def _bandwidth(address: SpeedAddress, seconds: float) -> float:
    """Bytes a second, as the receiver counts them."""
    with _connected(address, _SINK, CONNECT_WITHIN_S) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
        connection.sendall(struct.pack("!d", seconds))
        connection.settimeout(seconds + CONNECT_WITHIN_S)
        deadline = time.monotonic() + seconds
        # Too slow for a block, or the receiver's time is up: it tells what has come.
        with suppress(TimeoutError, ConnectionError):
            while time.monotonic() < deadline:
                connection.sendall(_BLOCK)
        with suppress(OSError):
            connection.shutdown(socket.SHUT_WR)
        answer = b""
        while len(answer) < _RESULT.size and (part := connection.recv(_RESULT.size - len(answer))):
            answer += part
        if len(answer) < _RESULT.size:
            raise ConnectionError("closed in the middle of the test")
        num_bytes, elapsed_s = _RESULT.unpack(answer)
        return float(num_bytes / elapsed_s) if elapsed_s > 0 else 0.0


def _connected(address: SpeedAddress, command: bytes, timeout_s: float) -> socket.socket:
    connection = socket.create_connection((address.host, address.port), timeout_s)
    try:
        connection.sendall(bytes.fromhex(address.secret) + command)
    except OSError:
        connection.close()
        raise
    return connection


def _answer(connection: socket.socket, secret: bytes, stop: threading.Event) -> None:
    with closing(connection):
        try:
            connection.settimeout(CONNECT_WITHIN_S)
            given = _exactly(connection, _SECRET_BYTES + 1)
            if not hmac.compare_digest(given[:_SECRET_BYTES], secret):
                return
            if given[_SECRET_BYTES:] == _REACH:
                connection.sendall(_REACH)
            elif given[_SECRET_BYTES:] == _PING:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                while not stop.is_set() and connection.recv(1):
                    connection.sendall(_PING)
            elif given[_SECRET_BYTES:] == _SINK:
                connection.sendall(_swallow(connection))
        except OSError:
            return  # the client has said why, or has gone


def _swallow(connection: socket.socket) -> bytes:
    """Count what comes until the sender ends, or a second after the time that it has named."""
    (seconds,) = struct.unpack("!d", _exactly(connection, 8))
    deadline = time.monotonic() + min(float(seconds), 60.0) + 1.0
    block = bytearray(len(_BLOCK))
    first = last = None
    num_bytes = 0
    while (left_s := deadline - time.monotonic()) > 0:
        connection.settimeout(left_s)
        try:
            got = connection.recv_into(block)
        except TimeoutError:
            break
        if not got:
            break
        last = time.monotonic()
        if first is None:
            first = last  # what came with the first read began to travel before the clock did
            continue
        num_bytes += got
    return _RESULT.pack(num_bytes, (last or 0.0) - (first or 0.0))


def _exactly(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        part = connection.recv(count - len(data))
        if not part:
            raise ConnectionError("closed early")
        data += part
    return data
