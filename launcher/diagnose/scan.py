"""Logs of any size in one pass: what a diagnosis can need of them, at a hundred megabytes a second, in flat memory.

Most lines of a large log differ from others in their numbers alone. Without its digits a line is a template; a template
that was seen is not looked at again, and a new one only for words that hold a text which some fault cannot do without
(`literals.py`). Kept are the lines of such templates with what stands around them (a traceback above), and the end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Protocol

from launcher.diagnose.evidence import NumberedLines, clean_line
from launcher.diagnose.exits import EXIT_WORDS, speaks_of_an_exit
from launcher.diagnose.match import LINES_AFTER, LINES_BEFORE, all_literals, may_match

_CHUNK_BYTES = 4 * 2**20
_TAIL_BYTES = 2 * 2**20
_KEPT_BYTES = 12 * 2**20  # what is kept besides the tail
_KEPT_OF_TEMPLATE = 200  # then all has been said that this template will say
_WHOLE_CONTEXT = 5  # of the first ones; the others come without their surroundings
_MAX_KNOWN = 200_000  # templates and words held as known; above it they are learnt anew
_MAX_LINE_BYTES = 2**20
_MESSAGE_LINES = 4  # a message may be wrapped
_SHORT = 4  # texts that begin a word, where they are so short
_DIGITS = b"0123456789.+-"


class Readable(Protocol):
    def read(self, num_bytes: int, /) -> bytes: ...


def scan(stream: Readable, on_read: Callable[[int], None] = lambda num_bytes: None) -> NumberedLines:
    """The lines of a log, numbered as in the file, that a diagnosis can need. `on_read` is told of every block."""
    return _Scanner().run(stream, on_read)


class _Scanner:
    def __init__(self) -> None:
        self._literals = [text.encode() for text in sorted(all_literals() | EXIT_WORDS)]
        self._known: set[bytes] = set()  # templates that say nothing
        self._known_words: set[bytes] = set()
        self._telling: dict[bytes, int] = {}  # template -> how many of its lines are kept
        self._kept: dict[int, bytes] = {}
        self._kept_bytes = 0
        self._wanted_until = 0  # lines below this number belong to what was found before
        self._recent: deque[tuple[int, list[bytes]]] = deque(
            maxlen=2
        )  # (number of its first line, lines) of two chunks
        self._num_lines = 0

    def run(self, stream: Readable, on_read: Callable[[int], None]) -> NumberedLines:
        rest = b""
        while block := stream.read(_CHUNK_BYTES):
            on_read(len(block))
            whole, newline, rest = (rest + block).rpartition(b"\n")
            if newline:
                self._chunk(whole)
            elif (
                len(rest) > _MAX_LINE_BYTES
            ):  # a progress bar that never ends its line: a terminal shows its last state
                rest = rest.rpartition(b"\r")[2][-_MAX_LINE_BYTES:]
        if rest:
            self._chunk(rest)
        return self._result()

    def _chunk(self, chunk: bytes) -> None:
        lines = chunk.split(b"\n")
        templates = chunk.translate(None, _DIGITS).split(b"\n")
        different = set(templates)
        self._learn(different - self._known - self._telling.keys())
        first = self._num_lines + 1
        self._num_lines += len(lines)
        self._finish_context(first, lines)
        wanted = {t for t in different & self._telling.keys() if self._telling[t] < _KEPT_OF_TEMPLATE}
        if wanted and self._kept_bytes < _KEPT_BYTES:
            for index in [i for i, template in enumerate(templates) if template in wanted]:
                num = self._telling[templates[index]]
                if num >= _KEPT_OF_TEMPLATE:
                    continue
                self._telling[templates[index]] += 1
                message = [clean_line(_text(line)) for line in lines[max(0, index - 1) : index + _MESSAGE_LINES]]
                if may_match(message) or speaks_of_an_exit(message):
                    self._keep(first, lines, index, whole=num < _WHOLE_CONTEXT)
        self._recent.append((first, lines))

    def _learn(self, new: set[bytes]) -> None:
        if not new:
            return
        if len(self._known) > _MAX_KNOWN:
            self._known.clear()
        text = b"\n".join(new)
        words = set(text.split()) - self._known_words
        all_words = b"\n".join(words)
        present = [literal for literal in self._literals if literal in all_words]
        self._telling.update(dict.fromkeys(_lines_with(present, text), 0))
        self._known |= new - self._telling.keys()
        if len(self._known_words) > _MAX_KNOWN:
            self._known_words.clear()
        self._known_words |= words - _lines_with(present, all_words)

    def _finish_context(self, first: int, lines: list[bytes]) -> None:
        for index in range(min(max(0, self._wanted_until - first), len(lines))):
            self._add(first + index, lines[index])

    def _keep(self, first: int, lines: list[bytes], index: int, *, whole: bool) -> None:
        before, after = (LINES_BEFORE, LINES_AFTER) if whole else (2, 3)
        if index < before and self._recent:
            number, earlier = self._recent[-1]
            for i in range(max(0, len(earlier) - (before - index)), len(earlier)):
                self._add(number + i, earlier[i])
        for i in range(max(0, index - before), min(len(lines), index + after + 1)):
            self._add(first + i, lines[i])
        self._wanted_until = max(self._wanted_until, first + index + after + 1)

    def _add(self, number: int, line: bytes) -> None:
        if number not in self._kept and self._kept_bytes < _KEPT_BYTES:
            self._kept[number] = line[-_MAX_LINE_BYTES:]
            self._kept_bytes += len(line) + 1

    def _result(self) -> NumberedLines:
        budget = _TAIL_BYTES
        for number, line in ((first + i, lines[i]) for first, lines in reversed(self._recent) for i in _down(lines)):
            budget -= len(line) + 1
            if budget < 0:
                break
            self._kept.setdefault(number, line[-_MAX_LINE_BYTES:])
        return tuple((number, clean_line(_text(self._kept[number]))) for number in sorted(self._kept))


def _lines_with(literals: list[bytes], text: bytes) -> set[bytes]:
    found: set[bytes] = set()
    for literal in literals:
        at = text.find(literal)
        while at >= 0:
            if len(literal) <= _SHORT and literal.islower() and text[at - 1 : at].isalpha():  # the "nan" of "finance"
                end = at + 1
            else:
                end = text.find(b"\n", at)
                end = len(text) if end < 0 else end
                found.add(text[text.rfind(b"\n", 0, at) + 1 : end])
            at = text.find(literal, end)
    return found


def _text(line: bytes) -> str:
    return line.decode("utf-8", errors="replace")


def _down(lines: list[bytes]) -> range:
    return range(len(lines) - 1, -1, -1)
