"""`--set` and `FTLAUNCH_SET` laid over the file.

Invariant: `--set` wins over `FTLAUNCH_SET`, which wins over the file, which wins over the defaults; every given key has
exactly one origin.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from launcher.config.document import Document, parse_override_value
from launcher.config.mistakes import KeyPath, Mistake, dotted

OriginKind = Literal["file", "--set", "FTLAUNCH_SET", "default"]

_EXAMPLE = "max_steps=100"
_KEY = re.compile(r"[A-Za-z_][\w-]*(\.[A-Za-z_][\w-]*)*")


@dataclass(frozen=True)
class Origin:
    """Where a value comes from; `line` is 1-based and only known for the file."""

    kind: OriginKind
    line: int | None = None


@dataclass(frozen=True)
class Given:
    """What was given, in plain data, and where each key of it comes from (sections and list items too)."""

    data: dict[str, Any]
    origins: dict[KeyPath, Origin]
    number_texts: dict[KeyPath, str]
    mistakes: tuple[Mistake, ...]

    def origin(self, key: KeyPath) -> Origin:
        """The origin of a key, else of what holds it."""
        for length in range(len(key), 0, -1):
            if key[:length] in self.origins:
                return self.origins[key[:length]]
        return Origin("file")


@dataclass(frozen=True)
class _Override:
    key: tuple[str, ...]
    value: Any
    kind: OriginKind


def apply_overrides(document: Document, overrides: Sequence[str], environ: Mapping[str, str]) -> Given:
    """The file's data with `FTLAUNCH_SET` and then `overrides` (each `key.path=value`) applied."""
    from_environ = [item for item in re.split(r"[;\n]", environ.get("FTLAUNCH_SET", "")) if item.strip()]
    parsed = [*_parse_all(from_environ, "FTLAUNCH_SET"), *_parse_all(overrides, "--set")]
    given = Given(
        data=_copy(document.data),
        origins={key: Origin("file", line) for key, line in document.lines.items()},
        number_texts=dict(document.number_texts),
        mistakes=tuple(item for item in parsed if isinstance(item, Mistake)),
    )
    refused = [_apply(given, item) for item in parsed if isinstance(item, _Override)]
    mistakes = (*given.mistakes, *(mistake for mistake in refused if mistake is not None))
    return Given(given.data, given.origins, given.number_texts, mistakes)


def _parse_all(items: Iterable[str], kind: OriginKind) -> list[_Override | Mistake]:
    return [_parse(item, kind) for item in items]


def _parse(item: str, kind: OriginKind) -> _Override | Mistake:
    name, equals, text = item.partition("=")
    name = name.strip()
    if not equals or not _KEY.fullmatch(name):
        shown = _KEY.match(item.strip())
        problem = "the key has a form that is not known" if equals else "there is no '=' between key and value"
        return Mistake(
            (),
            problem,
            found=f"{shown.group()} (the rest is not shown)" if shown else "text that does not begin with a key",
            accepted=f"section.key=value, as in training.{_EXAMPLE}",
            remedy="write the whole list, as in data.train=[a.jsonl, b.jsonl]" if "[" in name else None,
            place=kind,
        )
    key = tuple(name.split("."))
    try:
        return _Override(key, parse_override_value(text), kind)
    except ValueError as error:
        accepted = "a number, true, false, null, text, [a, b] or {key: value}"
        return Mistake(key, f"has a malformed value: {error}", accepted=accepted, place=kind)


def _apply(given: Given, override: _Override) -> Mistake | None:
    section: dict[str, Any] = given.data
    for depth, part in enumerate(override.key[:-1], start=1):
        below = section.get(part)
        if below is None:
            below = section[part] = {}
            given.origins[override.key[:depth]] = Origin(override.kind)
        if not isinstance(below, dict):
            parent = dotted(override.key[:depth])
            return Mistake(
                override.key,
                f"cannot be set, because {parent} is given as a single value",
                remedy=f"set {parent} as a whole, as in {parent}={{{override.key[depth]}: ...}}",
                place=override.kind,
            )
        section = below
    section[override.key[-1]] = override.value
    for known in [known for known in given.origins if known[: len(override.key)] == override.key]:
        del given.origins[known]
        given.number_texts.pop(known, None)
    given.origins[override.key] = Origin(override.kind)
    return None


def _copy(value: Any) -> Any:
    """Mappings copied all the way down: aliases in YAML share them, and an override must change one place only."""
    return {key: _copy(item) for key, item in value.items()} if isinstance(value, dict) else value
