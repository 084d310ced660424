"""Drills of one rank: faults on purpose, at the places of a training where a fault could do harm.

Invariant: the agent has been told of a drill (which makes it fire once in the life of a run) before it is carried out.
Imports no torch.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Sequence

from launcher.link import Link
from launcher.plan.spec import Drill


class Drills:
    """The Trainer tells where it is; the drill of that place, if there is one, happens."""

    def __init__(self, drills: Sequence[Drill], rank: int, link: Link) -> None:
        self._drills = tuple(drill for drill in drills if drill.rank == rank)
        self._link = link
        self._batches: dict[tuple[str, int], int] = {}

    def step_ended(self, step: int) -> None:
        self._fire("step_end", step)

    def micro_batch_begins(self, step: int) -> None:
        """Before forward and backward pass of each micro-batch of the step that is to become `step`."""
        self._fire("micro_batch", step, self._count("micro_batch", step))

    def half_saved(self, step: int) -> None:
        """Some of the checkpoint's files are written, and some that a resume needs are not."""
        self._fire("save", step)

    def evaluation_batch_begins(self, step: int) -> None:
        """Before each batch of the evaluation after `step`."""
        self._fire("evaluation", step, self._count("evaluation", step))

    def _count(self, at: str, step: int) -> int:
        self._batches[at, step] = number = self._batches.get((at, step), 0) + 1
        return number

    def _fire(self, at: str, step: int, batch: int = 1) -> None:
        for drill in self._drills:
            if (drill.at, drill.step, drill.batch) == (at, step, batch):
                what = {"signal": drill.signal} if drill.hang is None else {"signal": None, "hang": drill.hang}
                self._link.send("drill", number=drill.number, step=step, at=at, batch=batch, **what)
                self._carry_out(drill)

    def _carry_out(self, drill: Drill) -> None:
        if drill.hang == "loop":
            while True:
                pass
        elif drill.hang == "absent":
            threading.Event().wait()
        else:
            os.kill(os.getpid(), getattr(signal, drill.signal))
