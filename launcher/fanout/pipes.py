"""Lines in and text out over descriptors that never block the process: `Lines` reads, `Outlet` writes."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Callable

from launcher.event_loop import EventLoop

_AT_ONCE = 1 << 16


class Lines:
    """Complete lines from a descriptor, without their ends; a line of more than `longest` bytes comes in pieces."""

    def __init__(self, fd: int, longest: int = 1 << 16) -> None:
        self.fd = fd
        self.closed = False
        self._longest = longest
        self._rest = b""
        os.set_blocking(fd, False)

    def fileno(self) -> int:
        return self.fd

    def read(self) -> list[bytes]:
        """What has come. After the end (`closed`) the unfinished line comes too."""
        found: list[bytes] = []
        while not self.closed:
            try:
                chunk = os.read(self.fd, _AT_ONCE)
            except BlockingIOError:
                break
            except OSError:
                chunk = b""  # reset by the other end
            if not chunk:
                self.closed = True
                if self._rest:
                    found.append(self._rest)
                self._rest = b""
                break
            *lines, self._rest = (self._rest + chunk).split(b"\n")
            found += lines
            if len(self._rest) > self._longest:
                found.append(self._rest)
                self._rest = b""
            if len(chunk) < _AT_ONCE:
                break  # the rest of a flood waits for the next turn
        return found


class Outlet:
    """Writes without waiting. A reader that is too slow loses the oldest text, and is told how much.

    `limit`: bytes that may wait. Once the reader is gone (`closed`) everything is dropped; `on_closed` is called then.
    """

    def __init__(
        self, fd: int, loop: EventLoop, limit: int = 1 << 18, on_closed: Callable[[], None] = lambda: None
    ) -> None:
        self.fd = fd
        self.closed = False
        self._loop = loop
        self._limit = limit
        self._on_closed = on_closed
        self._pending = bytearray()
        self._in_line = False  # what was written last is not a whole line
        self._watched = False
        mode = os.fstat(fd).st_mode
        # epoll takes no files (nor /dev/null); writing to them does not wait for anybody.
        self._waits = not stat.S_ISREG(mode)
        # A socket's mode is shared with everybody who has it (a journal's, as standard error), so it is left alone.
        self._socket = socket.fromfd(fd, socket.AF_UNIX, socket.SOCK_STREAM) if stat.S_ISSOCK(mode) else None
        if self._socket is None:
            os.set_blocking(fd, False)

    @property
    def is_empty(self) -> bool:
        return not self._pending

    def write(self, data: bytes) -> None:
        if self.closed:
            return
        self._pending += data
        self._flush()
        if len(self._pending) > self._limit:
            self._drop_the_oldest()

    def _drop_the_oldest(self) -> None:
        end = self._pending.find(b"\n", len(self._pending) - self._limit // 2)
        cut = end + 1 if end >= 0 else len(self._pending)
        del self._pending[:cut]
        self._pending[:0] = (
            b"\n" if self._in_line else b""
        ) + b"(%d bytes of output left out: the reader is too slow)\n" % cut

    def _flush(self) -> None:
        try:
            while self._pending:
                written = self._write_some(self._pending[:_AT_ONCE])
                self._in_line = self._pending[written - 1 : written] != b"\n"
                del self._pending[:written]
        except BlockingIOError:
            pass
        except OSError:
            self.close()
            self._on_closed()
            return
        self._watch(bool(self._pending))

    def _write_some(self, data: bytearray) -> int:
        return self._socket.send(data, socket.MSG_DONTWAIT) if self._socket is not None else os.write(self.fd, data)

    def _watch(self, on: bool) -> None:
        if on == self._watched or not self._waits:
            return
        if not on:
            self._loop.unregister(self.fd)
            self._watched = False
            return
        try:
            self._loop.register(self.fd, self._flush)
        except PermissionError:
            self._waits = False
            return
        self._loop.watch_writing(self.fd, self._flush)
        self._watched = True

    def close(self) -> None:
        """Forgets what waits; the descriptor stays open, it is the caller's."""
        if self._watched:
            self._loop.unregister(self.fd)
            self._watched = False
        if self._socket is not None:
            self._socket.close()
        self.closed = True
        self._pending.clear()
