"""One request that is being worked on: how far it is, and whether it is still wanted."""

from __future__ import annotations

import threading
from collections.abc import Callable

from launcher.courier.messages import Cause, Failed


class Job:
    """Shared by the threads that work on it and the one that reports. `number`: the request's `id`."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.bytes_total = 0
        self.bytes_done = 0
        self.begun = False  # its turn has come
        self._stop = threading.Event()
        self._turn = threading.Lock()
        self._interrupts: list[Callable[[], None]] = []
        self._interrupted = False
        self.fds: list[int] = []  # that go with the answer

    def add_bytes(self, num_bytes: int) -> None:
        with self._turn:
            self.bytes_done += num_bytes

    def on_interrupt(self, interrupt: Callable[[], None]) -> None:
        """Called at `interrupt`, perhaps at once, in another thread: what waits is to fail."""
        with self._turn:
            self._interrupts.append(interrupt)
            late = self._interrupted
        if late:
            interrupt()

    def interrupt(self) -> None:
        """The request comes to nothing: none of its threads is to wait any more."""
        with self._turn:
            self._interrupted = True
            interrupts = list(self._interrupts)
        for interrupt in interrupts:
            interrupt()

    def cancel(self) -> None:
        self._stop.set()
        self.interrupt()

    @property
    def cancelled(self) -> bool:
        return self._stop.is_set()

    def require_wanted(self) -> None:
        """Raises Failed once the request is cancelled."""
        if self.cancelled:
            raise Failed(Cause.CANCELLED, "the agent has called it off")
