"""Records (events, samples) on an object mount, where a line cannot be appended: JindoFuse refuses it, and s3fs uploads
the whole file for it.

Invariants: the old or the new content of a file is there at any time (`replace_object`; where a mount takes the old
name away first, under the temporary one); a part that is full is never written again, so what a record costs does not
grow with the run. Parts of `n0.jsonl` are `n0.part-0001.jsonl`, ...: readers take every `*.jsonl`, and sorted they are
in order.

What was said in the last seconds is lost with the machine, unless it was durable.
"""

from __future__ import annotations

import json
import re
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from launcher.checkpoint.object_file import replace_object

EVERY_S = 2.0
PART_BYTES = 1 << 20
_DURABLE_WITHIN_S = 20.0
_MAX_WAITING = 16  # parts that the mount did not take
_SHARE_OF_TIME = 10  # the storage gets a tenth of the time


class ObjectLines:
    """As `AppendedLines`: never raises for what the storage does; `trouble` says what is wrong."""

    def __init__(self, path: Path, *, every_s: float = EVERY_S, part_bytes: int = PART_BYTES) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self.trouble = ""
        self._every_s = every_s
        self._part_bytes = part_bytes
        self._parts: dict[Path, bytearray] = {}  # of which something is not there yet; the last one grows
        self._changed = threading.Condition()
        self._num_appended = self._num_stored = 0
        self._urgent = self._closing = False
        self._growing = self._last_part()
        self._content = bytearray(self._left_by_a_kill(self._growing))
        if self._content:
            self._parts[self._growing] = self._content
        elif self._growing.exists():
            self._content += self._growing.read_bytes()
        if self._content and not self._content.endswith(b"\n"):
            self._content += b"\n"
        self._thread = threading.Thread(target=self._store, name=f"records: {path.name}", daemon=True)
        self._thread.start()

    def append(self, record: dict[str, Any], *, durable: bool = False) -> None:
        """`durable`: this line and those before it have reached the storage on return, unless there is trouble."""
        line = json.dumps(record, ensure_ascii=False, default=str).encode("utf-8", "backslashreplace") + b"\n"
        with self._changed:
            if len(self._content) + len(line) > self._part_bytes and self._content:
                self._growing, self._content = self._next_part(self._growing), bytearray()
            self._content += line
            self._parts[self._growing] = self._content
            while len(self._parts) > _MAX_WAITING:
                del self._parts[next(iter(self._parts))]
            self._num_appended += 1
            if not durable:
                return
            number, self._urgent = self._num_appended, True
            self._changed.notify_all()
            if not self._changed.wait_for(lambda: self._num_stored >= number or self.trouble, _DURABLE_WITHIN_S):
                self.trouble = f"{self.path}: not stored within {_DURABLE_WITHIN_S:.0f} s"

    def flush(self) -> None:
        """What was appended can be read, unless there is trouble."""
        with self._changed:
            number, self._urgent = self._num_appended, True
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._num_stored >= number or self.trouble, _DURABLE_WITHIN_S)

    def close(self) -> int:
        """Try once more; the number of lines that could not be written."""
        self.flush()
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            return self._num_appended - self._num_stored

    # ---- the thread ----

    def _store(self) -> None:
        pause_s = self._every_s
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._urgent or self._closing, pause_s)
                if self._closing:
                    return
                self._urgent = False
                waiting = [(path, bytes(content)) for path, content in self._parts.items()]
                number = self._num_appended
            if not waiting:
                continue
            began = time.monotonic()
            trouble = _store_all(waiting)
            pause_s = max(self._every_s, _SHARE_OF_TIME * (time.monotonic() - began))
            with self._changed:
                self.trouble = trouble
                if not trouble:
                    self._num_stored = number
                    for path, content in waiting:
                        if len(self._parts.get(path, b"")) == len(content):
                            del self._parts[path]
                self._changed.notify_all()

    # ---- parts ----

    def _left_by_a_kill(self, part: Path) -> bytes:
        """What a `replace_object` that was cut short had for `part`, where the mount had taken the old name away
        already. What else such ones have left is removed."""
        found = b""
        for left in self.path.parent.glob(f".{self.path.stem}*.jsonl.????????????????"):
            with suppress(OSError):
                if left.name.startswith(f".{part.name}.") and not part.exists():
                    found = max(found, left.read_bytes(), key=len)
                else:
                    left.unlink()
        return found[: found.rfind(b"\n") + 1]

    def _last_part(self) -> Path:
        found = sorted(self.path.parent.glob(f"{self.path.stem}.part-????.jsonl"))
        last = found[-1] if found else self.path
        if last.exists() and last.stat().st_size >= self._part_bytes:
            return self._next_part(last)
        return last

    def _next_part(self, part: Path) -> Path:
        number = re.search(r"\.part-(\d+)$", part.stem)
        return self.path.with_name(f"{self.path.stem}.part-{int(number[1]) + 1 if number else 1:04}.jsonl")


def _store_all(parts: list[tuple[Path, bytes]]) -> str:
    for path, content in parts:
        try:
            replace_object(path, content)
        except OSError as error:
            return f"{path}: {error.strerror}"
    return ""
