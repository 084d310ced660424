"""Where the agent keeps what is written bit by bit and read meanwhile: the ranks' logs, and what the ranks are told.

On an object mount that is a folder of this node alone. Logs are copied to the output folder when an attempt is over:
they are lost with a machine that is lost before.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from launcher.checkpoint.object_file import chunks_of, put_object
from launcher.host.local_folder import local_folder
from launcher.host.storage import StorageKind


class WorkFolder:
    def __init__(self, output_dir: Path, kind: StorageKind) -> None:
        self._shown = output_dir / "ftlaunch"
        self._is_local = kind is StorageKind.OBJECT
        self._folder = local_folder(output_dir) if self._is_local else self._shown
        self._sizes: dict[Path, int] = {}
        if self._is_local:
            shutil.rmtree(self.logs, ignore_errors=True)  # of an earlier start; this one has the lock

    @property
    def logs(self) -> Path:
        return self._folder / "logs"

    def write_spec(self, name: str, text: str) -> Path:
        """`ftlaunch/launch/<name>` for people; returns what the ranks read. Raises OSError."""
        shown = self._shown / "launch" / name
        shown.parent.mkdir(parents=True, exist_ok=True)
        shown.write_text(text, "utf-8")
        if not self._is_local:
            return shown
        told = self._folder / name
        told.write_text(text, "utf-8")
        return told

    def shown(self, log: Path) -> Path:
        """Where people find it, also when this machine is gone."""
        return self._shown / "logs" / log.relative_to(self.logs)

    def close(self) -> str:
        """The last logs are shown, and nothing is left on this disk; or why not."""
        trouble = self.show_logs()
        if self._is_local and not trouble:
            for left in self._folder.iterdir():
                if left.is_dir():
                    shutil.rmtree(left, ignore_errors=True)
                elif left.name.startswith("spec"):
                    left.unlink(missing_ok=True)
        return trouble

    def show_logs(self) -> str:
        """Copy what is new to the output folder; "" or why that failed."""
        if not self._is_local or not self.logs.is_dir():
            return ""
        try:
            for log in sorted(self.logs.rglob("*.log")):
                size_bytes = log.stat().st_size
                if self._sizes.get(log) == size_bytes:
                    continue
                shown = self.shown(log)
                shown.parent.mkdir(parents=True, exist_ok=True)
                put_object(shown, chunks_of(log))
                self._sizes[log] = size_bytes
        except OSError as error:
            return f"logs could not be copied to the output folder, they are in {self.logs}: {error}"
        return ""
