"""The verdict: one cause for a failed attempt, chosen over all ranks and nodes. Pure.

Order (`fault.Strength`): what the kernel saw; the first error over all ranks; the scheduler's word; a rank that stood
still while the others waited for it; one that a signal ended silently; an exception that no entry knows; errors with
several causes; victims; warnings; bare exits.
Victims are never the cause while anything else exists.
"""

from __future__ import annotations

import itertools
import math
import re
import signal
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from string import Formatter
from typing import Any

from launcher.diagnose.catalogue import UNKNOWN
from launcher.diagnose.evidence import NodeEvidence, NumberedLines, RankEvidence, signal_number
from launcher.diagnose.exits import find_ends, judge_end
from launcher.diagnose.fault import Strength
from launcher.diagnose.hang import HangEvidence
from launcher.diagnose.match import Match, find_matches
from launcher.diagnose.redact import redact_text
from launcher.diagnose.stamps import stamp_of
from launcher.i18n import Text

VERDICT_VERSION = 1
_MAX_LINE_CHARS = 2000
_MAX_EVIDENCE = 5

_MAX_FRAME_LINES = 100

_FRAME = re.compile(r'File "[^"]+", line \d+')
_LIBRARY_FRAME = re.compile(r'site-packages|dist-packages|/lib/python3|File "<')


@dataclass(frozen=True)
class EvidenceLine:
    """One line that the verdict rests on; `rank` is None for a node's kernel log."""

    file: str
    line: int
    text: str
    rank: int | None = None

    def to_json(self) -> dict[str, Any]:
        return {"file": self.file, "line": self.line, "text": self.text}


@dataclass(frozen=True)
class Culprit:
    rank: int | None
    node: str

    def words(self) -> str:
        return _where(self.rank, self.node)

    def to_json(self) -> dict[str, Any]:
        return {"rank": self.rank, "node": self.node}


@dataclass(frozen=True)
class Verdict:
    """`evidence[0]` shows the cause best; `also` names the classes of the consequences. All texts are redacted."""

    cls: str
    action: str
    retryable: bool
    confidence: str  # certain | probable | unknown
    culprit: Culprit | None
    evidence: tuple[EvidenceLine, ...]
    cause: Text
    remedy: Text
    also: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {
            "v": VERDICT_VERSION,
            "class": self.cls,
            "action": self.action,
            "retryable": self.retryable,
            "confidence": self.confidence,
            "culprit": self.culprit.to_json() if self.culprit else None,
            "evidence": [line.to_json() for line in self.evidence],
            "cause": self.cause.pick(),
            "remedy": self.remedy.pick(),
            "also": list(self.also),
        }


@dataclass(frozen=True)
class _Source:
    """One log: a rank's, or a node's kernel messages (then `evidence` is None)."""

    file: str
    node: str
    lines: NumberedLines
    evidence: RankEvidence | None = None


@dataclass(frozen=True)
class _Candidate:
    source: _Source
    match: Match
    tie: int = 0

    def order(self) -> tuple[int, int, float]:
        """Strength; then the rank that ended first. Equals keep the order of the logs, then of their lines."""
        ended_at_s = self.source.evidence.exited_at_s if self.source.evidence else None
        return self.match.strength, self.tie, math.inf if ended_at_s is None else ended_at_s

    def line(self) -> EvidenceLine:
        text = redact_text(self.match.text)[:_MAX_LINE_CHARS]
        return EvidenceLine(self.source.file, self.match.line, text, self.rank())

    def rank(self) -> int | None:
        """The rank that the line names, else the one whose log it is in."""
        own = self.source.evidence.rank if self.source.evidence else -1
        return self.match.rank if own < 0 else own


def diagnose(
    ranks: Sequence[RankEvidence], nodes: Sequence[NodeEvidence] = (), hang: HangEvidence | None = None
) -> Verdict:
    """The cause of a failed attempt, from every rank's end and every node's kernel evidence; `hang`: the agent has
    ended the ranks because they stood still."""
    candidates: list[_Candidate] = []
    for source in _sources(ranks, nodes):
        matches = find_matches(source.lines)
        candidates += (_Candidate(source, _weigh_oom_kill(match, source, ranks)) for match in matches)
        candidates += _exits(source, matches, nodes)
    candidates.sort(key=_Candidate.order)
    if hang is not None and (not candidates or candidates[0].match.strength > Strength.HANG):
        return _of_hang(hang, candidates)
    if not candidates:
        return _unknown(ranks)
    _best_first(candidates)
    return _verdict(candidates, nodes)


def _best_first(candidates: list[_Candidate]) -> None:
    """Of equals the first by the clock is the cause, where every one of them tells the time; then its plainest line."""
    equals = list(itertools.takewhile(lambda c: c.order() == candidates[0].order(), candidates))
    stamps = [stamp_of(c.match.text) for c in equals]
    if all(stamps) and len({stamp.kind for stamp in stamps if stamp}) == 1:
        first = min(range(len(equals)), key=lambda i: stamps[i] or ())
        candidates.insert(0, candidates.pop(first))
    best = candidates[0]
    same = [c for c in equals if c.source == best.source and _one_message(c.match, best.match)]
    plainest = min(same or [best], key=lambda c: c.match.plainness)
    candidates.remove(plainest)
    candidates.insert(0, plainest)


def _one_message(one: Match, other: Match) -> bool:
    near = abs(one.index - other.index) <= _MAX_FRAME_LINES
    own = one.strength in (Strength.KERNEL, Strength.ERROR, Strength.SCHEDULER, Strength.VAGUE)
    return (
        one.fault is other.fault and own and near and (one.rank == other.rank or one.rank is None or other.rank is None)
    )


def _sources(ranks: Sequence[RankEvidence], nodes: Sequence[NodeEvidence]) -> Iterable[_Source]:
    for rank in sorted(ranks, key=lambda evidence: evidence.rank):
        yield _Source(rank.log_path, rank.node, rank.tail, rank)
    for node in nodes:
        numbered = tuple(enumerate(node.kernel_lines, 1))
        yield _Source(f"kernel log of {node.node}" if node.node else "kernel log", node.node, numbered)


def _weigh_oom_kill(match: Match, source: _Source, ranks: Sequence[RankEvidence]) -> Match:
    """A kernel log is the whole machine's: a kill of somebody else's process explains no exception of ours."""
    if source.evidence or match.fault.cls != "host_oom":
        return match
    here = [rank for rank in ranks if source.node in ("", rank.node)]
    ours = any(rank.pid and re.search(rf"\b{rank.pid}\b", match.text) for rank in here)
    unexplained = any(_signal_of(rank) in (None, signal.SIGKILL, signal.SIGBUS) and not rank.exit_code for rank in here)
    return match if ours or unexplained or _killed(here) else replace(match, strength=Strength.HINT)


def _killed(ranks: Sequence[RankEvidence]) -> bool:
    return any(_signal_of(rank) in (signal.SIGKILL, signal.SIGBUS) and not rank.killed_by_us for rank in ranks)


def _signal_of(rank: RankEvidence) -> int | None:
    return signal_number(rank.exit_code, rank.signal)


def _exits(source: _Source, matches: Sequence[Match], nodes: Sequence[NodeEvidence]) -> Iterable[_Candidate]:
    if rank := source.evidence:
        oom_kills = _oom_kills(nodes, source.node)
        for end in find_ends(rank):
            judged = judge_end(end, rank, matches, oom_kills, at_limit=_at_limit(nodes, source.node))
            yield _Candidate(source, judged, end.order)


def _at_limit(nodes: Sequence[NodeEvidence], node: str) -> bool:
    """Reaching the limit kills nobody by itself: file pages are given back first. Beside a SIGKILL it is a reason."""
    return any(n.facts.get("memory_grown", {}).get("max") for n in nodes if n.node in ("", node))


def _oom_kills(nodes: Sequence[NodeEvidence], node: str) -> int | None:
    counted = [n.cgroup_oom_kills for n in nodes if n.node in ("", node) and n.cgroup_oom_kills is not None]
    return sum(counted) if counted else None


def _verdict(candidates: Sequence[_Candidate], nodes: Sequence[NodeEvidence]) -> Verdict:
    best = candidates[0]
    fault, strength = best.match.fault, best.match.strength
    rank = best.rank()
    known_rank = rank is not None and rank >= 0
    values = {"exit": "?", **dict(best.match.values), "where": _where(rank, best.source.node)}
    confidence = "certain" if strength <= Strength.PYTHON and strength != Strength.SIGNAL else "probable"
    return Verdict(
        cls=fault.cls,
        action=fault.action,
        retryable=fault.retryable,
        confidence="unknown" if fault is UNKNOWN or strength == Strength.MILD else confidence,
        culprit=Culprit(rank, best.source.node) if known_rank or best.source.node else None,
        evidence=_evidence(candidates, nodes),
        cause=_fill(fault.cause, values),
        remedy=_fill(fault.remedy, values),
        also=_consequences(candidates),
    )


def _of_hang(hang: HangEvidence, candidates: Sequence[_Candidate]) -> Verdict:
    values = {"where": _where(hang.rank, hang.node), "what": hang.what}
    seen = dict.fromkeys(c.match.fault.cls for c in candidates if c.match.strength < Strength.HINT)
    return Verdict(
        cls=hang.fault.cls,
        action=hang.fault.action,
        retryable=hang.fault.retryable,
        confidence="certain" if hang.is_certain else "probable",
        culprit=Culprit(hang.rank, hang.node) if hang.rank is not None else None,
        evidence=tuple(EvidenceLine(file, 0, redact_text(text), hang.rank) for file, text in hang.lines),
        cause=_fill(hang.fault.cause, values),
        remedy=_fill(hang.fault.remedy, values),
        also=tuple(cls for cls in seen if cls != hang.fault.cls),
    )


def _consequences(candidates: Sequence[_Candidate]) -> tuple[str, ...]:
    cause = candidates[0].match.fault.cls
    seen = dict.fromkeys(c.match.fault.cls for c in candidates if c.match.strength < Strength.HINT)
    return tuple(cls for cls in seen if cls != cause)


def _evidence(candidates: Sequence[_Candidate], nodes: Sequence[NodeEvidence]) -> tuple[EvidenceLine, ...]:
    """The line that shows the cause; the frame it came from; what the node counted; the same on other ranks."""
    best = candidates[0]
    lines = [best.line(), *_frame(best), *_node_facts(best, nodes)]
    same = (c.line() for c in candidates[1:] if _says_the_same(c, best) and c.source != best.source)
    return tuple(dict.fromkeys([*lines, *same]))[:_MAX_EVIDENCE]


def _says_the_same(one: _Candidate, other: _Candidate) -> bool:
    return (one.match.fault.cls, one.match.strength) == (other.match.fault.cls, other.match.strength)


def _frame(candidate: _Candidate) -> Iterable[EvidenceLine]:
    """The innermost frame of the user's own files in the traceback above an exception."""
    if candidate.match.strength not in (Strength.ERROR, Strength.PYTHON):
        return
    above = candidate.source.lines[max(0, candidate.match.index - _MAX_FRAME_LINES) : candidate.match.index]
    for number, text in reversed(above):
        if "Traceback (most recent call last)" in text:
            return
        if _FRAME.search(text) and not _LIBRARY_FRAME.search(text):
            yield EvidenceLine(candidate.source.file, number, redact_text(text), candidate.rank())
            return


def _node_facts(best: _Candidate, nodes: Sequence[NodeEvidence]) -> Iterable[EvidenceLine]:
    for node in nodes:
        if node.node not in ("", best.source.node):
            continue
        if best.match.fault.cls == "host_oom" and node.cgroup_oom_kills:
            times = f"{node.cgroup_oom_kills} process{'es' if node.cgroup_oom_kills > 1 else ''}"
            yield EvidenceLine("cgroup: oom_kill", 0, f"the kernel killed {times} of this job or pod for memory")
        if best.match.fault.cls in ("no_space", "disk_quota"):
            yield from _room_on_disks(node)
        if best.match.fault.cls == "shm_exhausted" and node.shm_size_bytes is not None:
            free_mib = (node.shm_free_bytes or 0) / 2**20
            size_mib = node.shm_size_bytes / 2**20
            yield EvidenceLine("/dev/shm", 0, f"/dev/shm has {size_mib:.0f} MiB, {free_mib:.0f} MiB are free")


def _room_on_disks(node: NodeEvidence) -> Iterable[EvidenceLine]:
    for name, disk in node.facts.get("disks", {}).items():
        if isinstance(disk, Mapping):
            free = f"{disk['free_bytes'] / 2**30:.1f} of {disk['total_bytes'] / 2**30:.1f} GiB are free afterwards"
            yield EvidenceLine(f"disk: {name}", 0, f"{name}: {free}, {disk['free_inodes']} more files fit")


def _unknown(ranks: Sequence[RankEvidence]) -> Verdict:
    values = {"where": _where(ranks[0].rank, ranks[0].node) if len(ranks) == 1 else "?", "exit": "?"}
    cause, remedy = _fill(UNKNOWN.cause, values), _fill(UNKNOWN.remedy, values)
    return Verdict(UNKNOWN.cls, UNKNOWN.action, UNKNOWN.retryable, "unknown", None, (), cause, remedy)


def _where(rank: int | None, node: str) -> str:
    """Who, in words that fit both languages: `rank 3 (n1)`."""
    if rank is None or rank < 0:
        return node or "rank ?"
    return f"rank {rank} ({node})" if node else f"rank {rank}"


def _fill(text: Text, values: dict[str, str]) -> Text:
    """Puts what the line said into the text. Values are a log's words and are redacted."""
    names = {name for part in text for _, name, _, _ in Formatter().parse(part) if name}
    return text.format(**{name: redact_text(values.get(name, "?").strip())[:300] for name in names})
