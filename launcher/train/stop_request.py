"""A rank's side of agreed saves: stop at a step that all ranks know, without a collective of ours.

On "prepare" a rank says at which step it is and waits. The first such answer k fixes the step to k + 1, because no
rank can finish step k + 1 while another waits before it. The agent tells all ranks, and each saves when it reaches k +
1.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from launcher.link import Link, Message

log = logging.getLogger("ftlaunch.resilience")

DECISION_WAIT_S = 30.0  # the agent answers within milliseconds; at this bound the rank trains on and says so


class StopRequest:
    """The agent's wish that this run stops at an agreed step, as this rank has heard of it so far."""

    def __init__(self, link: Link, others: Callable[[Message], None] = lambda message: None) -> None:
        """`others`: gets every message that is not about stopping."""
        self._link = link
        self._others = others
        self._save_at: int | None = None

    def check(self, step: int, *, decision_wait_s: float = DECISION_WAIT_S) -> bool:
        """Called after every optimizer step: True when the agreed save is due now."""
        asked = False
        for message in self._link.poll():
            # Both may lie here together, when another rank has answered first: only then is there nothing to wait for.
            if message["kind"] == "save_at":
                self._save_at = int(message["step"])
            elif message["kind"] == "prepare_save":
                asked = True
            else:
                self._others(message)
        if asked:
            self._link.send("at_step", step=step)
            if self._save_at is None:
                self._wait_for_decision(decision_wait_s)
        return self._save_at is not None and step >= self._save_at

    def _wait_for_decision(self, wait_s: float) -> None:
        decision = self._link.wait_for("save_at", wait_s)
        if decision is not None:
            self._save_at = int(decision["step"])
        elif not self._link.closed:
            log.warning("the agent has named no step to save at within %.0f s; training goes on", wait_s)
