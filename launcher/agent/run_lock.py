"""One run per output folder at a time: the second start is refused with the name of the first."""

from __future__ import annotations

import fcntl
import os
import socket
from pathlib import Path
from types import TracebackType

from launcher.errors import UserError


class RunLock:
    """Holds `ftlaunch/lock` (flock) for the life of the agent; the kernel releases it however the agent ends."""

    def __init__(self, output_dir: Path) -> None:
        self._path = output_dir / "ftlaunch" / "lock"
        self._fd = -1

    def __enter__(self) -> RunLock:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(self._fd, 200).decode("utf-8", "replace").strip()
            os.close(self._fd)
            raise UserError(
                f"{self._path.parent.parent} is in use by another ftlaunch ({holder or 'unknown process'}). Two "
                f"runs in one folder "
                "would overwrite each other's checkpoints: stop the other one, or choose another output_dir."
            ) from None
        except OSError:
            # Some object mounts know no locks (JindoFuse, ossfs): the run goes on without this guard.
            return self
        os.ftruncate(self._fd, 0)
        os.write(self._fd, f"pid {os.getpid()} on {socket.gethostname()}".encode())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._fd)
