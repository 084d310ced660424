"""Findings for a terminal or a job's log: worst first, each with measured value, bound and the way out."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Mapping, Sequence

from launcher.i18n import Text
from launcher.preflight.finding import Finding, Severity, count_by_severity

LABELS = {
    Severity.ERROR: Text("ERROR", "错误"),
    Severity.WARNING: Text("WARNING", "警告"),
    Severity.OK: Text("ok", "通过"),
}
SUMMARY = Text("{error} error(s), {warning} warning(s), {ok} in order", "{error} 个错误，{warning} 个警告，{ok} 项通过")
CLOSING, OPENING = "，。；：、）！？」", "（「"  # no line begins with one of the first or ends with one of the others
LABEL_WIDTH, ID_WIDTH = 9, 21
INDENT = " " * LABEL_WIDTH


def render_table(findings: Sequence[Finding], environ: Mapping[str, str] | None = None, width: int = 100) -> str:
    """Plain text without a trailing newline; `width` in columns, of which a Chinese character takes two."""
    lines: list[str] = []
    for finding in sorted(findings, key=lambda f: f.severity.rank):
        lines += _render(finding, environ, width)
    return "\n".join([*lines, SUMMARY.format(**count_by_severity(findings)).pick(environ)])


def _render(finding: Finding, environ: Mapping[str, str] | None, width: int) -> Iterator[str]:
    label = LABELS[finding.severity].pick(environ)
    bound = Text(" (wanted: {bound})", "（要求：{bound}）").format(bound=finding.bound).pick(environ)
    head = _pad(label, LABEL_WIDTH) + _pad(finding.id, ID_WIDTH) + finding.measured + bound
    if finding.severity is Severity.OK:
        yield _shortened(head, width)
        return
    yield head
    for text, lead in ((finding.message, ""), (finding.remedy, "-> ")):
        for number, line in enumerate(_wrap(text.pick(environ), width - LABEL_WIDTH - len(lead))):
            yield INDENT + (lead if number == 0 else " " * len(lead)) + line


def _shortened(line: str, width: int) -> str:
    """What is in order takes one line; `--json` has the whole."""
    if columns(line) <= width:
        return line
    while columns(line) > width - 3:
        line = line[:-1]
    return line + "..."


def columns(text: str) -> int:
    """Columns of a terminal that `text` takes."""
    return sum(2 if unicodedata.east_asian_width(character) in "WF" else 1 for character in text)


def _pad(text: str, width: int) -> str:
    return text + " " * max(1, width - columns(text))


def _wrap(text: str, width: int) -> Iterator[str]:
    """Break at spaces and between wide characters, never inside a bracket's edge; a longer word stays whole."""
    line = ""
    for piece in _pieces(text):
        if line and columns(line + piece.rstrip()) > width:
            yield line.rstrip()
            line = piece.lstrip()
        else:
            line += piece
    if line:
        yield line.rstrip()


def _pieces(text: str) -> Iterator[str]:
    """The parts between which a line may break; a space belongs to the part before it."""
    piece = ""
    for character in text:
        wide = columns(character) == 2
        glued = character in CLOSING or piece[-1:] in OPENING
        if piece and not glued and (wide or piece[-1] == " " or columns(piece[-1]) == 2):
            yield piece
            piece = ""
        piece += character
    if piece:
        yield piece
