"""Who uses an output folder: `ftlaunch/lock` (flock), held by each agent for its life.

The agent of one node holds it alone; the agents of many nodes share it (`cluster_folder.py`). So the two kinds exclude
each other, and the second start is refused with the name of the first. The kernel releases the lock however the agent
ends.
"""

from __future__ import annotations

import fcntl
import os
import re
import socket
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from launcher.errors import ExitCode, LockedElsewhere, RunsHereAlready

WAIT_S = 120.0  # NFS keeps the lock of a lost client until its lease ends
CLUSTER_NAME = "cluster"  # in `ftlaunch`: what the agents of many nodes keep
AGENTS_NAME = "agents"  # in an epoch's folder: one file for each of its agents, its holder's text in it
_LOOK_EVERY_S = 1.0
_TEXT_BYTES = 256  # one sector: written by one call, so that a kill leaves the old text or the new one
_NUM_NAMED = 5


def holder_text() -> str:
    """`pid 7 on host (identity)`: a pod that replaces a lost one may have its name and even its pid, not its
    identity."""
    return f"pid {os.getpid()} on {socket.gethostname()} ({process_identity(os.getpid())})"


def process_identity(pid: int) -> str | None:
    """What no other process, namespace or boot shares; None when there is no such process here."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
        namespace = os.readlink("/proc/self/ns/pid")
        started = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[19].decode()
    except (OSError, IndexError):
        return None
    return f"boot {boot[:8]}, {namespace}, started {started}"


def lives_here(holder: str) -> bool:
    """Same machine boot, same PID namespace, and another process than this that started when the text says."""
    found = re.search(r"pid (\d+) on \S+ \((.+?)\)", holder)
    return bool(found and int(found[1]) != os.getpid() and process_identity(int(found[1])) == found[2])


class LockFile:
    """A file that is locked, and whose text says by whom or what for. Closing it releases the lock."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)

    def take(self, how: int) -> bool:
        """how: LOCK_EX or LOCK_SH. False while others hold it in a way that excludes this.

        A lock that was held the other way before may be lost by that: flock converts in two steps. Raises OSError
        where the file system knows no locks.
        """
        try:
            fcntl.flock(self._fd, how | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def release(self) -> None:
        fcntl.flock(self._fd, fcntl.LOCK_UN)

    def read(self) -> str:
        return os.pread(self._fd, _TEXT_BYTES, 0).decode("utf-8", "replace").strip()

    def write(self, text: str) -> None:
        """Durable before it returns. Never a mixture of two texts, also after a kill in the midst."""
        os.pwrite(self._fd, text.encode()[: _TEXT_BYTES - 1].ljust(_TEXT_BYTES - 1) + b"\n", 0)
        os.ftruncate(self._fd, _TEXT_BYTES)
        os.fsync(self._fd)

    def close(self) -> None:
        os.close(self._fd)


@dataclass(frozen=True)
class LockWait:
    """How a start waits for a lock: a holder on this machine that is alive is a second start, refused at once. A holder
    elsewhere may be a lost machine whose lock the file server has not released yet: waited for, at most `WAIT_S`."""

    say: Callable[[str], None]
    stopped: Callable[[], bool]
    stop_exit_code: ExitCode

    def until(self, folder: Path, taken: Callable[[], bool], holders: Callable[[], Iterable[str]]) -> None:
        """Returns once `taken()`. Raises UserError for a neighbour, LockedElsewhere at the bound or when stopped."""
        deadline = time.monotonic() + WAIT_S
        pause_s, said = 0.01, False
        while not taken():
            named = [holder for holder in holders() if holder]
            refuse_a_living_neighbour(folder, named)
            holder = "; ".join(named[:_NUM_NAMED]) + (" and others" if len(named) > _NUM_NAMED else "")
            holder = holder or "an unknown process"
            if time.monotonic() > deadline or self.stopped():
                raise LockedElsewhere(f"{folder} is still locked by {holder}; run it again", self.stop_exit_code)
            if not said and pause_s >= _LOOK_EVERY_S:  # agents that start together hold it for moments
                said = True
                self.say(f"{folder} is locked by {holder}; waiting at most {WAIT_S:.0f} s for it to go")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LOOK_EVERY_S)


def refuse_a_living_neighbour(folder: Path, holders: Iterable[str]) -> None:
    for holder in holders:
        if lives_here(holder):
            raise RunsHereAlready(
                f"{folder} is in use by another ftlaunch ({holder}). Two runs in one folder would "
                "overwrite each other's checkpoints: stop the other one, or choose another output_dir."
            )


def epoch_text(number: int) -> str:
    """What the lock says while the agents of many nodes share it."""
    return f"epoch {number}"


def epoch_in(text: str) -> int | None:
    found = re.fullmatch(r"epoch (\d{1,18})", text)
    return int(found[1]) if found else None


def holders_in(output_dir: Path, text: str) -> list[str]:
    """By the text of its lock: one process, or `n0: pid 7 on host (...)` for each agent of the epoch, dead ones too."""
    if text.startswith("pid "):
        return [text]
    number = epoch_in(text)
    folders = (output_dir / "ftlaunch" / CLUSTER_NAME).glob(f"epoch-{'*' if number is None else number}/{AGENTS_NAME}")
    found = []
    for path in sorted(path for folder in folders for path in folder.iterdir()):
        holder = _read_text(path)
        if holder:
            found.append(f"{path.name}: {holder}")
    return found


def _read_text(path: Path) -> str:
    try:
        return path.read_bytes()[:_TEXT_BYTES].decode("utf-8", "replace").strip()
    except OSError:
        return ""  # its epoch is being removed


class RunLock:
    """Holds `ftlaunch/lock` alone, for the life of the agent of a run on one node."""

    def __init__(
        self,
        output_dir: Path,
        *,
        say: Callable[[str], None] = lambda _: None,
        stopped: Callable[[], bool] = lambda: False,
        stop_exit_code: ExitCode = ExitCode.STOPPED,
    ) -> None:
        self._output_dir = output_dir
        self._path = output_dir / "ftlaunch" / "lock"
        self._say = say
        self._wait = LockWait(say, stopped, stop_exit_code)
        self._file: LockFile | None = None
        self._holds = False

    def __enter__(self) -> RunLock:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        file = LockFile(self._path)
        try:
            self._wait.until(
                self._output_dir, lambda: self._take(file), lambda: holders_in(self._output_dir, file.read())
            )
        except BaseException:
            file.close()
            raise
        self._file = file
        return self

    def _take(self, file: LockFile) -> bool:
        try:
            self._holds = file.take(fcntl.LOCK_EX)
        except OSError as error:
            self._go_without(file, f"{self._path}: no locks on this file system ({error.strerror})")
            return True
        if self._holds:
            file.write(holder_text())
        return self._holds

    def _go_without(self, file: LockFile, what: str) -> None:
        """Some object mounts know no locks (JindoFuse, ossfs): the text alone tells of others. It is enough for a
        second start on this machine, which is refused (UserError); of another machine nobody knows whether it lives."""
        holders: list[str] = []
        with suppress(OSError):
            holders = holders_in(self._output_dir, file.read())
        refuse_a_living_neighbour(self._output_dir, holders)
        named = f" (the lock names {holders[0]}: make sure that it has ended)" if holders else ""
        self._say(f"{what}: start this run only once{named}")
        with suppress(OSError):
            file.write(holder_text())
            self._holds = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is None:
            return
        if self._holds:
            with suppress(OSError):  # else this process, while it is on its way out, looks like a holder of the lock
                self._file.write("")
        self._file.close()
