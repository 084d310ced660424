"""One selector for everything an agent waits for: sockets, pidfds, signals, bounds. Single-threaded, no polling but a
tick."""

from __future__ import annotations

import select
import selectors
import signal
import socket
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from launcher.errors import Cancelled
from launcher.link import STOP_SIGNALS

TICK_S = 1.0

_T = TypeVar("_T")


class CalledOff(Exception):  # noqa: N818 - an outcome, not a defect
    """The result of work that goes on aside is not wanted any more."""


class StopSignals:
    """From now on SIGTERM, SIGINT and SIGHUP are only remembered. Made as early as possible: as PID 1 a signal
    without a
    handler is lost. A SIGHUP that was ignored (`nohup`) stays ignored."""

    def __init__(self) -> None:
        self.reader, self._writer = socket.socketpair()
        for end in (self.reader, self._writer):
            end.setblocking(False)
        heeded = [number for number in STOP_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
        self._before = {number: signal.signal(number, lambda *_: None) for number in heeded}
        self._wakeup_before = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)

    def __enter__(self) -> StopSignals:
        return self

    def __exit__(self, *exc: object) -> None:
        """Everything as it was: a wake-up descriptor that outlives its socket would write into somebody else's file."""
        signal.set_wakeup_fd(self._wakeup_before)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self.reader.close()
        self._writer.close()

    def take(self) -> list[int]:
        """Stop signals that have come since the last call."""
        try:
            return [number for number in self.reader.recv(4096) if number in STOP_SIGNALS]
        except BlockingIOError:
            return []

    def pending(self) -> bool:
        """Whether a stop signal waits to be taken."""
        return bool(select.select([self.reader], [], [], 0)[0])


class EventLoop:
    """`on_tick` is called after every wait, which lasts at most `TICK_S`."""

    def __init__(self, on_tick: Callable[[], None] = lambda: None) -> None:
        self._selector = selectors.DefaultSelector()
        self.on_tick = on_tick
        self._bounds: dict[str, tuple[float, Callable[[], None]]] = {}
        self._kept: set[str] = set()  # names of bounds that are not of a turn
        self._timers: dict[str, tuple[float, Callable[[], None]]] = {}  # like bounds, but they outlive `clear_bounds`

    def register(self, source: Any, handler: Callable[[], None]) -> None:
        """Call `handler` whenever `source` (a descriptor or an object with `fileno`) is readable."""
        self._selector.register(source, selectors.EVENT_READ, handler)

    def watch_writing(self, source: Any, handler: Callable[[], None], *, on: bool = True) -> None:
        """Call the handler of a registered `source` also when it is writable (`on`), or no longer."""
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if on else 0)
        self._selector.modify(source, events, handler)

    def unregister(self, source: Any) -> None:
        """Stop watching; harmless when it is not watched."""
        try:
            self._selector.unregister(source)
        except KeyError:
            return

    def set_bound(self, name: str, seconds: float, handler: Callable[[], None], *, kept: bool = False) -> None:
        """Call `handler` once after `seconds`; a bound of the same name is replaced. `kept`: by `clear_bounds`."""
        self._bounds[name] = (time.monotonic() + seconds, handler)
        (self._kept.add if kept else self._kept.discard)(name)

    def clear_bounds(self) -> None:
        self._bounds = {name: bound for name, bound in self._bounds.items() if name in self._kept}

    def every(self, name: str, seconds: float, handler: Callable[[], None]) -> None:
        """Call `handler` every `seconds` from now on; `stop_timer` ends it."""

        def due() -> None:
            self._timers[name] = (time.monotonic() + seconds, due)
            handler()

        self._timers[name] = (time.monotonic() + seconds, due)

    def stop_timer(self, name: str) -> None:
        self._timers.pop(name, None)

    def deliver(self, signals: StopSignals, handler: Callable[[int], None]) -> None:
        """Call `handler` with the number of every stop signal, from within `wait`."""

        def read() -> None:
            for number in signals.take():
                handler(number)

        self.register(signals.reader, read)

    def wait(self, at_most_s: float = TICK_S) -> None:
        """Wait for the next thing to happen, at most until the nearest bound or the tick, and handle it."""
        now = time.monotonic()
        due = [at for at, _ in (*self._bounds.values(), *self._timers.values())]
        for key, _ in self._selector.select(min([at_most_s, *(max(0.0, at - now) for at in due)])):
            handler: Callable[[], None] = key.data
            handler()
        now = time.monotonic()
        for name, (at, handler) in list(self._bounds.items()):
            if at <= now and name in self._bounds:
                del self._bounds[name]
                handler()
        for name, (at, handler) in list(self._timers.items()):
            if at <= now and name in self._timers:
                handler()
        self.on_tick()

    def aside(self, work: Callable[[], _T], called_off: Callable[[], bool] = lambda: False) -> _T:
        """What `work` returns or raises. It runs in a thread of its own, while everything else here is handled as
        usual: reading a checkpoint of 100 GB takes longer than the silence after which a node counts as lost.

        Raises CalledOff once `called_off()`, without waiting for the thread: on a dead mount it may never end. So
        `work` may read, or write what is its own, but must not change what a later turn relies on.
        """
        outcome: list[tuple[bool, Any]] = []
        done, ended = socket.socketpair()

        def run() -> None:
            try:
                outcome.append((True, work()))
            except BaseException as error:  # noqa: BLE001  # raised again below, in the thread that asked
                outcome.append((False, error))
            ended.close()  # end of file wakes the selector

        self.register(done, lambda: self.unregister(done))
        try:
            threading.Thread(target=run, name="aside", daemon=True).start()
            while not outcome:
                if called_off():
                    raise CalledOff
                self.wait()
        finally:
            self.unregister(done)
            done.close()
        succeeded, value = outcome[0]
        if isinstance(value, Cancelled):
            raise CalledOff from value
        if not succeeded:
            raise value
        result: _T = value
        return result

    def close(self) -> None:
        self._selector.close()
