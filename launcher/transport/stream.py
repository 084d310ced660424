"""One TCP connection on the agent's loop: never blocks, keeps what could not be written yet."""

from __future__ import annotations

import socket
from collections.abc import Callable

from launcher.event_loop import EventLoop

READ_BYTES = 64 * 1024
MAX_UNSENT_BYTES = 16 * 1024 * 1024


class Stream:
    """`on_ready` is called when there is something to read, or room to write; it reads with `read`.

    A failed write is not reported: the same failure shows at the next read, and there is one path for it.
    """

    def __init__(self, loop: EventLoop, connection: socket.socket, on_ready: Callable[[], None]) -> None:
        self.closed = False
        self._loop, self._socket, self._on_ready = loop, connection, on_ready
        self._unsent = b""
        self._ending = False
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        loop.register(connection, on_ready)

    @property
    def num_unsent_bytes(self) -> int:
        return len(self._unsent)

    def connect(self, to: tuple[str, int]) -> int:
        """0, EINPROGRESS (then `on_ready` is called at its end, and `connect_error` says how it went) or an errno."""
        error = self._socket.connect_ex(to)
        self._loop.watch_writing(self._socket, self._on_ready)
        return error

    def connect_error(self) -> int:
        return self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)

    def is_to_itself(self) -> bool:
        """A connect to a port where nobody listens meets itself when the kernel picks the same port as its source."""
        try:
            return bool(self._socket.getsockname() == self._socket.getpeername())
        except OSError:
            return False

    def stop_watching_writing(self) -> None:
        self._loop.watch_writing(self._socket, self._on_ready, on=False)

    def write(self, data: bytes) -> None:
        if self.closed:
            return
        if self._unsent:
            self._unsent += data
            return
        self._unsent = data
        self._send()
        if self._unsent:
            self._loop.watch_writing(self._socket, self._on_ready)

    def flush(self) -> None:
        """To be called from `on_ready`."""
        if self._unsent and not self.closed:
            self._send()
            if not self._unsent:
                self._loop.watch_writing(self._socket, self._on_ready, on=False)

    def read(self) -> bytes | None:
        """What has come; b"" when the other end has closed or reset the connection; None when nothing is there."""
        try:
            return self._socket.recv(READ_BYTES)
        except BlockingIOError:
            return None
        except OSError:
            return b""

    def end(self) -> None:
        """Nothing more will be written."""
        if not self._unsent:
            self._shut()
        self._ending = True

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self._loop.unregister(self._socket)
            self._socket.close()

    def move(self, loop: EventLoop) -> None:
        """To another loop."""
        self._loop.unregister(self._socket)
        self._loop = loop
        loop.register(self._socket, self._on_ready)
        if self._unsent:
            loop.watch_writing(self._socket, self._on_ready)

    def _send(self) -> None:
        try:
            self._unsent = self._unsent[self._socket.send(self._unsent) :]
        except BlockingIOError:
            return
        except OSError:
            self._unsent = b""
        if self._ending and not self._unsent:
            self._shut()

    def _shut(self) -> None:
        try:
            self._socket.shutdown(socket.SHUT_WR)
        except OSError:
            return  # it is gone already
