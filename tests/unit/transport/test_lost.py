"""Agents that die, hang, come back, and networks that lose: what is known at once, and what is only silence."""

from __future__ import annotations

import os
import signal
import socket

import pytest

from launcher.cluster.messages import Guide
from launcher.transport import outbound
from tests.unit.transport.agents import Agents, Server, other_process

pytestmark = pytest.mark.slow  # real time-outs


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def test_a_refused_connection_is_known_at_once(agents: Agents) -> None:
    one, address = agents.start("n0"), f"127.0.0.1:{free_port()}"
    one.transport.send(address, one.beat())
    agents.run_until(lambda: one.unreachable, 0.5)
    one.transport.send(address, one.beat())
    agents.run_until(lambda: len(one.unreachable) == 2, 0.5)
    assert one.unreachable == [address] * 2


@pytest.mark.parametrize("caller", ["we ask it", "it asks us", "both"])
def test_a_killed_agent_is_known_at_once(agents: Agents, caller: str) -> None:
    """Also when all connections were its own."""
    one = agents.start("n0")
    settings = {"call": one.address} if caller != "we ask it" else {}
    with other_process(**settings) as other:
        if caller == "we ask it":
            one.transport.send(other.address, one.beat())
        agents.run_until(lambda: one.heard)
        if caller == "both":
            one.transport.send(other.address, one.beat())
        agents.run_for(0.1)
        assert not one.unreachable
        other.process.send_signal(signal.SIGKILL)
        agents.run_until(lambda: one.unreachable, 0.5)
        agents.run_for(1.2)
        assert one.unreachable == [other.address]


def test_an_agent_killed_with_a_request_on_its_way_is_known_at_once(agents: Agents) -> None:
    one = agents.start("n0")
    with other_process() as other:
        one.transport.send(other.address, one.beat())
        agents.run_until(lambda: one.heard)
        os.kill(other.process.pid, signal.SIGSTOP)
        one.transport.send(other.address, one.beat(2))
        agents.run_for(0.2)
        assert not one.unreachable
        other.process.kill()
        agents.run_until(lambda: one.unreachable, 0.5)


def test_a_frozen_agent_is_silent_not_unreachable(agents: Agents) -> None:
    one = agents.start("n0")
    with other_process() as other:
        one.transport.send(other.address, one.beat())
        agents.run_until(lambda: one.heard)
        os.kill(other.process.pid, signal.SIGSTOP)
        for number in range(4):
            one.transport.send(other.address, one.beat(number))
            agents.run_for(0.4)
        assert not one.unreachable
        os.kill(other.process.pid, signal.SIGCONT)
        agents.run_until(lambda: len(one.heard) >= 3)  # late answers are answers
        assert not one.unreachable


@pytest.mark.parametrize("ip", ["198.51.100.7", "224.0.0.1"])
def test_a_host_that_cannot_be_reached_is_silent(agents: Agents, ip: str) -> None:
    """198.51.100.0/24 is set aside for documents: no answer. To a multicast address there is no connection at all."""
    one = agents.start("n0")
    one.transport.send(f"{ip}:29430", one.beat())
    agents.run_for(0.5)
    assert not one.unreachable


def test_the_end_of_many_connections_is_told_once(agents: Agents, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbound, "HEDGE_S", 0.0)
    one, server = agents.start("n0"), Server(agents)
    for number in range(5):
        one.transport.send(server.address, one.beat(number))
        agents.run_until(lambda number=number: len(server.asked) == number + 1)
    assert len(server.connections) == 5
    monkeypatch.undo()
    server.stop_listening()
    server.drop(server.connections[0])
    agents.run_until(lambda: one.unreachable)
    for connection in server.connections[1:]:
        server.drop(connection)
    agents.run_for(0.3)
    assert one.unreachable == [server.address]


def test_an_agent_that_is_started_anew_gets_what_was_lost(agents: Agents) -> None:
    one = agents.start("n0")
    with other_process() as other:
        one.transport.send(other.address, one.beat())
        agents.run_until(lambda: one.heard)
        port = other.address.rpartition(":")[2]
        other.kill()
        with other_process(port=port) as again:
            one.heard.clear()
            one.transport.send(again.address, one.beat(2))  # the connection is dead, but we have not looked yet
            agents.run_until(lambda: one.heard, 2)
            assert again.hear() == one.beat(2)
            assert not one.unreachable


@pytest.mark.parametrize("reset", [False, True])
def test_a_request_whose_connection_is_lost_is_sent_once_more(agents: Agents, reset: bool) -> None:
    one, server = agents.start("n0"), Server(agents)
    guide = Guide(one.node, 1, "", False, "")
    one.transport.send(server.address, guide)
    agents.run_until(lambda: len(server.asked) == 1)
    server.connections[0].sendall(server.answer(0, one.beat())[:50])  # lost in the midst of the answer
    agents.run_for(0.05)
    server.drop(server.connections[0], reset=reset)
    agents.run_until(lambda: len(server.asked) == 2, 1)
    server.asked[1][0].sendall(server.answer(1, one.beat(5)))
    agents.run_until(lambda: one.heard, 1)
    assert one.heard == [one.beat(5)]
    assert server.asked[0][1].body == server.asked[1][1].body
    assert not one.unreachable


def test_a_peer_that_drops_every_connection_is_not_called_in_a_circle(agents: Agents) -> None:
    one, server = agents.start("n0"), Server(agents)
    num_dropped = 0

    def drop_all() -> bool:
        nonlocal num_dropped
        for connection in server.connections[num_dropped:]:
            server.drop(connection)
            num_dropped += 1
        return agents.now() > until

    until = agents.now() + 1.5
    one.transport.send(server.address, one.beat())
    agents.run_until(drop_all)
    assert 3 <= num_dropped <= 12
    assert not one.unreachable


def test_an_unanswered_request_holds_nothing_up_and_its_late_answer_counts(agents: Agents) -> None:
    one, server = agents.start("n0"), Server(agents)
    one.transport.send(server.address, one.beat(1))
    agents.run_until(lambda: len(server.asked) == 1)
    one.transport.send(server.address, one.beat(2))
    agents.run_for(0.3)
    assert len(server.asked) == 1  # its answer may come any moment
    agents.run_until(lambda: len(server.asked) == 2, 1)
    assert len(server.connections) == 2
    server.asked[1][0].sendall(server.answer(1, one.beat(20)))
    agents.run_until(lambda: one.heard, 1)
    server.asked[0][0].sendall(server.answer(0, one.beat(10)))
    agents.run_until(lambda: len(one.heard) == 2, 1)
    assert one.heard == [one.beat(20), one.beat(10)]


def test_connections_to_a_peer_that_never_answers_are_bounded(agents: Agents, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbound, "HEDGE_S", 0.05)
    one, server = agents.start("n0"), Server(agents)
    for number in range(20):
        one.transport.send(server.address, one.beat(number))
        agents.run_for(0.15)
    assert len(server.connections) > outbound.MAX_CHANNELS  # the oldest gives way to a new one
    assert server.open == outbound.MAX_CHANNELS
    assert server.asked[-1][1].body != server.asked[-2][1].body


def test_what_is_never_answered_and_what_is_not_used_is_closed(agents: Agents, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbound, "ANSWER_S", 0.3)
    monkeypatch.setattr(outbound, "IDLE_S", 0.3)
    one, two, server = agents.start("n0"), agents.start("n1"), Server(agents)
    one.transport.send(server.address, one.beat())
    one.send(two, one.beat())
    agents.run_until(lambda: server.open == 1 and two.heard)
    agents.run_until(lambda: server.open == 0 and not one.transport._peers, 3)
    agents.run_until(lambda: not two.transport._peers, 3)  # its probe, too
    assert not one.unreachable
    assert not two.unreachable


def test_what_has_waited_too_long_is_not_sent(agents: Agents, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbound, "WAITING_S", 0.3)
    one, server = agents.start("n0"), Server(agents)
    one.transport.send(server.address, Guide(one.node, 1, "", False, ""))
    agents.run_until(lambda: len(server.asked) == 1)
    one.transport.send(server.address, Guide(one.node, 2, "", False, ""))
    agents.run_for(0.4)
    server.asked[0][0].sendall(server.answer(0))
    agents.run_for(0.2)
    assert len(server.asked) == 1


def test_the_queue_is_bounded(agents: Agents, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbound, "MAX_WAITING", 10)
    one, two = agents.start("n0"), agents.start("n1")
    for number in range(100):
        one.send(two, Guide(one.node, number, "", False, ""))
    agents.run_until(lambda: two.heard)
    agents.run_for(0.1)
    assert [message.known for message in two.heard] == list(range(90, 100))


def test_a_connection_that_meets_itself_is_a_refused_one(agents: Agents, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel may take the port that is asked for as the port to ask from; then somebody seems to listen there."""
    one, port = agents.start("n0"), free_port()
    open_socket = socket.socket

    def bound(*arguments: int) -> socket.socket:
        made = open_socket(*arguments)
        made.bind(("127.0.0.1", port))
        return made

    monkeypatch.setattr(outbound.socket, "socket", bound)
    one.transport.send(f"127.0.0.1:{port}", one.beat())
    agents.run_until(lambda: one.unreachable, 1)
    assert not one.heard
