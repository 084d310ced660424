"""Real processes for tests of what agents share: many at once, and one that is killed at its n-th change."""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class Child:
    """A forked process that runs `work`; what `work` gives to its argument `tell` can be read here, line by line."""

    def __init__(self, work: Callable[[Callable[[Any], None]], Any]) -> None:
        read_fd, write_fd = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(read_fd)
            code = 1
            try:
                with os.fdopen(write_fd, "w", buffering=1) as stream:
                    work(lambda value: print(json.dumps(value), file=stream, flush=True))
                code = 0
            except BaseException:  # noqa: BLE001  # the child's edge
                traceback.print_exc()
            finally:
                os._exit(code)
        os.close(write_fd)
        self._said = os.fdopen(read_fd)
        self._status: int | None = None

    def hear(self) -> Any:
        """The next thing told; None when the child has ended."""
        line = self._said.readline()
        return json.loads(line) if line else None

    def kill(self) -> int:
        if self._status is None:
            os.kill(self.pid, signal.SIGKILL)
        return self.wait()

    def wait(self) -> int:
        """As `subprocess` says it: the exit code, or minus the signal."""
        if self._status is None:
            self._status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
            self._said.close()
        return self._status


@contextmanager
def child(work: Callable[[Callable[[Any], None]], Any]) -> Iterator[Child]:
    process = Child(work)
    try:
        yield process
    finally:
        process.kill()


def race(num: int, work: Callable[[int], Any]) -> list[Any]:
    """`work(0)` ... `work(num - 1)` in processes that start at one moment and all live until the last is done."""
    start_read, start_write = os.pipe()
    end_read, end_write = os.pipe()

    def run(number: int, tell: Callable[[Any], None]) -> None:
        os.close(start_write)
        os.close(end_write)
        os.read(start_read, 1)
        work_until = work(number)
        tell(next(work_until))
        os.read(end_read, 1)
        work_until.close()

    processes = [Child(lambda tell, number=number: run(number, tell)) for number in range(num)]
    try:
        os.close(start_write)
        told = [process.hear() for process in processes]
        os.close(end_write)
        assert [process.wait() for process in processes] == [0] * num
        return told
    finally:
        os.close(start_read)
        os.close(end_read)
        for process in processes:
            process.kill()


def killed_at_each_change(work: Callable[[Callable[[Any], None]], Any]) -> Iterator[list[Any]]:
    """`work` in one process after another, the n-th killed (SIGKILL) before its n-th call that changes a file, a folder
    or a lock, until one comes to its end. Yields what each told."""
    number, ended = 0, False
    while not ended:
        number += 1
        process = Child(lambda tell, left=number: _die_at(left, lambda: work(tell)))
        told = []
        while (word := process.hear()) is not None:
            told.append(word)
        status = process.wait()
        assert status in (0, -signal.SIGKILL), status
        ended = status == 0
        yield told
    assert number > 5, "the calls are not where the test looks for them"


# Of posix, fcntl and streams; what pathlib and shutil do comes down to them.
CHANGES = frozenset(
    ("open", "write", "pwrite", "flush", "fsync", "ftruncate", "rename", "replace", "link", "unlink", "mkdir", "rmdir")
) | {"flock", "close"}


def _die_at(left: int, work: Callable[[], Any]) -> None:
    def on_event(_: FrameType, event: str, called: Any) -> None:
        nonlocal left
        if event == "c_call" and called.__name__ in CHANGES:
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.setprofile(on_event)
    try:
        work()
    finally:
        sys.setprofile(None)
