"""What people see of a fan-out: its own lines, and those of the nodes behind their names."""

from __future__ import annotations

import contextlib
import os
import stat

from launcher.event_loop import EventLoop
from launcher.fanout.pipes import Outlet

_LIMIT_BYTES = 1 << 20


class Screen:
    """Standard error, opened anew: a terminal or pipe that is stuck holds up nobody, not even the agent beside."""

    def __init__(self, loop: EventLoop) -> None:
        self._tty = os.isatty(2)
        self._outlet = Outlet(_opened_anew(2), loop, _LIMIT_BYTES)
        self._no_colour = bool(os.environ.get("NO_COLOR"))

    @property
    def is_empty(self) -> bool:
        return self._outlet.is_empty or self._outlet.closed

    def say(self, text: str) -> None:
        for line in text.splitlines():
            self._put((self._paint("36", "ftlaunch ") if self._tty else "ftlaunch: ") + line)

    def show(self, name: str, line: bytes) -> None:
        self._put(self._paint("2", f"[{name}] ") + line.decode("utf-8", "replace").rstrip("\r"))

    def _put(self, text: str) -> None:
        # The agent draws its bar on the same terminal; it draws it again below.
        before = "\r\x1b[2K" if self._tty else ""
        self._outlet.write((before + text + "\n").encode("utf-8", "replace"))

    def _paint(self, code: str, text: str) -> str:
        return f"\x1b[{code}m{text}\x1b[0m" if self._tty and not self._no_colour else text


def _opened_anew(fd: int) -> int:
    """Not to wait is a property of what is open, and the agent beside writes to the same. (The place in a file is one
    too, and is to be shared; and a socket cannot be opened.)"""
    kind = os.fstat(fd).st_mode
    if not (stat.S_ISREG(kind) or stat.S_ISSOCK(kind)):
        with contextlib.suppress(OSError):
            return os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    return os.dup(fd)
