"""Text for people over a descriptor that may be stuck: a stopped terminal (Ctrl-S), a pipe whose reader pauses.

Invariant: only `finish` waits. What is shared with others (the shell has the same terminal) keeps its mode: not to wait
is a property of what was opened, so it is opened anew, or, where that cannot be done, a thread waits instead.
"""

from __future__ import annotations

import os
import select
import socket
import stat
import threading
import time
from collections import deque
from pathlib import Path

_LIMIT_BYTES = 1 << 18
_AT_ONCE = 1 << 16
_SOON_S = 0.02  # a thread that writes has mostly done so by then


class _Writer(threading.Thread):
    """Writes once, and waits for it where nobody else is to."""

    def __init__(self, fd: int, data: bytes) -> None:
        super().__init__(daemon=True, name="console")  # daemon: it may wait for ever
        self._fd, self._data = fd, data
        self.written = 0
        self.error: OSError | None = None

    def run(self) -> None:
        try:
            self.written = os.write(self._fd, self._data)
        except OSError as error:
            self.error = error


class PatientOutput:
    """Keeps what cannot be written now, at most `limit` bytes: beyond, the oldest lines are left out, and it is said.

    Once the other end is gone, everything is dropped.
    """

    def __init__(self, fd: int, *, limit: int = _LIMIT_BYTES, encoding: str = "utf-8") -> None:
        self._encoding = encoding
        mode = os.fstat(fd).st_mode
        self._socket: socket.socket | None = None
        self._by_thread = False
        self._writer: _Writer | None = None
        if stat.S_ISSOCK(mode):  # cannot be opened, but each call can say that it must not wait
            self._fd = os.dup(fd)
            self._socket = socket.socket(fileno=self._fd)
        elif stat.S_ISREG(mode):  # waits for nobody; and the place in it is shared, and is to be
            self._fd = os.dup(fd)
        else:
            try:
                flags = os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
                self._fd = os.open(Path("/proc/self/fd") / str(fd), flags)
            except OSError:  # another user's, as in a container without root; or nobody reads any more
                self._fd = os.dup(fd)
                self._by_thread = True  # to ask for room first is not enough: a terminal has some for less than it says
        self._limit = limit
        self._waiting: deque[bytes] = deque()
        self._waiting_bytes = 0
        self._begun = b""  # the rest of a text that has been written in part
        self._num_left_out = 0
        self.gone = False

    @property
    def is_behind(self) -> bool:
        """Whether there is text that waits to be written."""
        return bool(self._begun or self._waiting or self._num_left_out)

    def write(self, text: str) -> None:
        """`text`: whole lines, or what wipes and redraws the last one."""
        if self.gone:
            return
        data = text.encode(self._encoding, "backslashreplace")
        self._waiting.append(data)
        self._waiting_bytes += len(data)
        self.flush()
        while self._waiting_bytes > self._limit and self._waiting:
            oldest = self._waiting.popleft()
            self._waiting_bytes -= len(oldest)
            self._num_left_out += oldest.count(b"\n")

    def flush(self) -> None:
        """Write what can be written without waiting."""
        try:
            while not self.gone and (self._begun or self._take_next()):
                written = self._write_some(self._begun[:_AT_ONCE])
                self._begun = self._begun[written:]
        except BlockingIOError:
            return
        except OSError:
            self.gone = True
            self._begun = b""
            self._waiting.clear()
            self._waiting_bytes = self._num_left_out = 0

    def finish(self, bound_s: float) -> None:
        """Write everything, at most for `bound_s`; nothing is written afterwards."""
        deadline = time.monotonic() + bound_s
        self.flush()
        while self.is_behind and not self.gone and (left_s := deadline - time.monotonic()) > 0:
            if self._writer is not None:
                self._writer.join(left_s)
            else:
                select.select([], [self._fd], [], left_s)
            self.flush()
        self.gone = True
        if self._writer is not None:
            return  # it still has the descriptor
        if self._socket is not None:
            self._socket.close()
        else:
            os.close(self._fd)

    def _take_next(self) -> bool:
        if self._num_left_out:
            self._begun = b"ftlaunch: %d lines were not shown: nobody has read them\n" % self._num_left_out
            self._num_left_out = 0
        elif self._waiting:
            self._begun = self._waiting.popleft()
            self._waiting_bytes -= len(self._begun)
        return bool(self._begun)

    def _write_some(self, data: bytes) -> int:
        if self._socket is not None:
            return self._socket.send(data, socket.MSG_DONTWAIT)
        return self._write_by_thread(data) if self._by_thread else os.write(self._fd, data)

    def _write_by_thread(self, data: bytes) -> int:
        """`data` is the same as before, until it has been written."""
        writer = self._writer
        if writer is None:
            writer = self._writer = _Writer(self._fd, data)
            writer.start()
            writer.join(_SOON_S)
        if writer.is_alive():
            raise BlockingIOError
        self._writer = None
        if writer.error is not None:
            raise writer.error
        return writer.written
