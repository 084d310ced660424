"""Every check with what people are told about it: `docs/checks.md` is written from this list.

Adding a check is one function over `PreflightInputs`, one entry in `registry_node.py` or `registry_job.py`, and a test
that it fires once and is silent once.
"""

from __future__ import annotations

from launcher.preflight.check import Group
from launcher.preflight.registry_job import OF_THE_JOB
from launcher.preflight.registry_node import OF_THE_NODE

GROUPS: tuple[Group, ...] = (*OF_THE_NODE, *OF_THE_JOB)
