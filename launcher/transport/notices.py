"""Lines for the log about what others do: once a minute for each of them and reason, however often it happens."""

from __future__ import annotations

import time
from collections.abc import Callable

AGAIN_S = 60.0
MAX_KEPT = 1024


class Notices:
    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._said_at: dict[tuple[str, str], float] = {}

    def say(self, who: str, reason: str, text: str) -> None:
        now = time.monotonic()
        if now - self._said_at.get((who, reason), -AGAIN_S) < AGAIN_S:
            return
        if len(self._said_at) >= MAX_KEPT:
            self._said_at = {key: at for key, at in self._said_at.items() if now - at < AGAIN_S}
            if len(self._said_at) >= MAX_KEPT:
                return  # so many in a minute are a flood
        self._said_at[who, reason] = now
        self._say(text)
