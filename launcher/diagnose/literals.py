"""Which plain text a regular expression cannot do without. Pure.

A log of a gigabyte is searched for these first (`in` is a hundred times faster than the expressions), and the
expressions see only lines that hold one.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from functools import cache
from importlib import import_module
from typing import Any

# The parser of `re` itself, under its name before and since Python 3.11.
parser, constants = (
    (import_module("re._parser"), import_module("re._constants"))
    if sys.version_info >= (3, 11)
    else (import_module("sre_parse"), import_module("sre_constants"))
)

_NOT_IN_TEMPLATES = re.compile(
    r"[^A-Za-z_(),:'\[\]\"`/*&<>=!]+"
)  # digits change from line to line; blanks may be breaks
_MIN_LENGTH = 3
# In nearly every line of a healthy log: hardly better than nothing.
_COMMON = frozenset({"loss", "oss", "grad_norm", "GPU", "NCCL", "launcher", "index", "found", "rank", "step", "files"})


@cache
def literals_of(pattern: str) -> frozenset[str]:
    """One of these is in every text that `pattern` (of a `Fault`) matches. They hold no digits and no blanks.

    Raises ValueError for a pattern that any text might match.
    """
    found = _needed(parser.parse(pattern, re.MULTILINE))
    if found is None:
        raise ValueError(f"no plain text of {_MIN_LENGTH} letters that every match of {pattern!r} has")
    return found


def _needed(items: Iterable[Any]) -> frozenset[str] | None:
    """The best choice among the parts of a sequence, all of which must be there: fewest and longest texts."""
    choices: list[frozenset[str]] = []
    run = ""
    for operation, argument in items:
        if operation is constants.LITERAL:
            run += chr(argument)
            continue
        choices += _of_run(run)
        run = ""
        if operation is constants.SUBPATTERN:
            choices += _inner(argument[3])
        elif operation in (constants.MAX_REPEAT, constants.MIN_REPEAT) and argument[0] > 0:
            choices += _inner(argument[2])
        elif operation is constants.BRANCH:
            branches = [_needed(branch) for branch in argument[1]]
            if all(branches):
                choices.append(frozenset().union(*(branch for branch in branches if branch)))
    choices += _of_run(run)
    return max(choices, key=_worth, default=None)


def _inner(items: Iterable[Any]) -> list[frozenset[str]]:
    found = _needed(items)
    return [found] if found else []


def _of_run(run: str) -> list[frozenset[str]]:
    parts = _NOT_IN_TEMPLATES.split(run)
    return [frozenset({part}) for part in parts if len(part) >= _MIN_LENGTH]


def _worth(texts: frozenset[str]) -> tuple[bool, int, int]:
    """A long text is rare in a log; of equals the choice with fewer texts."""
    return not texts & _COMMON, min(*map(len, texts), 8), -len(texts)
