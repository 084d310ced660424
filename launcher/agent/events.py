"""The run's event stream: one JSON object a line, appended with one write, never rewritten."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

VERSION = 1


def utc_now() -> datetime:
    return datetime.now(timezone.utc)


class AppendedLines:
    """A file to which whole JSON lines are appended; O_APPEND and one write each, so lines of several writers do not
    mix."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        cut_short = path.is_file() and _last_byte(path) not in (b"", b"\n")
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        if cut_short:  # by a full disk or a lost machine: the next record must not be glued to it
            os.write(self._fd, b"\n")

    def append(self, record: dict[str, Any]) -> None:
        os.write(self._fd, json.dumps(record, ensure_ascii=False, default=str).encode() + b"\n")

    def close(self) -> None:
        os.close(self._fd)


def _last_byte(path: Path) -> bytes:
    with path.open("rb") as stream:
        stream.seek(0, os.SEEK_END)
        stream.seek(max(0, stream.tell() - 1))
        return stream.read(1)


class EventLog:
    """Events of this node (see docs/events.md for names and fields)."""

    def __init__(self, output_dir: Path, node: str, clock: Callable[[], datetime] = utc_now) -> None:
        self.path = events_path(output_dir, node)
        self.node = node
        self.generation = 0
        self._clock = clock
        self._lines = AppendedLines(self.path)

    def emit(self, event: str, **fields: Any) -> None:
        now = self._clock().isoformat(timespec="milliseconds").replace("+00:00", "Z")
        self._lines.append(
            {"v": VERSION, "t": now, "node": self.node, "gen": self.generation, "event": event, **fields}
        )


def events_path(output_dir: Path, node: str) -> Path:
    return output_dir / "ftlaunch" / "events" / f"{node}.jsonl"


def read_json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Every whole line; a last line that a kill has cut off is left out."""
    if not path.is_file():
        return
    with path.open("rb") as stream:
        for line in stream:
            try:
                record = json.loads(line)
            except ValueError:
                continue
            if isinstance(record, dict):
                yield record
