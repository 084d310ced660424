"""Whoever has no business here is refused within bounds, and disturbs nobody."""

from __future__ import annotations

import json
import resource
import socket
import time

import pytest

from launcher.transport import framing, inbound
from launcher.transport.framing import Reader, Received
from launcher.transport.seal import Seal
from tests.unit.transport.agents import TOKEN, Agent, Agents, Server, connect


def read_answer(agents: Agents, stranger: socket.socket, seconds: float = 3.0) -> Received:
    """And the end of the connection: whoever is refused is not listened to any more."""
    reader, found = Reader(answers=True), []
    stranger.setblocking(False)
    closed = False

    def read() -> None:
        nonlocal closed
        try:
            data = stranger.recv(65536)
        except BlockingIOError:
            return
        except ConnectionResetError:
            data = b""
        closed = not data
        found.extend(reader.feed(data) if data else [])

    agents.run_until(lambda: (read(), found and closed)[1], seconds)
    return found[0]


def is_dropped(agents: Agents, stranger: socket.socket, seconds: float) -> bool:
    stranger.setblocking(False)
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        agents.run_for(0.02)
        try:
            if not stranger.recv(65536):
                return True
        except BlockingIOError:
            continue
        except ConnectionResetError:
            return True
    return False


def sealed(body: bytes, *, token: str = TOKEN, run_id: str = "run") -> bytes:
    seal = Seal(token, run_id)
    return framing.request(b"127.0.0.1:1", seal.run, seal.of_request(body), body)


def assert_lives(agents: Agents, one: Agent, two: Agent) -> None:
    before = len(two.heard)
    one.send(two, one.beat(before + 1))
    agents.run_until(lambda: len(two.heard) > before, 1)


def test_another_token_is_refused_and_both_sides_say_so_once(agents: Agents) -> None:
    one, two = agents.start("n0", token="another token"), agents.start("n1")
    for number in range(3):
        one.send(two, one.beat(number))
        agents.run_for(0.1)
    assert not two.heard
    assert not one.unreachable
    assert one.said == [f"{two.address} does not accept this run's token (cluster.token, FTLAUNCH_TOKEN)"]
    assert len(two.said) == 1
    assert "127.0.0.1 was refused: it does not have this run's token" in two.said[0]
    assert not any(token in line for token in (TOKEN, "another token") for line in one.said + two.said)


def test_another_run_at_the_same_port_is_named_as_that_on_both_sides(agents: Agents) -> None:
    one, two = agents.start("n0", run_id="yesterday"), agents.start("n1", token="other")
    one.send(two, one.beat())
    agents.run_until(lambda: one.said and two.said)
    assert not two.heard
    assert not one.unreachable
    assert f"{two.address} belongs to another run" in one.said[0]
    assert "127.0.0.1 was refused: it asks for another run" in two.said[0]


@pytest.mark.parametrize(
    "forged",
    [{"token": "another"}, {"run_id": "yesterday"}],
)
def test_an_answer_without_the_token_is_not_used(agents: Agents, forged: dict[str, str]) -> None:
    one, server = agents.start("n0"), Server(agents)
    one.transport.send(server.address, one.beat())
    agents.run_until(lambda: server.asked)
    server.asked[0][0].sendall(server.answer(0, one.beat(), **forged))
    agents.run_until(lambda: one.said)
    assert not one.heard
    assert f"{server.address} answers without this run's token" in one.said[0]


def test_an_answer_to_another_question_is_not_used(agents: Agents) -> None:
    one, server = agents.start("n0"), Server(agents)
    for number in range(2):
        one.transport.send(server.address, one.beat(number))
        agents.run_until(lambda number=number: len(server.asked) == number + 1)
        server.asked[-1][0].sendall(server.answer(0, one.beat()))
        agents.run_for(0.1)
    assert len(one.heard) == 1


@pytest.mark.parametrize(
    "data", [b"SSH-2.0-OpenSSH_9.9\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi", b"\x00" * 100]
)
def test_a_port_where_somebody_else_lives_is_named(agents: Agents, data: bytes) -> None:
    one, server = agents.start("n0"), Server(agents)
    one.transport.send(server.address, one.beat())
    agents.run_until(lambda: server.asked)
    server.asked[0][0].sendall(data)
    agents.run_until(lambda: one.said)
    assert server.address in one.said[0]
    assert not one.heard


@pytest.mark.parametrize(
    ("status", "data"),
    [
        (400, b"\x16\x03\x01 garbage \xff\r\n\r\n"),
        (404, b"POST /v2/messages HTTP/1.1\r\nContent-Length: 2\r\n\r\n[]"),
        (404, b"GET / HTTP/1.1\r\n\r\n"),
        (405, b"GET /v1/messages HTTP/1.1\r\n\r\n"),
        (409, b"POST /v1/messages HTTP/1.1\r\nContent-Length: 2\r\n\r\n[]"),
        (401, sealed(b"[]").replace(b"\r\n\r\n[]", b"\r\n\r\n[ ").replace(b"Content-Length: 2", b"Content-Length: 2")),
        (401, sealed(b"[]", token="another")),
        (409, sealed(b"[]", run_id="yesterday")),
        (413, b"POST /v1/messages HTTP/1.1\r\nContent-Length: 4194305\r\n\r\n"),
        (431, b"POST /v1/messages HTTP/1.1\r\nA: " + b"b" * 20_000),
        (400, sealed(b"not JSON")),
        (400, sealed(b"{}")),
        (400, sealed(json.dumps([{"kind": "Nothing"}]).encode())),
        (400, sealed(json.dumps([{"kind": "Beat", "known": "x"}]).encode())),
    ],
)
def test_what_is_no_message_of_this_run_is_refused(agents: Agents, status: int, data: bytes) -> None:
    one, two = agents.start("n0"), agents.start("n1")
    with connect(two) as stranger:
        stranger.sendall(data)
        assert read_answer(agents, stranger).status == status
    assert not two.heard
    assert len(two.said) == 1
    assert "127.0.0.1" in two.said[0]
    assert_lives(agents, one, two)


def test_who_is_refused_is_not_heard_afterwards(agents: Agents) -> None:
    """Not even with the right token, in the same breath."""
    two = agents.start("n1")
    good = sealed(b"[" + json.dumps({"kind": "End"}).encode() + b"]")
    with connect(two) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" + good + good)
        assert read_answer(agents, stranger).status == 404
    assert len(two.said) == 1


def test_a_request_that_drips_in_is_dropped(agents: Agents, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inbound, "REQUEST_S", 0.3)
    one, two = agents.start("n0"), agents.start("n1")
    assert_lives(agents, one, two)
    with connect(two) as slow, connect(two) as mute:
        began, dropped = time.monotonic(), False
        for byte in sealed(b"[]"):
            try:
                slow.send(bytes([byte]))
            except OSError:
                dropped = True
                break
            agents.run_for(0.02)
        assert dropped
        assert time.monotonic() - began < 2
        assert is_dropped(agents, mute, 1)
    assert_lives(agents, one, two)


def test_a_known_agent_that_stops_in_mid_request_is_dropped(agents: Agents, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inbound, "REQUEST_S", 0.3)
    two = agents.start("n1")
    with connect(two) as client:
        client.sendall(sealed(b"[]"))
        agents.run_for(1.0)
        assert client.recv(65536).startswith(b"HTTP/1.1 200")
        client.sendall(sealed(b"[]")[:-1])  # idle was fine, this is not
        assert is_dropped(agents, client, 2)


def test_many_strangers_leave_room_for_agents(agents: Agents, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inbound, "MAX_CONNECTIONS", 10)
    one, two = agents.start("n0"), agents.start("n1")
    assert_lives(agents, one, two)
    strangers = [connect(two) for _ in range(30)]
    try:
        agents.run_for(0.2)
        three = agents.start("n2")
        assert_lives(agents, one, two)
        assert_lives(agents, three, two)
        assert is_dropped(agents, strangers[0], 1)
    finally:
        for stranger in strangers:
            stranger.close()


def test_running_out_of_files_ends(agents: Agents) -> None:
    """Accepting stops and is taken up again; it neither spins nor dies."""
    one, two = agents.start("n0"), agents.start("n1")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    strangers = [connect(two) for _ in range(5)]
    used = max(stranger.fileno() for stranger in strangers) + 1
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (used, hard))
        agents.run_until(lambda: two.said, 2)
        assert "cannot accept connections" in two.said[0]
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        agents.run_for(1.0)
        assert_lives(agents, one, two)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for stranger in strangers:
            stranger.close()


def test_the_limit_of_open_files_is_raised() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    agents = Agents()
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(1024, hard), hard))
        agents.start("n0")
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == min(hard, inbound.FILES_WANTED)
    finally:
        agents.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
