"""What goes out as JSON comes back equal, and nothing else comes in."""

from __future__ import annotations

import json

import pytest

from launcher.cluster.codec import CodecError, from_json, message_from_json, message_to_json, to_json
from launcher.cluster.messages import Accept, Beat, Join, Message, Promise
from launcher.cluster.model import Accepted, Durable, Generation, Identity, Node

A, B = Node("n0", "10.0.0.1:29430", 2, "aa"), Node("n1", "10.0.0.2:29430", 2, "bb")
PAIR = Generation(3, (A, B), 1, 20001, "start")


@pytest.mark.parametrize(
    "message",
    [
        Join(A, 3, 4, True, False, Identity("sha", {"torch": "2.13"}, {"precision": "bf16"})),
        Beat(A, 3, 3, leaving=True),
        Promise(B, 3, 5, Accepted(4, PAIR), 20002, False),
        Promise(B, 3, 5, None, 20002, False),
        Accept(A, 3, 5, PAIR),
    ],
)
def test_a_message_survives_the_way(message: Message) -> None:
    assert message_from_json(json.loads(json.dumps(message_to_json(message)))) == message


def test_memory_survives_the_way() -> None:
    durable = Durable("aa", 5, Accepted(4, PAIR), PAIR)
    assert from_json(Durable, json.loads(json.dumps(to_json(durable)))) == durable


@pytest.mark.parametrize(
    "damage",
    [
        {"kind": "Message"},
        {"kind": "Nothing"},
        {"kind": ["Beat"]},
        {"known": "3"},
        {"known": True},
        {"known": None},
        {"leaving": 1},
        {"sender": None},
        {"sender": {"name": "n0"}},
        {"extra": 1},
    ],
)
def test_what_is_no_message_is_refused(damage: dict[str, object]) -> None:
    raw = {**message_to_json(Beat(A, 3, 3)), **damage}
    with pytest.raises(CodecError):
        message_from_json(raw)


@pytest.mark.parametrize("raw", [None, [], "Beat", 1, {}])
def test_what_is_no_object_is_refused(raw: object) -> None:
    with pytest.raises(CodecError):
        message_from_json(raw)
