"""Finds the catalogue's faults in the lines of one log. Pure: lines in, matches out, in the order of the log."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

from launcher.diagnose.catalogue import CATALOGUE
from launcher.diagnose.evidence import NumberedLines
from launcher.diagnose.fault import Fault, Strength, compile_pattern
from launcher.diagnose.literals import literals_of

LINES_BEFORE = 80  # a traceback and the progress bar above it
LINES_AFTER = 40  # and the traceback below a warning
_LINES_KEPT = 400  # before the last steps: what is older belongs to a time when all was well
_STEPS_SURVIVED = 3  # ranks are at most a step apart, so three more steps prove that nobody died

# What consoles put before a line, several of them one after the other: without it wrapped messages join, and exceptions
# begin a line.
_PREFIX = re.compile(
    r"(?:\[(?:rank|default)\d+\]:(?!\[)\s?"  # torch, torchrun
    r"|│\s?"  # Rich
    r"|\[\d+,\d+\]<std(?:out|err)>:?\s?"  # mpirun --tag-output
    r"|\([\w.]+ pid=\d+(?:, ip=[\d.]+)?\)\s"  # Ray
    r"|\[pod/[^\]]+\]\s"  # kubectl logs --prefix
    r"|\d{4}-\d\d-\d\dT[\d:.]+(?:Z|[+-]\d\d:?\d\d)\s(?:std(?:out|err)\s[FP]\s)?"  # kubelet, docker --timestamps
    r"|\s{0,3}\d{1,4}:\s"  # srun --label
    r"|(?:[a-z][a-z.\-]{0,62}[\d\-][\w.\-]{0,62}|\d+(?:\.\d+){3}):\s"  # pdsh: a host's name or address
    r"){1,5}"
)
_GLOBAL_RANK = re.compile(r"\[rank(\d+)\]")  # torch's own; a launcher's before it may count within a node only
_RANK = re.compile(
    r"\[(?:rank|default|Rank )(\d+)\]|\[PG .{0,60}?Rank (\d+)\]|\blocal_rank\s*: (\d+)|\bRank (\d+): "
    r"|^\[\d+,(\d+)\]<std"
)
_TASK = re.compile(r"^\s{0,3}(\d{1,4}): ")  # srun --label; a task is a rank
_TASKS_SHARE = 0.5  # of the lines, from which on a number before the colon is a task's
_RAISED = re.compile(r"(?:[a-z_][\w.]*\.)?(?:[A-Z]\w*)?(?:Error|Exception): |(?:[a-z_]\w*\.)+[A-Z]\w+: ")
_UNPROVEN = (Strength.ERROR, Strength.PYTHON, Strength.VAGUE, Strength.VICTIM, Strength.HEADLINE)
_STALL = "nccl_watchdog_timeout"
# Levels below an error, as glog, logging, warnings, NCCL and DeepSpeed write them: the program went on after that.
_MILD_LEVEL = re.compile(
    r"\[?W\d{0,4} [\w:. /]*\.\w+:\d+\]|\bNCCL (?:INFO|TRACE)\b|\[(?:INFO|WARNING|DEBUG)\b|\w*Warning: "
    r"|^(?:INFO|WARNING|DEBUG)[: ]|\b(?:INFO|WARNING|DEBUG) -|^wandb: "
)
_CODE_FRAME = re.compile(r'^\s*File "[^"]+", line \d+')
_CODE = re.compile(r"^\s{2,}(?:raise|assert|return|warnings\.warn|logger\.\w+)\b|^\s*(?:❱\s*)?\d{1,5} │")
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
    plainness: int = 0  # among lines of one message the smallest says most


class _Compiled(NamedTuple):
    fault: Fault
    strength: Strength
    pattern: re.Pattern[str]
    near: re.Pattern[str] | None
    plainest: re.Pattern[str] | None
    literals: frozenset[str]  # one of them is in every text that matches


@lru_cache(maxsize=1)
def _compiled() -> tuple[_Compiled, ...]:
    return tuple(
        _Compiled(
            fault,
            strength,
            compile_pattern(pattern),
            compile_pattern(fault.near) if fault.near else None,
            compile_pattern(fault.plainest) if fault.plainest else None,
            literals_of(pattern),
        )
        for fault in CATALOGUE
        for strength, pattern in fault.patterns()
    )


def compile_rules() -> None:
    """Once in a process, and a tenth of a second: to be done while there is time."""
    _compiled()


def all_literals() -> frozenset[str]:
    """Plain texts one of which is in every line, wrapped or not, that an entry of the catalogue may know."""
    return frozenset().union(*(compiled.literals for compiled in _compiled()))


def may_match(lines: Sequence[str]) -> bool:
    """Whether an entry knows something in these lines, whatever stands around them."""
    text = "\n".join(_strip_prefix(line) for line in lines)
    return any(
        any(literal in text for literal in compiled.literals) and compiled.pattern.search(text)
        for compiled in _compiled()
    )


def find_matches(lines: NumberedLines) -> tuple[Match, ...]:
    """At most one match per line: the first entry of the catalogue that knows it, in the order of the log."""
    stripped = [_strip_prefix(text) for _, text in lines]
    by_task = _tells_tasks_apart([text for _, text in lines])
    last_survived = _last_survived(stripped)
    first = max(0, last_survived - _LINES_KEPT)
    starts = list(accumulate((len(text) + 1 for text in stripped[first:]), initial=0))
    whole = "\n".join(stripped[first:])
    by_line: dict[int, Match] = {}
    for fault, usual_strength, pattern, near, plainest, literals in _compiled():
        if not any(literal in whole for literal in literals):
            continue
        for found in pattern.finditer(whole):
            strength = usual_strength
            start = found.start("proof") if "proof" in pattern.groupindex else found.start()
            index = first + bisect_right(starts, start) - 1
            if index in by_line or (near and not near.search("\n".join(_around(stripped, index)))):
                continue
            values = {name: value for name, value in found.groupdict().items() if value is not None}
            if fault.applies and not fault.applies(values):
                continue
            number, text = lines[index]
            if strength in _UNPROVEN and _is_code(stripped, index):
                strength = Strength.HINT
            elif strength in _UNPROVEN and not fault.fatal_as_warning and _MILD_LEVEL.search(stripped[index]):
                strength = Strength.MILD
            rank = rank_named_in(text, by_task=by_task)
            plainness = _plainness(stripped[index], plainest)
            by_line[index] = Match(fault, strength, index, number, text, tuple(values.items()), rank, plainness)
    return _weigh([by_line[index] for index in sorted(by_line)], last_survived)


def _last_survived(lines: Sequence[str]) -> int:
    """The index of the line before which nothing can have been fatal, because training went on; -1 if none."""
    steps = [
        i for i, line in enumerate(lines) if ("oss" in line or "tep" in line or "iter" in line) and _STEP.search(line)
    ]
    return steps[-_STEPS_SURVIVED] if len(steps) >= _STEPS_SURVIVED else -1


def _plainness(line: str, plainest: re.Pattern[str] | None) -> int:
    """A fault's own choice first, then what was raised, then what was only printed on the way."""
    if plainest and plainest.search(line):
        return 0
    return 1 if _RAISED.match(line) else 2


def _strip_prefix(text: str) -> str:
    found = _PREFIX.match(text)
    return text[found.end() :] if found else text


def _tells_tasks_apart(texts: Sequence[str]) -> bool:
    return sum(1 for text in texts if _TASK.match(text)) > _TASKS_SHARE * len(texts)


def _is_code(lines: Sequence[str], index: int) -> bool:
    """Whether a traceback only quotes this line: what `raise` would say is not what was raised."""
    line = lines[index]
    return bool(_CODE.match(line) or (index and line.startswith("  ") and _CODE_FRAME.match(lines[index - 1])))


def rank_named_in(line: str, *, by_task: bool = False) -> int | None:
    """The rank that a line of a shared console says it comes from; `by_task`: the console is `srun --label`'s."""
    found = _GLOBAL_RANK.search(line) or _RANK.search(line) or (_TASK.match(line) if by_task else None)
    return int(next(group for group in found.groups() if group)) if found else None


def _around(lines: Sequence[str], index: int) -> Sequence[str]:
    return lines[max(0, index - LINES_BEFORE) : index + 1 + LINES_AFTER]


def _weigh(matches: Sequence[Match], last_survived: int) -> tuple[Match, ...]:
    """Turns order within the log into strength.

    - an error after which training went on for some steps killed nobody: a hint;
    - an exception that nobody knows, raised by a rank after a known fault, is its echo;
    - a scheduler's word after another error or a stall is about the clean-up, and what follows it is its consequence.
    """
    weighed: list[Match] = []
    fallen: set[int | None] = set()  # ranks that have printed a fault
    preempted = failed = False  # `failed`: an error or a stall, not only a peer that was lost
    for match in matches:
        strength = match.strength
        if strength in (Strength.ERROR, Strength.PYTHON, Strength.VAGUE) and match.index < last_survived:
            strength = Strength.HINT
        elif (
            (failed and strength == Strength.SCHEDULER)
            or (strength == Strength.PYTHON and _has_fallen(match.rank, fallen))
            or (preempted and strength == Strength.ERROR)
        ):
            strength = Strength.VICTIM
        weighed.append(match if strength == match.strength else replace(match, strength=strength))
        preempted = preempted or strength == Strength.SCHEDULER
        if Strength.KERNEL < strength < Strength.HINT and strength != Strength.SCHEDULER:
            fallen.add(match.rank)
            failed |= strength < Strength.VICTIM or match.fault.cls == _STALL
    return tuple(weighed)


def _has_fallen(rank: int | None, fallen: set[int | None]) -> bool:
    """Where ranks share a console, what one of them has met is no news of another; a line without a rank may be
    anybody's."""
    return rank in fallen or None in fallen
