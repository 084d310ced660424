"""Who uses an output folder on an object mount. Nothing there can be locked for other machines.

On this machine a lock on a local file keeps a second start out. Of two starts on two machines the later one wins: its
generations clear the fence of the earlier ones' (`launcher/checkpoint/publish.py`), which publish nothing any more.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from launcher.agent.run_lock import RunLock, holder_text, process_identity
from launcher.checkpoint.object_file import replace_object
from launcher.errors import ExitCode
from launcher.host.local_folder import local_folder


class ObjectRunLock(RunLock):
    """As RunLock. `ftlaunch/lock` says who holds it, for people and for `ftlaunch status`."""

    def __init__(
        self,
        output_dir: Path,
        *,
        say: Callable[[str], None] = lambda _: None,
        stopped: Callable[[], bool] = lambda: False,
        stop_exit_code: ExitCode = ExitCode.STOPPED,
    ) -> None:
        super().__init__(output_dir, say=say, stopped=stopped, stop_exit_code=stop_exit_code)
        self._shown = self._path
        self._path = local_folder(output_dir) / "lock"

    def __enter__(self) -> ObjectRunLock:
        super().__enter__()
        try:
            self._shown.parent.mkdir(parents=True, exist_ok=True)
            before = self._shown.read_text("utf-8", "replace").strip() if self._shown.exists() else ""
            if before and not was_here(before):
                self._say(
                    f"{self._shown}: the last start ({before}) was on another machine and has not said that it ended. "
                    "This storage has no locks: see to it that it is gone. If it is not, this start takes over, and "
                    "that one can save no more"
                )
            replace_object(self._shown, holder_text().encode() + b"\n")
        except BaseException:
            super().__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with suppress(OSError):
            replace_object(self._shown, b"\n")
        super().__exit__(kind, error, trace)


def was_here(holder: str) -> bool:
    """Whether its process would be seen from here: same boot, same PID namespace."""
    here = (process_identity(os.getpid()) or "").rpartition(",")[0]
    return bool(here) and f"({here}," in holder
