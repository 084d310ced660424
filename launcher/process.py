"""Linux process calls that Python does not offer, and how descendants are found and ended.

Nothing here ever signals a process that this run did not start: descendants are found by parentage (the agent is a
subreaper, so none can leave) or by the run's random token in their environment.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Iterable

RUN_TOKEN_VARIABLE = "FTLAUNCH_RUN_TOKEN"

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_PTRACER = 0x59616D61
_libc = ctypes.CDLL(None, use_errno=True)


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value})")


def die_with_parent(parent_pid: int) -> None:
    """SIGKILL for this process when its parent dies; at once if the parent is gone already."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os.kill(os.getpid(), signal.SIGKILL)


def become_subreaper() -> None:
    """Orphaned descendants become children of this process instead of PID 1's."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def let_trace(pid: int) -> None:
    """Process `pid` and its descendants may look into this one, also where Yama allows that to ancestors only."""
    with contextlib.suppress(OSError):  # a kernel without Yama does not know it, and needs no leave
        _prctl(_PR_SET_PTRACER, pid)


def wait_until_adopted(parent_pid: int, timeout_s: float = 10.0) -> None:
    """Return once `parent_pid` is the parent (the middle process of a double fork has gone)."""
    deadline = time.monotonic() + timeout_s
    while os.getppid() != parent_pid:
        if time.monotonic() > deadline:
            raise TimeoutError(f"process {os.getpid()} was not adopted by {parent_pid} within {timeout_s:.0f} s")
        time.sleep(0.0005)


def _parents() -> dict[int, int]:
    """pid -> parent pid of every process that can be seen."""
    parents = {}
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as stream:
                fields = stream.read().rpartition(b")")[2].split()
        except OSError:
            continue
        if fields[0] not in (b"Z", b"X"):
            parents[int(name)] = int(fields[1])
    return parents


def descendants(root_pid: int, *, without: Iterable[int] = ()) -> list[int]:
    """Living descendants of `root_pid`; the subtrees of `without` are left out."""
    parents = _parents()
    children: dict[int, list[int]] = {}
    for pid, parent in parents.items():
        children.setdefault(parent, []).append(pid)
    left_out = set(without)
    found: list[int] = []
    queue = [root_pid]
    while queue:
        for child in children.get(queue.pop(), []):
            if child not in left_out:
                found.append(child)
                queue.append(child)
    return found


def sessions_of(pids: Iterable[int]) -> frozenset[int]:
    """Session ids of these processes; those that have ended are left out."""
    found = set()
    for pid in pids:
        try:
            found.add(os.getsid(pid))
        except ProcessLookupError:
            continue
    return frozenset(found)


def carriers_of(token: str) -> list[int]:
    """Processes whose environment at exec held `FTLAUNCH_RUN_TOKEN=token`, this one left out."""
    needle = f"{RUN_TOKEN_VARIABLE}={token}".encode()
    found = []
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == os.getpid():
            continue
        try:
            with open(f"/proc/{name}/environ", "rb") as stream:
                if needle in stream.read().split(b"\0"):
                    found.append(int(name))
        except OSError:
            continue
    return found


def kill_all(pids: Iterable[int], number: int = signal.SIGKILL) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue
