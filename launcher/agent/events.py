"""The run's event stream: one JSON object a line, appended with one write, never rewritten."""

from __future__ import annotations

import errno
import json
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Protocol

from launcher.agent.durable_file import fsync_folder
from launcher.agent.object_lines import ObjectLines
from launcher.diagnose.redact import redact_document
from launcher.host.storage import StorageKind

VERSION = 1
MAX_KEPT_LINES = 10_000
# What other nodes and later starts decide by: a number that is used twice, or a drill that is carried out twice, would
# be the price of a machine's loss.
_DURABLE = frozenset({"drill", "generation_started", "run_ended"})


def utc_now() -> datetime:
    return datetime.now(timezone.utc)


class Lines(Protocol):
    """A file of records that grows. Never raises for what the storage does; `trouble` says what is wrong, and is empty
    when all is well."""

    path: Path
    trouble: str

    def append(self, record: dict[str, Any], *, durable: bool = False) -> None:
        """`durable`: this line and those before it have reached the storage on return, unless there is trouble."""

    def close(self) -> int:
        """Try once more; the number of lines that could not be written."""


def lines_at(path: Path, kind: StorageKind) -> Lines:
    return ObjectLines(path) if kind is StorageKind.OBJECT else AppendedLines(path)


class AppendedLines:
    """A file to which whole JSON lines are appended; O_APPEND and one write each, so lines of several writers do not
    mix.

    A full disk or a dead mount never raises: lines are kept (the latest `MAX_KEPT_LINES`) and written when it is
    possible again. `trouble` says what is wrong, and is empty when all is written.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self.trouble = ""
        self._kept: deque[bytes] = deque(maxlen=MAX_KEPT_LINES)
        self._sync_is_due = False
        self._lock = threading.Lock()
        cut_short = path.is_file() and _last_byte(path) not in (b"", b"\n")
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        # By a full disk or a lost machine: the next record must not be glued to it. (Another writer's line, seen half
        # written, gets a blank line after it, which readers skip.)
        if cut_short:
            self._kept.append(b"\n")

    def append(self, record: dict[str, Any], *, durable: bool = False) -> None:
        """`durable`: this line and those before it have reached the storage on return, unless there is trouble."""
        text = json.dumps(record, ensure_ascii=False, default=str)
        with self._lock:  # work that is done aside (`EventLoop.aside`) records as well
            self._kept.append(text.encode("utf-8", "backslashreplace") + b"\n")
            self._sync_is_due |= durable
            self._write_kept()

    def _write_kept(self) -> None:
        try:
            while self._kept:
                written = os.write(self._fd, self._kept[0])
                if written < len(self._kept[0]):  # the disk became full within the line: end it, write it whole later
                    self._kept[0] = b"\n" if written == len(self._kept[0]) - 1 else b"\n" + self._kept[0]
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                self._kept.popleft()
            if self._sync_is_due:
                os.fsync(self._fd)
                for folder in (self.path.parent, self.path.parent.parent):  # the file may be new, its folder, too
                    fsync_folder(folder)
                self._sync_is_due = False
            self.trouble = ""
        except OSError as error:
            self.trouble = f"{self.path}: {error.strerror}"

    def close(self) -> int:
        """Try once more; the number of lines that could not be written."""
        self._write_kept()
        os.close(self._fd)
        return len(self._kept)


def _last_byte(path: Path) -> bytes:
    with path.open("rb") as stream:
        stream.seek(0, os.SEEK_END)
        stream.seek(max(0, stream.tell() - 1))
        return stream.read(1)


class EventLog:
    """Events of this node (see docs/events.md for names and fields)."""

    def __init__(
        self,
        output_dir: Path,
        node: str,
        clock: Callable[[], datetime] = utc_now,
        *,
        kind: StorageKind = StorageKind.POSIX,
    ) -> None:
        self.path = events_path(output_dir, node)
        self.node = node
        self.generation = 0
        self._clock = clock
        self._lines = lines_at(self.path, kind)

    @property
    def trouble(self) -> str:
        """Why events cannot be written at the moment; empty when they can."""
        return self._lines.trouble

    def emit(self, event: str, **fields: Any) -> None:
        now = self._clock().isoformat(timespec="milliseconds").replace("+00:00", "Z")
        record = {
            "v": VERSION,
            "t": now,
            "node": self.node,
            "gen": self.generation,
            "event": event,
            **redact_document(fields),
        }
        self._lines.append(record, durable=event in _DURABLE)


def events_path(output_dir: Path, node: str) -> Path:
    return output_dir / "ftlaunch" / "events" / f"{node}.jsonl"


def read_json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Every whole line; a last line that a kill has cut off is left out."""
    try:
        stream = path.open("rb")
    except FileNotFoundError:
        return
    with stream:
        for line in stream:
            try:
                record = json.loads(line)
            except ValueError:
                continue
            if isinstance(record, dict):
                yield record
