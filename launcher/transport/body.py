"""Messages as the body of a request or an answer: a JSON list.

Nodes, identities and generations repeat in thousands of messages, and heartbeats repeat whole: what has been encoded
or decoded lately is kept. Invariant: what is kept is a function of the key alone, so the caches change no result.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import fields
from functools import lru_cache
from typing import Any

from launcher.cluster.codec import KIND, CodecError, message_from_json, to_json
from launcher.cluster.messages import Beat, Message

MAX_BODY_BYTES = 4 * 1024 * 1024
SMALL_BYTES = 4096  # a heartbeat or a join; a generation of a thousand nodes is a hundred times that
MAX_PARTS = 4096

_names: dict[type[Message], list[tuple[str, bytes]]] = {}
_last_beat: tuple[Message | None, bytes] = (None, b"")
_parts: dict[int, tuple[Any, bytes]] = {}  # by id; the object itself is kept with it, so the id stays its own


def encode(message: Message) -> bytes:
    """The same JSON as of `message_to_json`."""
    global _last_beat  # noqa: PLW0603 - a leader says the same to a thousand members
    kind = type(message)
    if kind is Beat:
        if message != _last_beat[0]:
            _last_beat = (message, _encode(message, kind))
        return _last_beat[1]
    return _encode(message, kind)


def _encode(message: Message, kind: type[Message]) -> bytes:
    texts = [b'{"' + KIND.encode() + b'":"' + kind.__name__.encode() + b'"']
    if kind not in _names:
        _names[kind] = [(field.name, json.dumps(field.name).encode() + b":") for field in fields(kind)]
    texts += [name + _part(getattr(message, field)) for field, name in _names[kind]]
    return b",".join(texts) + b"}"


def join(encoded: Sequence[bytes]) -> bytes:
    return b"[" + b",".join(encoded) + b"]"


def decode(body: bytes) -> tuple[Message, ...]:
    """Raises CodecError."""
    return _decode_small(body) if len(body) <= SMALL_BYTES else _decode_large(body)


def _decode(body: bytes) -> tuple[Message, ...]:
    try:
        raw = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise CodecError(f"no JSON: {error}") from None
    if not isinstance(raw, list):
        raise CodecError(f"a list of messages is needed, not {type(raw).__name__}")
    return tuple(message_from_json(item) for item in raw)


_decode_small = lru_cache(maxsize=16384)(_decode)
_decode_large = lru_cache(maxsize=4)(_decode)


def _part(value: Any) -> bytes:
    kind = type(value)
    if kind is int:
        return b"%d" % value
    if kind is bool:
        return b"true" if value else b"false"
    if kind is str or value is None:
        return json.dumps(value).encode()
    kept = _parts.get(id(value))
    if kept is None:
        if len(_parts) >= MAX_PARTS:
            _parts.clear()
        kept = _parts[id(value)] = (value, json.dumps(to_json(value), separators=(",", ":")).encode())
    return kept[1]
