"""With this folder in PYTHONPATH, one rank draws one random number more, before its first micro-batch of one step.

`FTLAUNCH_TEST_DRAW=RANK:STEP` names it. Python imports this module by its name at the start of every process.
"""

from __future__ import annotations

import os

from launcher.train.drills import Drills

_rank, _, _step = os.environ["FTLAUNCH_TEST_DRAW"].partition(":")
_undisturbed = Drills.micro_batch_begins
_drawn: list[int] = []


def _micro_batch_begins(self: Drills, step: int) -> None:
    _undisturbed(self, step)
    if os.environ.get("RANK") == _rank and step == int(_step) and not _drawn:
        import torch

        _drawn.append(step)
        torch.rand(1)


Drills.micro_batch_begins = _micro_batch_begins  # type: ignore[method-assign]
