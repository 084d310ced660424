"""Which processes live in a network namespace, and how they are killed.

Invariant: only processes inside the given namespaces are signalled. Membership is read from /proc/PID/ns/net while a
pidfd pins the process, so a reused PID is never hit; the caller holds the namespace open, so its inode is not reused.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Collection


def namespace_of(pid: int) -> int | None:
    """Inode of the network namespace of a process; None when the process is gone or a zombie."""
    try:
        return os.stat(f"/proc/{pid}/ns/net").st_ino
    except OSError:
        return None


def processes_in(namespaces: Collection[int]) -> list[int]:
    return [int(entry) for entry in os.listdir("/proc") if entry.isdigit() and namespace_of(int(entry)) in namespaces]


def kill_in(namespaces: Collection[int], *, spared: Collection[int] = (), within_s: float = 10.0) -> list[int]:
    """SIGKILL to every process of the namespaces but the spared ones, again until none is left.

    Returns the PIDs that were killed; raises TimeoutError with those that would not die.
    """
    killed: dict[int, None] = {}
    deadline = time.monotonic() + within_s
    while True:
        alive = [pid for pid in processes_in(namespaces) if pid not in spared]
        if not alive:
            return list(killed)
        if time.monotonic() > deadline:
            raise TimeoutError(f"still alive {within_s:g} s after SIGKILL: {alive}")
        for pid in alive:
            if _kill_if_in(pid, namespaces):
                killed[pid] = None
        time.sleep(0.005)  # a killed process has no event here: it is not our child


def _kill_if_in(pid: int, namespaces: Collection[int]) -> bool:
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return False
    try:
        if namespace_of(pid) not in namespaces:
            return False
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(handle, signal.SIGKILL)
        return True
    finally:
        os.close(handle)
