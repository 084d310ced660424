"""Words about long work (encoding, evaluation, a long step), at most every `EVERY_S`, and only when something was done.

A watchdog above may rely on silence: nothing here is driven by a timer, so a standstill stays silent.
"""

from __future__ import annotations

import time

from launcher.link import Link

EVERY_S = 20.0


class Alive:
    """`count` is how often something was done since the work began; a new `what` begins anew."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._what = ""
        self._told_at = time.monotonic()
        self.count = 0

    def tell(self, what: str, unit: str, count: int) -> None:
        if what != self._what:
            self._what, count = what, 1
        self.count = count
        if time.monotonic() - self._told_at >= EVERY_S:
            self._told_at = time.monotonic()
            self._link.send("alive", what=what, done=f"{count} {unit}")
