"""Membership's data as JSON and back: what travels between agents, and what is kept in files.

Whatever comes in from outside is checked against the dataclass it is to become, field by field; anything else raises
`CodecError` and never becomes a message.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from typing import Any, TypeVar

from launcher.cluster import messages
from launcher.cluster.messages import Message

_T = TypeVar("_T")
KIND = "kind"


class CodecError(ValueError):
    """The JSON is not what it should be; the text says where."""


def to_json(value: Any) -> Any:
    """Frozen dataclasses become objects, tuples lists, mappings objects; numbers, texts, booleans and None stay."""
    if is_dataclass(value):
        return {field.name: to_json(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, tuple | list):
        return [to_json(item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): to_json(item) for key, item in value.items()}
    return value


def from_json(kind: type[_T], raw: Any, where: str = "") -> _T:
    """An instance of the dataclass `kind` from what `to_json` made of one. Raises CodecError."""
    decoded: _T = _decode(kind, raw, where or kind.__name__)
    return decoded


def message_to_json(message: Message) -> dict[str, Any]:
    return {KIND: type(message).__name__, **to_json(message)}


def message_from_json(raw: Any) -> Message:
    """Raises CodecError for an unknown kind, a missing or unknown field, a value of another type."""
    if not isinstance(raw, dict):
        raise CodecError(f"a message is an object, not {type(raw).__name__}")
    kind = raw.get(KIND)
    found = _message_kinds().get(kind) if isinstance(kind, str) else None
    if found is None:
        raise CodecError(f"there is no message of kind {kind!r}")
    decoded: Message = _decode(found, {key: value for key, value in raw.items() if key != KIND}, found.__name__)
    return decoded


@cache
def _message_kinds() -> dict[str, type[Message]]:
    kinds = (value for value in vars(messages).values() if isinstance(value, type))
    return {kind.__name__: kind for kind in kinds if issubclass(kind, Message) and kind is not Message}


@cache
def _form(kind: Any) -> tuple[Any, tuple[Any, ...]]:
    return typing.get_origin(kind), typing.get_args(kind)


@cache
def _hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind)


@cache
def _required(kind: type) -> frozenset[str]:
    return frozenset(f.name for f in fields(kind) if f.default is MISSING and f.default_factory is MISSING)


def _decode(kind: Any, raw: Any, where: str) -> Any:
    if kind in (int, str, bool, float):
        accepted = (int, float) if kind is float else kind
        if not isinstance(raw, accepted) or (isinstance(raw, bool) and kind is not bool):
            raise CodecError(f"{where}: {kind.__name__} is needed, not {type(raw).__name__}")
        return raw
    origin, arguments = _form(kind)
    if origin in (types.UnionType, typing.Union):
        (inner,) = (argument for argument in arguments if argument is not type(None))
        return None if raw is None else _decode(inner, raw, where)
    if origin is tuple:
        if not isinstance(raw, list):
            raise CodecError(f"{where}: a list is needed, not {type(raw).__name__}")
        return tuple(_decode(arguments[0], item, where) for item in raw)
    if not isinstance(raw, dict):
        raise CodecError(f"{where}: an object is needed, not {type(raw).__name__}")
    if arguments == (str, str):  # versions and the like: many entries, and JSON has only texts as keys
        for key, item in raw.items():
            if not isinstance(item, str):
                raise CodecError(f"{where}.{key}: str is needed, not {type(item).__name__}")
        return dict(raw)
    if not (isinstance(kind, type) and is_dataclass(kind)):  # Mapping[str, ...]
        return {_decode(str, key, where): _decode(arguments[1], item, where) for key, item in raw.items()}
    hints = _hints(kind)
    if raw.keys() - hints.keys() or _required(kind) - raw.keys():
        odd = sorted(raw.keys() - hints.keys()) + sorted(_required(kind) - raw.keys())
        raise CodecError(f"{where}: unknown or missing: {', '.join(map(str, odd))}")
    return kind(**{name: _decode(hints[name], value, f"{where}.{name}") for name, value in raw.items()})
