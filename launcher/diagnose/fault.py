"""What an entry of the catalogue is, and how strongly each kind of line argues for it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import IntEnum

from launcher.i18n import Text


class Strength(IntEnum):
    """How near to the root a kind of evidence stands; the smallest value wins."""

    KERNEL = 0  # kernel, driver, cgroup or scheduler accounting: nothing printed by Python outranks it
    ERROR = 1  # a line that only this fault prints
    SCHEDULER = 2  # "preempted", "time limit"; loses to an error that came before it in the same log
    HANG = 3  # a rank that its agent saw stand still while the others waited for it
    SIGNAL = 4  # a rank that a signal ended, not ours, and that had printed no error
    PYTHON = 5  # an exception that no entry knows
    VAGUE = 6  # an error with several possible causes
    VICTIM = 7  # what a process prints because another one failed
    HEADLINE = 8  # the first line of a message whose reason stands in a later line
    HINT = 9  # a warning, or an error that the program survived
    MILD = 10  # an error's words in a line that is only a warning or a note: mostly something that is tried again
    EXIT = 11  # nothing but an exit code, or a signal after an error of its own


@dataclass(frozen=True)
class Fault:
    """One fault, as data: how it shows, what it means, what to do.

    A class may have several entries where the remedy differs (`nccl_ib_failure`: cable or settings); the first that
    matches a line owns it. In patterns a blank stands for any white space, so that a message which a console has
    wrapped still matches; named groups fill the places of the same name in `cause` and `remedy`; the group
    `proof`, where there is one, begins on the line that is shown.
    """

    cls: str
    action: str
    cause: Text
    remedy: Text
    kernel: tuple[str, ...] = ()
    errors: tuple[str, ...] = ()
    scheduler: tuple[str, ...] = ()
    python: tuple[str, ...] = ()
    vague: tuple[str, ...] = ()
    victims: tuple[str, ...] = ()
    headlines: tuple[str, ...] = ()
    hints: tuple[str, ...] = ()
    fatal_as_warning: bool = False  # what a program only warns of, or tells, is no cause otherwise
    plainest: str = ""  # of several lines of one message, the one that says most
    near: str = ""  # must also occur in the lines around the match (a traceback's frames)
    applies: Callable[[Mapping[str, str]], bool] | None = None  # and the named values must say so
    signals: tuple[int, ...] = ()  # the exits that mean this when nothing else was printed

    @property
    def retryable(self) -> bool:
        """Whether the same start can succeed; an `adjust:` may be retried only after the adjustment."""
        return self.action.startswith("retry")

    @property
    def secondary(self) -> bool:
        """A consequence: the cause is elsewhere, and it is named only when no other log shows that cause."""
        return bool(self.victims)

    def patterns(self) -> tuple[tuple[Strength, str], ...]:
        by_strength = {
            Strength.KERNEL: self.kernel,
            Strength.ERROR: self.errors,
            Strength.SCHEDULER: self.scheduler,
            Strength.PYTHON: self.python,
            Strength.VAGUE: self.vague,
            Strength.VICTIM: self.victims,
            Strength.HEADLINE: self.headlines,
            Strength.HINT: self.hints,
        }
        return tuple((strength, pattern) for strength, patterns in by_strength.items() for pattern in patterns)


def compile_pattern(pattern: str) -> re.Pattern[str]:
    """A blank matches any run of white space, line breaks included: consoles and Rich wrap long messages."""
    spaced = re.sub(r" ([?*+]?)", lambda blank: r"\s*" if blank[1] in ("?", "*") else r"\s+", pattern)
    return re.compile(spaced, re.MULTILINE)
