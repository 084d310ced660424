"""Finds the catalogue's faults in the lines of one log. Pure: lines in, matches out, in the order of the log."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate

from launcher.diagnose.catalogue import CATALOGUE
from launcher.diagnose.evidence import NumberedLines
from launcher.diagnose.fault import Fault, Strength, compile_pattern

_LINES_BEFORE = 80  # a traceback and the progress bar above it
_LINES_AFTER = 40  # and the traceback below a warning
_LINES_KEPT = 400  # before the last steps: what is older belongs to a time when all was well
_STEPS_SURVIVED = 3  # ranks are at most a step apart, so three more steps prove that nobody died

# Prefixes by which consoles tell ranks apart; without them, wrapped messages join and exceptions begin a line.
_PREFIX = re.compile(r"^(?:\[(?:rank|default)(?P<rank>\d+)\]:(?!\[)\s?|│\s?)")
_RANK = re.compile(r"\[(?:rank|default|Rank )(\d+)\]|\[PG .{0,60}?Rank (\d+)\]|\blocal_rank\s*: (\d+)")
_STEP = re.compile(
    r"(?:loss|LOSS|Loss)['\"]?\s{0,4}[:=]\s{0,4}-?[\d.]+|(?:iteration|[Ss]tep)\s{0,4}[:=]?\s{0,4}\d+\s{0,4}[/|,:]"
)


@dataclass(frozen=True)
class Match:
    """One line that speaks for one fault. `index` counts lines within the tail, `line` within the file."""

    fault: Fault
    strength: Strength
    index: int
    line: int
    text: str
    values: tuple[tuple[str, str], ...]
    rank: int | None  # named by the line itself


@lru_cache(maxsize=1)
def _compiled() -> tuple[tuple[Fault, Strength, re.Pattern[str], re.Pattern[str] | None], ...]:
    return tuple(
        (fault, strength, compile_pattern(pattern), compile_pattern(fault.near) if fault.near else None)
        for fault in CATALOGUE
        for strength, pattern in fault.patterns()
    )


def find_matches(lines: NumberedLines) -> tuple[Match, ...]:
    """At most one match per line: the first entry of the catalogue that knows it, in the order of the log."""
    stripped = [_PREFIX.sub("", text) for _, text in lines]
    last_survived = _last_survived(stripped)
    first = max(0, last_survived - _LINES_KEPT)
    starts = list(accumulate((len(text) + 1 for text in stripped[first:]), initial=0))
    whole = "\n".join(stripped[first:])
    by_line: dict[int, Match] = {}
    for fault, strength, pattern, near in _compiled():
        for found in pattern.finditer(whole):
            index = first + bisect_right(starts, found.start()) - 1
            if index in by_line or (near and not near.search("\n".join(_around(stripped, index)))):
                continue
            values = {name: value for name, value in found.groupdict().items() if value is not None}
            if fault.applies and not fault.applies(values):
                continue
            number, text = lines[index]
            by_line[index] = Match(fault, strength, index, number, text, tuple(values.items()), rank_named_in(text))
    return _weigh([by_line[index] for index in sorted(by_line)], last_survived)


def _last_survived(lines: Sequence[str]) -> int:
    """The index of the line before which nothing can have been fatal, because training went on; -1 if none."""
    steps = [
        i for i, line in enumerate(lines) if ("oss" in line or "tep" in line or "iter" in line) and _STEP.search(line)
    ]
    return steps[-_STEPS_SURVIVED] if len(steps) >= _STEPS_SURVIVED else -1


def rank_named_in(line: str) -> int | None:
    """The rank that a line of a shared console says it comes from."""
    found = _RANK.search(line)
    return int(next(group for group in found.groups() if group)) if found else None


def _around(lines: Sequence[str], index: int) -> Sequence[str]:
    return lines[max(0, index - _LINES_BEFORE) : index + 1 + _LINES_AFTER]


def _weigh(matches: Sequence[Match], last_survived: int) -> tuple[Match, ...]:
    """Turns order within the log into strength.

    - an error after which training went on for some steps killed nobody: a hint;
    - an exception that nobody knows, raised after a known fault, is its echo;
    - a scheduler's word after another error or a stall is about the clean-up, and what follows it is its consequence.
    """
    weighed: list[Match] = []
    fallen = preempted = False
    for match in matches:
        strength = match.strength
        if strength in (Strength.ERROR, Strength.PYTHON, Strength.VAGUE) and match.index < last_survived:
            strength = Strength.HINT
        elif (fallen and strength in (Strength.SCHEDULER, Strength.PYTHON)) or (
            preempted and strength == Strength.ERROR
        ):
            strength = Strength.VICTIM
        weighed.append(match if strength == match.strength else replace(match, strength=strength))
        preempted = preempted or strength == Strength.SCHEDULER
        fallen = fallen or Strength.KERNEL < strength < Strength.HINT
    return tuple(weighed)
