"""JSON lines in, conversations out. Every error names file and line.

A record becomes a tuple of turns; the last turn is what the model learns (unless the record is plain text).
"""

from __future__ import annotations

import glob
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.errors import UserError

IGNORED_LABEL = -100  # torch.nn.CrossEntropyLoss's ignore_index


class DataError(UserError):
    """A record that cannot be used; the message names file and line."""


@dataclass(frozen=True)
class Turn:
    role: str
    content: str


@dataclass(frozen=True)
class Record:
    """`turns` for conversations; `text` for plain text; exactly one of them is set."""

    source: str
    line: int
    turns: tuple[Turn, ...] = ()
    text: str = ""


# Field names of each format, first match wins. The order matters: `messages` is the most specific.
FORMATS: Mapping[str, tuple[str, ...]] = {
    "messages": ("messages",),
    "alpaca": ("instruction", "output"),
    "prompt_completion": ("prompt", "completion"),
    "qa": ("question", "answer"),
    "text": ("text",),
}


def expand_files(patterns: Sequence[str]) -> list[Path]:
    """Files of all patterns in a fixed order. Raises UserError for a pattern without a match."""
    files: list[Path] = []
    for pattern in patterns:
        literal = Path(pattern)
        matches = [literal] if literal.is_file() else [Path(p) for p in sorted(glob.glob(pattern)) if os.path.isfile(p)]
        if not matches:
            raise UserError(f"data: no file matches {pattern!r}")
        files.extend(matches)
    return files


def read_records(patterns: Sequence[str], data_format: str, system_prompt: str | None = None) -> Iterator[Record]:
    """Every record of every file, in file order. Raises DataError with file and line for what cannot be used."""
    for path in expand_files(patterns):
        with path.open("rb") as stream:
            for number, raw in enumerate(stream, start=1):
                if raw.strip():
                    yield parse_record(raw, data_format, source=str(path), line=number, system_prompt=system_prompt)


def parse_record(raw: bytes, data_format: str, *, source: str, line: int, system_prompt: str | None = None) -> Record:
    where = f"{source}:{line}"
    try:
        fields = json.loads(raw.decode("utf-8-sig").rstrip("\r\n"))
    except UnicodeDecodeError as error:
        raise DataError(
            f"{where}: not UTF-8 ({error.reason} at byte {error.start}); convert the file to UTF-8"
        ) from error
    except json.JSONDecodeError as error:
        raise DataError(
            f"{where}: not JSON: {error.msg} at column {error.colno}; one JSON object a line is needed"
        ) from error
    if not isinstance(fields, dict):
        raise DataError(f"{where}: a JSON {type(fields).__name__} where an object is needed")
    chosen = detect_format(fields) if data_format == "auto" else data_format
    if chosen is None or any(key not in fields for key in FORMATS[chosen]):
        expected = "; ".join(f"{name}: {', '.join(keys)}" for name, keys in FORMATS.items())
        asked = (
            "no known format"
            if chosen is None
            else f"data.format is {chosen}, which needs {', '.join(FORMATS[chosen])}"
        )
        raise DataError(
            f"{where}: {asked}; the record has the fields {', '.join(map(str, fields))}. Known formats: {expected}"
        )
    if chosen == "text":
        return Record(source, line, text=_string(fields["text"], where, "text"))
    turns = _turns(fields, chosen, where)
    if system_prompt and turns[0].role != "system":
        turns = (Turn("system", system_prompt), *turns)
    return Record(source, line, turns=turns)


def detect_format(fields: Mapping[str, Any]) -> str | None:
    return next((name for name, keys in FORMATS.items() if all(key in fields for key in keys)), None)


def _turns(fields: Mapping[str, Any], data_format: str, where: str) -> tuple[Turn, ...]:
    if data_format == "messages":
        return _message_turns(fields["messages"], where)
    if data_format == "alpaca":
        question = _string(fields["instruction"], where, "instruction")
        extra = fields.get("input") or ""
        question = f"{question}\n\n{_string(extra, where, 'input')}" if extra else question
        return (Turn("user", question), Turn("assistant", _string(fields["output"], where, "output")))
    asked, answered = FORMATS[data_format]
    return (
        Turn("user", _string(fields[asked], where, asked)),
        Turn("assistant", _string(fields[answered], where, answered)),
    )


def _message_turns(messages: Any, where: str) -> tuple[Turn, ...]:
    if not isinstance(messages, list) or not messages:
        raise DataError(f"{where}: `messages` must be a list with at least one message")
    turns = []
    for index, message in enumerate(messages):
        if not isinstance(message, dict) or "role" not in message or "content" not in message:
            raise DataError(f"{where}: messages[{index}] needs `role` and `content`")
        turns.append(Turn(str(message["role"]), _string(message["content"], where, f"messages[{index}].content")))
    if turns[-1].role != "assistant":
        raise DataError(
            f"{where}: the last message has the role {turns[-1].role!r}; the model learns from `assistant` messages"
        )
    return tuple(turns)


def _string(value: Any, where: str, field: str) -> str:
    if not isinstance(value, str):
        raise DataError(f"{where}: `{field}` is a {type(value).__name__} where a text is needed")
    if not value.strip():
        raise DataError(f"{where}: `{field}` is empty")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        cut = value[error.start].encode("utf-8", "backslashreplace").decode()
        raise DataError(
            f"{where}: `{field}` holds half a character ({cut}, a cut emoji?) at place {error.start}"
        ) from error
    return value
