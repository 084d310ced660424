"""One run per output folder at a time: the second start is refused with the name of the first."""

from __future__ import annotations

import fcntl
import os
import re
import socket
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from launcher.errors import ExitCode, LockedElsewhere, UserError

WAIT_S = 120.0  # NFS keeps the lock of a lost client until its lease ends
_LOOK_EVERY_S = 1.0


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


class RunLock:
    """Holds `ftlaunch/lock` (flock) for the life of the agent; the kernel releases it however the agent ends.

    A holder on this machine that is alive is a second start: refused at once. A holder elsewhere may be a lost
    machine whose
    lock the file server has not released yet: waited for, at most `WAIT_S`.
    """

    def __init__(
        self,
        output_dir: Path,
        *,
        say: Callable[[str], None] = lambda _: None,
        stopped: Callable[[], bool] = lambda: False,
        stop_exit_code: ExitCode = ExitCode.STOPPED,
    ) -> None:
        self._path = output_dir / "ftlaunch" / "lock"
        self._say = say
        self._stopped = stopped
        self._stop_exit_code = stop_exit_code
        self._fd = -1

    def __enter__(self) -> RunLock:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            self._take()
        except UserError:
            os.close(self._fd)
            raise
        return self

    def _take(self) -> None:
        deadline = time.monotonic() + WAIT_S
        said = False
        while True:
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                holder = os.pread(self._fd, 200, 0).decode("utf-8", "replace").strip() or "an unknown process"
                self._refuse_a_living_neighbour(holder)
                folder = self._path.parent.parent
                if time.monotonic() > deadline or self._stopped():
                    raise LockedElsewhere(
                        f"{folder} is still locked by {holder}; run it again", self._stop_exit_code
                    ) from None
                if not said:
                    said = True
                    self._say(f"{folder} is locked by {holder}; waiting at most {WAIT_S:.0f} s for it to go")
                time.sleep(_LOOK_EVERY_S)
            except OSError as error:
                # Some object mounts know no locks (JindoFuse, ossfs): the run goes on without this guard.
                self._say(f"{self._path}: no locks on this file system ({error.strerror}): start this run only once")
                return
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, holder_text().encode(), 0)

    def _refuse_a_living_neighbour(self, holder: str) -> None:
        """Same machine boot, same PID namespace, and the process that started when the holder says: it is alive."""
        found = re.fullmatch(r"pid (\d+) on \S+ \((.+)\)", holder)
        if found and int(found[1]) != os.getpid() and process_identity(int(found[1])) == found[2]:
            raise UserError(
                f"{self._path.parent.parent} is in use by another ftlaunch ({holder}). Two runs in one folder would "
                "overwrite each other's checkpoints: stop the other one, or choose another output_dir."
            )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._fd)
