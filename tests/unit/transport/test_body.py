"""What travels is the JSON of the codec, and nothing else is taken for it."""

from __future__ import annotations

import json

import pytest

from launcher.cluster.codec import CodecError, message_to_json
from launcher.cluster.messages import (
    Accept,
    AcceptedBy,
    AllStandStill,
    AskCourier,
    AskOrders,
    AskSave,
    Beat,
    CourierAt,
    End,
    Guide,
    Join,
    Learn,
    Message,
    Orders,
    PartSaved,
    Prepare,
    Promise,
    Refuse,
    SaveOutcome,
    SaveState,
    Standstill,
    WrittenFile,
)
from launcher.cluster.model import Accepted, Generation, Identity, Node
from launcher.progress_record import Phase, Place, RankProgress
from launcher.transport.body import MAX_PARTS, decode, encode, join
from launcher.transport.seal import Seal

A, B = Node("n0", "10.0.0.1:29430", 2, "aa"), Node("n1", "10.0.0.2:29430", 2, "bb")
STILL = RankProgress(1, "n1", Phase.TRAINING, Place.INSIDE, 8, 1, 0, 412, "all_reduce", 7, 3.5, "S", 0.5, 0.6)
PAIR = Generation(3, (A, B), 1, 20001, "start")
MESSAGES: list[Message] = [
    Join(A, 3, 4, True, False, Identity("sha", {"torch": "2.13"}, {"precision": "bf16"})),
    Guide(A, 3, "10.0.0.1:29430", True, ""),
    Refuse(A, 3, '保险: fp16, not "bf16"\n'),
    Beat(A, 3, 3, leaving=True),
    Beat(A, 3, 3, finished=True),
    Prepare(A, 3, 5, 3),
    Promise(B, 3, 5, Accepted(4, PAIR), 20002, False),
    Promise(B, 3, 5, None, 20002, True),
    Accept(A, 3, 5, PAIR),
    AcceptedBy(B, 3, 5),
    Learn(A, 3, PAIR),
    End(A, 3, 138, "stopped"),
    AskSave(A, 3, 3, None, "n1 has to go"),
    SaveState(B, 3, 3, True, 7, False),
    AskOrders(B, 3, 3),
    Orders(A, 3, 3, '{"generation": 3}', 12),
    AskCourier(A, 3),
    CourierAt(B, 3, "10.0.0.2:40001"),
    PartSaved(B, 3, 3, 12, (WrittenFile("global_step12/a.pt", 17, "ab" * 16), WrittenFile("latest", 13, "cd" * 16))),
    PartSaved(B, 3, 3, 12, (), "no space left"),
    SaveOutcome(A, 3, 3, 12, ""),
    Standstill(B, 3, 4, (STILL,)),
    AllStandStill(A, 3, 4, (STILL,)),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_message_travels_as_the_codec_writes_it(message: Message) -> None:
    assert json.loads(encode(message)) == message_to_json(message)
    assert decode(join([encode(message)])) == (message,)


def test_every_kind_of_message_is_among_them() -> None:
    assert {type(message).__name__ for message in MESSAGES} == {kind.__name__ for kind in Message.__subclasses__()}


def test_a_heartbeat_after_another_is_not_the_other() -> None:
    beats = [Beat(A, 3, 3), Beat(A, 3, 3), Beat(A, 3, 3, leaving=True), Beat(B, 3, 3), Beat(A, 4, 3), Beat(A, 3, 3)]
    assert [decode(join([encode(beat)]))[0] for beat in beats] == beats


def test_what_is_kept_never_stands_for_another_object() -> None:
    """Objects die and their ids are given to others: thousands of them must not be mixed up."""
    for number in range(2 * MAX_PARTS):
        message = Beat(Node(f"n{number}", "10.0.0.1:1", 1, "aa"), number, number)
        assert decode(join([encode(message)])) == (message,)


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"null", b"{}", b"[1]", b"\xff\xfe", b'[{"kind":"Beat"}]', b"[" * 100_000, b"1" * 5000],
    ids=repr,
)
def test_anything_else_is_refused(body: bytes) -> None:
    with pytest.raises(CodecError):
        decode(body)


def test_one_bad_message_spoils_the_list() -> None:
    with pytest.raises(CodecError):
        decode(join([encode(MESSAGES[3]), b"{}"]))


def test_a_seal_is_worth_nothing_elsewhere() -> None:
    body = b"[]"
    mine = Seal("token", "run")
    seals = [
        mine.of_request(body),
        mine.of_request(b"[ ]"),
        mine.of_answer(mine.of_request(body), body),
        mine.of_answer(mine.of_request(b"[ ]"), body),
        Seal("token2", "run").of_request(body),
        Seal("token", "run2").of_request(body),
    ]
    assert len(set(seals)) == len(seals)
    assert mine.run != Seal("token", "run2").run
    assert mine.run == Seal("token2", "run").run


def test_an_empty_token_is_no_token() -> None:
    with pytest.raises(ValueError, match="empty"):
        Seal("", "run")
