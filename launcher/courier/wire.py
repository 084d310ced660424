"""Messages between the agent and its courier: whole JSON packets over SOCK_SEQPACKET, with descriptors beside them.

Invariants: a message arrives whole, with all its descriptors, or says that they were lost; descriptors that have been
received belong to the receiver, are closed on exec, and those that were sent stay the sender's. A message that does
not fit into a packet (the manifest of a run of thousands of ranks) travels in a memfd, as the last descriptor.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import time
from array import array
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from launcher.link import SEND_BOUND_S, Message, decode, encode

MAX_PACKET_BYTES = 32768
MAX_FDS = 250  # of one message, besides that of its text; SCM_MAX_FD is 253
_LARGE = "large"
_FDS_SPACE_BYTES = socket.CMSG_SPACE((MAX_FDS + 1) * array("i").itemsize)
_RECEIVED_AT_ONCE = 64


@dataclass(frozen=True)
class Parcel:
    """One message as received. `fds_lost`: it had descriptors that did not arrive (the limit of open files)."""

    message: Message
    fds: tuple[int, ...] = ()
    fds_lost: bool = False


class Wire:
    """One end. `send` may wait for room and may be called from any thread; `post` and `receive` never wait."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self.closed = False
        self._socket = end
        self._unsent: deque[tuple[bytes, list[int]]] = deque()

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def has_unsent(self) -> bool:
        return bool(self._unsent)

    def send(self, kind: str, fds: Sequence[int] = (), **fields: Any) -> bool:
        """False when the other side is gone; TimeoutError when it has made no room for SEND_BOUND_S."""
        packet, own_fds = _pack(kind, fds, fields)
        deadline = time.monotonic() + SEND_BOUND_S
        try:
            while True:
                try:
                    socket.send_fds(self._socket, [packet], [*fds, *own_fds])
                    return True
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        raise TimeoutError(f"the agent has read no message for {SEND_BOUND_S:.0f} s") from None
                    select.select([], [self._socket], [], 1.0)
                except (BrokenPipeError, ConnectionResetError):
                    return False
        finally:
            close_all(own_fds)

    def post(self, kind: str, fds: Sequence[int] = (), **fields: Any) -> None:
        """Like `send`, but what finds no room is kept, in order, for `flush`. Nothing is said of a side that is gone:
        `receive` tells it."""
        packet, own_fds = _pack(kind, fds, fields)
        self._unsent.append((packet, [*(os.dup(fd) for fd in fds), *own_fds]))
        self.flush()

    def flush(self) -> None:
        while self._unsent:
            packet, fds = self._unsent[0]
            try:
                socket.send_fds(self._socket, [packet], fds)
            except BlockingIOError:
                return
            except OSError:
                self._drop_unsent()
                return
            self._unsent.popleft()
            close_all(fds)

    def receive(self) -> list[Parcel]:
        """Messages that are here now, oldest first, not all of very many; `closed` is set once the last one is read."""
        parcels: list[Parcel] = []
        while not self.closed and len(parcels) < _RECEIVED_AT_ONCE:
            try:
                packet, ancillary, flags, _ = self._socket.recvmsg(
                    2 * MAX_PACKET_BYTES, _FDS_SPACE_BYTES, socket.MSG_CMSG_CLOEXEC
                )
            except BlockingIOError:
                break
            except ConnectionResetError:
                continue  # the other end died with unread messages; what it had sent itself comes next
            if not packet:
                self.closed = True
                break
            parcels.append(_unpack(packet, _fds_in(ancillary), truncated=bool(flags & socket.MSG_CTRUNC)))
        return parcels

    def close(self) -> None:
        self.closed = True
        self._drop_unsent()
        self._socket.close()

    def _drop_unsent(self) -> None:
        while self._unsent:
            close_all(self._unsent.popleft()[1])


def close_all(fds: Iterable[int]) -> None:
    for fd in fds:
        with contextlib.suppress(OSError):
            os.close(fd)


def write_all(fd: int, data: bytes | memoryview) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(fd, rest) :]


def _pack(kind: str, fds: Sequence[int], fields: Message) -> tuple[bytes, list[int]]:
    """The packet, and the descriptor of its text where that is too large for one."""
    if len(fds) > MAX_FDS:
        raise ValueError(f"{len(fds)} descriptors for one {kind}; {MAX_FDS} can be sent")
    packet = encode(kind, {**fields, "num_fds": len(fds)})
    if len(packet) <= MAX_PACKET_BYTES:
        return packet, []
    text_fd = os.memfd_create("courier message")
    try:
        write_all(text_fd, packet)
    except OSError:
        os.close(text_fd)
        raise
    return encode(_LARGE, {"id": fields.get("id"), "num_fds": len(fds) + 1}), [text_fd]


def _fds_in(ancillary: Iterable[tuple[int, int, bytes]]) -> list[int]:
    """As `socket.recv_fds` does; that drops the flags it is given, so the descriptors would not be closed on exec."""
    fds = array("i")
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    return list(fds)


def _unpack(packet: bytes, fds: list[int], *, truncated: bool) -> Parcel:
    message = decode(packet) or {"kind": ""}
    if truncated or len(fds) != message.get("num_fds", 0):
        close_all(fds)
        return Parcel(message, fds_lost=True)
    if message["kind"] == _LARGE:
        text_fd = fds.pop()
        with os.fdopen(text_fd, "rb") as stream:
            stream.seek(0)
            message = decode(stream.read()) or {"kind": ""}
    return Parcel(message, tuple(fds))
