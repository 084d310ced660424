"""What a bare end proves: the signal or code of a rank, when the lines of its log explain nothing better. Pure."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from launcher.diagnose.catalogue import EXITED, KILLED_FROM_OUTSIDE, UNKNOWN, exit_faults
from launcher.diagnose.evidence import RankEvidence, name_exit, signal_number
from launcher.diagnose.fault import Fault, Strength
from launcher.diagnose.match import Match, rank_named_in

# What a launcher's own summary says about a rank's end, for logs that come without exit codes.
_EXIT_LINE = re.compile(
    r"exitcode\s*:\s*(-?\d+)|exits with return code = (-?\d+)|Signal (?P<signal>\d+) \(SIG\w+\) received by PID"
    r"|[Ee]xit(?:ed)?(?: with)?(?: exit)?[ _]?(?:[Cc]ode|status)\s*[:=]?\s*(-?\d+)"
    r"|died with <Signals\.SIG\w+: (?P<died>\d+)>"
    r"|terminated with signal (?P<name>SIG\w+)"
)
EXIT_WORDS = frozenset(
    {"exitcode", "exits", "received", "exit", "Exit", "died", "terminated"}
)  # one is in each line of the above
# -15 and -6 mostly follow from another rank's end, so the others are looked at first.
SIGNAL_ORDER = (signal.SIGBUS, signal.SIGSEGV, signal.SIGILL, signal.SIGFPE, signal.SIGKILL, signal.SIGTERM)

_CRASHES = (signal.SIGSEGV, signal.SIGILL, signal.SIGFPE)
# torchrun kills who does not leave; that end is its own doing.
_KILLED_BY_LAUNCHER = re.compile(r"Unable to shutdown process (\d+) via")

_PID = re.compile(r"(?:pid: |received by PID )(\d+)")


@dataclass(frozen=True)
class End:
    """One end of a process; `index` is that of the log line which reports it, -1 where we saw it ourselves."""

    exit_code: int | None
    signal: int | None
    index: int
    line: int
    text: str

    @property
    def number(self) -> int | None:
        return signal_number(self.exit_code, self.signal)

    @property
    def order(self) -> int:
        if self.number == signal.SIGTERM and self.index >= 0:
            return len(SIGNAL_ORDER) + 1  # in a launcher's summary: mostly sent by it, because of another end
        return SIGNAL_ORDER.index(self.number) if self.number in SIGNAL_ORDER else len(SIGNAL_ORDER)


def find_ends(rank: RankEvidence) -> Iterable[End]:
    """The ends that a launcher's summary in the log speaks of, then the rank's own, unless we ended it."""
    by_launcher = {found[1] for _, text in rank.tail if (found := _KILLED_BY_LAUNCHER.search(text))}
    for index, (line, text) in enumerate(rank.tail):
        if (pid := _PID.search(text)) and pid[1] in by_launcher:
            continue
        if found := _EXIT_LINE.search(text):
            said = next(group for group in found.groups() if group)
            number = int(signal.Signals.__members__.get(said, 0) if found["name"] else said)
            is_signal = found["signal"] or found["died"] or found["name"]
            exit_code, by_signal = (None, number) if is_signal else (number, None)
            if number:
                yield End(exit_code, by_signal, index, line, text)
    if not rank.killed_by_us and (rank.exit_code or rank.signal):
        last_line = rank.tail[-1][0] if rank.tail else 0
        yield End(rank.exit_code, rank.signal, -1, last_line, f"ended with {name_exit(rank.exit_code, rank.signal)}")


def speaks_of_an_exit(lines: Sequence[str]) -> bool:
    return any(_EXIT_LINE.search(line) for line in lines)


def judge_end(
    end: End, rank: RankEvidence, matches: Sequence[Match], oom_kills: int | None, *, at_limit: bool = False
) -> Match:
    """What this end speaks for. `matches` are those of the same log, `oom_kills` what the cgroup counted, if it did;
    `at_limit`: the cgroup's memory was at its limit since the attempt began."""
    strongest = min((match.strength for match in matches), default=Strength.EXIT)
    fault, strength = _fault(end, rank, oom_kills, at_limit), _strength(end, rank, strongest)
    if oom_kills and end.number in (signal.SIGKILL, signal.SIGBUS):  # /dev/shm is charged to the cgroup
        fault, strength = exit_faults()[signal.SIGKILL], Strength.KERNEL
    values = (("exit", name_exit(end.exit_code, end.signal)),)
    return Match(fault, strength, end.index, end.line, end.text, values, rank_named_in(end.text))


def _fault(end: End, rank: RankEvidence, oom_kills: int | None, at_limit: bool) -> Fault:
    """SIGKILL without a counter: memory is likely at the limit or before the first step, else somebody's `kill`."""
    if end.number is None:
        return EXITED
    if end.number == signal.SIGKILL and (oom_kills == 0 or (oom_kills is None and not at_limit and rank.last_step)):
        return KILLED_FROM_OUTSIDE
    return exit_faults().get(end.number, UNKNOWN)


def _strength(end: End, rank: RankEvidence, strongest: Strength) -> Strength:
    """After an error of its own an exit proves little; in a console that ranks share, -9 and -7 explain the victims."""
    from_log = end.index >= 0
    if end.number not in SIGNAL_ORDER or (from_log and end.number == signal.SIGTERM):
        return Strength.EXIT
    # An exception ends a process with a code. One that got SIGKILL may have printed exceptions (of its workers, which
    # lost it); unless an entry knows them as a cause, they are not why it ended.
    seen_killed = not from_log and end.number == signal.SIGKILL
    if strongest >= (Strength.PYTHON if seen_killed else Strength.HEADLINE):
        return Strength.SIGNAL
    shared = from_log or rank.rank < 0
    killed = end.number in (signal.SIGKILL, signal.SIGBUS)
    crashed = end.number in _CRASHES and strongest >= Strength.VICTIM  # a victim's clean-up may crash as well
    return Strength.VAGUE if shared and ((killed and strongest >= Strength.VAGUE) or crashed) else Strength.EXIT
