"""A check, and what people are told about it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from launcher.preflight.finding import Finding
from launcher.preflight.inputs import PreflightInputs


@dataclass(frozen=True)
class Check:
    """`id` is what `check.skip` names. `refuses` and `warns` are the bounds of an error and of a warning, "" for
    none; `remedy` in short: the finding has the words for the reader's platform."""

    id: str
    run: Callable[[PreflightInputs], tuple[Finding, ...]]
    measures: str
    refuses: str
    warns: str
    remedy: str


Group = tuple[str, tuple[Check, ...]]  # with its title
