"""A mistake in the configuration, and how it is shown.

Invariant: a message names the place, the key, what is accepted and the way out, and it never shows a secret: values
under `env`, values of keys that sound like credentials and values of unknown keys are left out.
"""

import difflib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

KeyPath = tuple[str | int, ...]

_LONGEST_VALUE = 80
_SECRET_NAME = re.compile(r"token|secret|passw|api_?key|access_?key|credential", re.IGNORECASE)


@dataclass(frozen=True)
class Mistake:
    """One thing to correct: `what` continues the sentence "<key> ..."; the lines below it are optional.

    `place` is for mistakes whose place does not follow from their key, as a malformed `--set`.
    """

    key: KeyPath
    what: str
    found: str | None = None
    accepted: str | None = None
    remedy: str | None = None
    place: str | None = None


def dotted(key: KeyPath) -> str:
    """`("data", "train", 0)` -> `data.train[0]`, the spelling of messages and of `--set`."""
    text = ""
    for part in key:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def render(mistakes: Sequence[Mistake], locate: Callable[[KeyPath], str]) -> str:
    """All mistakes as one text; `locate` gives the place of a key, as in `job.yaml:4`."""
    blocks = [_render_one(mistake, mistake.place or locate(mistake.key)) for mistake in mistakes]
    if len(blocks) == 1:
        return blocks[0]
    return "\n".join([f"{len(blocks)} mistakes in the configuration:", *blocks])


def _render_one(mistake: Mistake, place: str) -> str:
    subject = f"{dotted(mistake.key)} " if mistake.key else ""
    lines = [f"{place}: {subject}{mistake.what}"]
    for label, text in (("found", mistake.found), ("accepted", mistake.accepted), ("do", mistake.remedy)):
        if text is not None:
            lines.append(f"    {label + ':':<10}{text}")
    return "\n".join(lines)


def show_value(key: KeyPath, value: object) -> str:
    """A value in a form that is fit for a message: short, with its YAML type, and without secrets."""
    if sounds_secret(dotted(key)) or key[:1] == ("env",):
        return f"{_type_name(value)} (value not shown)"
    if isinstance(value, Mapping):
        return f"a mapping with the keys {', '.join(map(str, value))}" if value else "an empty mapping"
    if isinstance(value, list):
        return f"a list of {len(value)}" if value else "an empty list"
    if value is None:
        return "nothing (null)"
    if isinstance(value, bool):
        return f"{str(value).lower()} (true/false)"
    return f"{_shorten(repr(value) if isinstance(value, str) else str(value))} ({_type_name(value)})"


def sounds_secret(text: str) -> bool:
    """Whether a key or a line of the file may hold a credential, so that its value is not shown."""
    return _SECRET_NAME.search(text) is not None


def nearest(word: str, candidates: Iterable[str]) -> str | None:
    """The candidate that `word` most likely meant, or None when nothing is close."""
    by_lower = {candidate.lower(): candidate for candidate in candidates}
    word = word.lower()
    if word in by_lower:
        return by_lower[word]
    longer = [candidate for candidate in by_lower if candidate.startswith(f"{word}_")]
    close = longer or difflib.get_close_matches(word, by_lower, n=1, cutoff=0.6)
    return by_lower[close[0]] if close else None


def _type_name(value: object) -> str:
    if value is None:
        return "null"
    names = {bool: "true/false", int: "whole number", float: "number", str: "text", list: "list", dict: "mapping"}
    return names.get(type(value), type(value).__name__)


def _shorten(text: str) -> str:
    return text if len(text) <= _LONGEST_VALUE else text[: _LONGEST_VALUE - 3] + "..."
