"""A bound on calls that have none: `statvfs` on a dead NFS server and name resolution may wait for minutes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent import futures
from typing import TypeVar

T = TypeVar("T")


def within(timeout_s: float, call: Callable[[], T], what: str) -> T:
    """`call()`, or `TimeoutError` naming `what` after `timeout_s` seconds. Whatever `call` raises is raised here.

    The thread of a call that never comes back is a daemon: it cannot keep the process alive.
    """
    answer: futures.Future[T] = futures.Future()

    def run() -> None:
        try:
            answer.set_result(call())
        except Exception as error:  # noqa: BLE001  # this thread's edge: the caller gets it from `result`
            answer.set_exception(error)

    threading.Thread(target=run, name=f"bounded: {what}", daemon=True).start()
    finished, _ = futures.wait([answer], timeout_s)
    if not finished:
        raise TimeoutError(f"{what} gave no answer within {timeout_s:g} s")
    return answer.result()
