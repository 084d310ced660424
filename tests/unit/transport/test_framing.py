"""Requests and answers out of a stream, however it is cut, and within bounds."""

from __future__ import annotations

import random

import pytest

from launcher.transport import framing
from launcher.transport.body import MAX_BODY_BYTES
from launcher.transport.framing import MAX_HEAD_BYTES, NonsenseError, Reader, Received

REQUEST = framing.request(b"10.0.0.1:29430", b"run", b"seal", b"[1, 2]")


def feed(reader: Reader, data: bytes, size: int) -> list[Received]:
    return [found for at in range(0, len(data), size) for found in reader.feed(data[at : at + size])]


@pytest.mark.parametrize("size", [1, 7, 100_000])
def test_a_request_comes_out_however_it_is_cut(size: int) -> None:
    reader = Reader(answers=False)
    found = feed(reader, REQUEST + REQUEST, size)
    assert [request.body for request in found] == [b"[1, 2]"] * 2
    assert found[0].method == b"POST"
    assert found[0].path == framing.PATH
    assert found[0].headers[framing.RUN_HEADER] == b"run"
    assert found[0].headers[framing.SEAL_HEADER] == b"seal"
    assert found[0].keep_alive
    assert not reader.midst


def test_an_answer_comes_out() -> None:
    (found,) = Reader(answers=True).feed(framing.answer(b"seal", b"[]", close=True))
    assert (found.status, found.body, found.keep_alive) == (200, b"[]", False)
    (found,) = Reader(answers=True).feed(framing.refusal(409, "another run"))
    assert (found.status, found.body, found.keep_alive) == (409, b"another run\n", False)


def test_a_request_in_chunks_is_a_request() -> None:
    data = b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n[1\r\n1\r\n]\r\n0\r\n\r\n"
    (found,) = feed(Reader(answers=False), data, 1)
    assert found.body == b"[1]"


def test_the_reader_knows_that_something_is_not_whole() -> None:
    reader = Reader(answers=False)
    assert not reader.midst
    reader.feed(REQUEST[:10])
    assert reader.midst
    reader.feed(REQUEST[10:])
    assert not reader.midst


@pytest.mark.parametrize("size", [1, 1000, 1_000_000])
@pytest.mark.parametrize(
    ("status", "data"),
    [
        (431, b"POST / HTTP/1.1\r\n" + b"A: b\r\n" * MAX_HEAD_BYTES),
        (431, b"POST / HTTP/1.1\r\nA: " + b"b" * (2 * MAX_HEAD_BYTES)),
        (431, b"POST /" + b"b" * (2 * MAX_HEAD_BYTES)),
        (413, b"POST / HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % (MAX_BODY_BYTES + 1)),
        (413, b"POST / HTTP/1.1\r\nContent-Length: " + b"9" * 15 + b"\r\n\r\n"),
        (400, b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc"),  # somebody speaks TLS
        (400, b"hello\r\n\r\n"),
        (400, b"POST / HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n"),
        (400, b"POST / HTTP/1.1\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n"),
        (400, b"POST / HTTP/1.1\r\nContent-Length: -1\r\n\r\n"),
        (400, b"CONNECT a:1 HTTP/1.1\r\n\r\n"),
        (400, b"GET / HTTP/1.1\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"),
        (400, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"),
    ],
)
def test_nonsense_and_too_much_are_refused(status: int, data: bytes, size: int) -> None:
    with pytest.raises(NonsenseError) as caught:
        feed(Reader(answers=False), data, size)
    assert caught.value.status == status


def test_a_body_that_grows_in_chunks_is_refused_at_the_bound() -> None:
    reader = Reader(answers=False)
    reader.feed(b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n")
    chunk = b"10000\r\n" + b"x" * 0x10000 + b"\r\n"
    for _ in range(MAX_BODY_BYTES // 0x10000):
        reader.feed(chunk)
    with pytest.raises(NonsenseError) as caught:
        reader.feed(chunk)
    assert caught.value.status == 413


def test_no_bytes_do_more_than_be_refused() -> None:
    rng = random.Random(0)
    for _ in range(2000):
        data = bytearray(REQUEST)
        for _ in range(rng.randint(1, 4)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        reader = Reader(answers=rng.random() < 0.2)
        try:
            feed(reader, bytes(data), rng.choice((3, 1000)))
        except NonsenseError:
            continue
