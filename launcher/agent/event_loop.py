"""One selector for everything an agent waits for: sockets, pidfds, signals, bounds. Single-threaded, no polling but a
tick."""

from __future__ import annotations

import selectors
import signal
import socket
import time
from collections.abc import Callable
from typing import Any

TICK_S = 1.0
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class EventLoop:
    """`on_tick` is called after every wait, which lasts at most `TICK_S`."""

    def __init__(self, on_tick: Callable[[], None]) -> None:
        self._selector = selectors.DefaultSelector()
        self._on_tick = on_tick
        self._bounds: dict[str, tuple[float, Callable[[], None]]] = {}

    def register(self, source: Any, handler: Callable[[], None]) -> None:
        """Call `handler` whenever `source` (a descriptor or an object with `fileno`) is readable."""
        self._selector.register(source, selectors.EVENT_READ, handler)

    def unregister(self, source: Any) -> None:
        """Stop watching; harmless when it is not watched."""
        try:
            self._selector.unregister(source)
        except KeyError:
            return

    def set_bound(self, name: str, seconds: float, handler: Callable[[], None]) -> None:
        """Call `handler` once after `seconds`; a bound of the same name is replaced."""
        self._bounds[name] = (time.monotonic() + seconds, handler)

    def clear_bounds(self) -> None:
        self._bounds.clear()

    def catch_stop_signals(self, handler: Callable[[int], None]) -> None:
        """From now on SIGTERM, SIGINT and SIGHUP only call `handler` with their number, from within `wait`."""
        reader, writer = socket.socketpair()
        for end in (reader, writer):
            end.setblocking(False)
        self._signal_ends = (reader, writer)
        for number in _STOP_SIGNALS:
            signal.signal(number, lambda *_: None)
        signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)

        def read() -> None:
            for number in reader.recv(4096):
                if number in _STOP_SIGNALS:
                    handler(number)

        self.register(reader, read)

    def wait(self) -> None:
        """Wait for the next thing to happen, at most until the nearest bound or the tick, and handle it."""
        now = time.monotonic()
        timeout_s = min([TICK_S, *(max(0.0, at - now) for at, _ in self._bounds.values())])
        for key, _ in self._selector.select(timeout_s):
            handler: Callable[[], None] = key.data
            handler()
        now = time.monotonic()
        for name, (at, handler) in list(self._bounds.items()):
            if at <= now and name in self._bounds:
                del self._bounds[name]
                handler()
        self._on_tick()

    def close(self) -> None:
        signal.set_wakeup_fd(-1)
        self._selector.close()
