"""Two agents speak over real sockets."""

from __future__ import annotations

import pytest

from launcher.cluster.messages import Beat, End, Guide, Learn, Message
from launcher.cluster.model import Generation, Node
from launcher.errors import UserError
from tests.unit.transport.agents import TOKEN, Agents, Server, other_process


def test_a_message_arrives_and_its_answer_travels_in_the_response(agents: Agents) -> None:
    one, two = agents.start("n0"), agents.start("n1")
    two.reply = lambda message: two.beat(2)
    one.send(two, one.beat())
    agents.run_until(lambda: one.heard)
    assert two.heard == [one.beat()]
    assert one.heard == [two.beat(2)]
    assert not two.transport._peers  # it has never called back
    assert not one.said
    assert not two.said


def test_nothing_is_delivered_from_within_send(agents: Agents) -> None:
    one, two = agents.start("n0"), agents.start("n1")
    one.transport.send("127.0.0.1:1", one.beat())  # nobody listens there: refused at once
    one.send(two, one.beat())
    assert not one.unreachable
    assert not two.heard
    agents.run_until(lambda: one.unreachable and two.heard)


def test_a_message_to_a_third_takes_its_own_way(agents: Agents) -> None:
    one, two, three = agents.start("n0"), agents.start("n1"), agents.start("n2")
    two.reply = lambda message: two.transport.send(three.address, two.beat(7))
    one.send(two, one.beat())
    agents.run_until(lambda: three.heard)
    assert three.heard == [two.beat(7)]
    assert not one.heard


def test_a_connection_is_kept(agents: Agents) -> None:
    one, server = agents.start("n0"), Server(agents)
    for number in range(20):
        one.transport.send(server.address, one.beat(number))
        agents.run_until(lambda number=number: len(server.asked) == number + 1)
        server.asked[-1][0].sendall(server.answer(-1, one.beat(number)))
        agents.run_until(lambda number=number: len(one.heard) == number + 1)
    assert len(server.connections) == 1


def test_the_same_heartbeat_again_is_heard_again(agents: Agents) -> None:
    """The bytes are those of the last request: they are not parsed anew, and all the same they count."""
    one, two = agents.start("n0"), agents.start("n1")
    answers = iter(range(100))
    two.reply = lambda message: two.beat(next(answers) // 2)
    for number in range(1, 6):
        one.send(two, one.beat())
        agents.run_until(lambda number=number: len(one.heard) == number)
    one.send(two, one.beat(9))
    agents.run_until(lambda: len(one.heard) == 6)
    assert two.heard == [one.beat()] * 5 + [one.beat(9)]
    assert [message.known for message in one.heard] == [0, 0, 1, 1, 2, 2]


def test_of_the_heartbeats_that_wait_only_the_newest_goes(agents: Agents) -> None:
    one, two = agents.start("n0"), agents.start("n1")
    guide = Guide(one.node, 1, "", False, "")
    for number in range(5):
        one.send(two, one.beat(number))
        one.send(two, guide)
    agents.run_until(lambda: len(two.heard) >= 6)
    agents.run_for(0.2)
    assert [message for message in two.heard if isinstance(message, Beat)] == [one.beat(4)]
    assert two.heard.count(guide) == 5


def test_a_burst_arrives_whole_and_in_order(agents: Agents) -> None:
    one, two = agents.start("n0"), agents.start("n1")
    two.reply = lambda message: Guide(two.node, message.known, "", False, "")
    for number in range(5000):
        one.send(two, Guide(one.node, number, "", False, "x"))
    agents.run_until(lambda: len(one.heard) == 5000, 20)
    assert [message.known for message in two.heard] == list(range(5000))
    assert [message.known for message in one.heard] == list(range(5000))


def test_a_generation_of_ten_thousand_nodes_passes(agents: Agents) -> None:
    one, two = agents.start("n0"), agents.start("n1")
    members = tuple(Node(f"n{i}", f"10.0.{i // 256}.{i % 256}:29430", 8, "ab" * 16) for i in range(10_000))
    learn = Learn(one.node, 3, Generation(3, members, 0, 29500, "start"))
    two.reply = lambda message: Learn(two.node, 3, learn.generation)
    one.send(two, learn)
    agents.run_until(lambda: one.heard, 20)
    assert two.heard == [learn]


def test_what_is_too_large_is_said_and_not_sent(agents: Agents) -> None:
    one, two = agents.start("n0"), agents.start("n1")
    one.send(two, End(one.node, 1, 1, "x" * 5_000_000))
    one.send(two, one.beat())
    agents.run_until(lambda: two.heard)
    assert two.heard == [one.beat()]
    assert any("5000" in line and "not sent" in line for line in one.said)


def test_an_answer_that_becomes_too_large_goes_on_by_itself(agents: Agents) -> None:
    one, two = agents.start("n0"), agents.start("n1")
    ends = [End(two.node, number, 1, "x" * 1_500_000) for number in range(4)]

    def reply(message: Message) -> None:
        for end in ends:
            two.transport.send(message.sender.address, end)

    two.reply = reply
    one.send(two, one.beat())
    agents.run_until(lambda: len(one.heard) == 4, 20)
    assert sorted(message.known for message in one.heard) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "address", ["", "nonsense", "host:29430", "10.0.0.1", "10.0.0.1:0", "10.0.0.1:70000", "::1:80"]
)
def test_what_is_no_address_is_said_once(agents: Agents, address: str) -> None:
    one = agents.start("n0")
    for _ in range(3):
        one.transport.send(address, one.beat())
    agents.run_for(0.05)
    assert len(one.said) == 1
    assert repr(address) in one.said[0]


def test_a_port_that_is_taken_is_a_clear_error(agents: Agents) -> None:
    one = agents.start("n0")
    with pytest.raises(UserError, match=rf"port {one.transport.port} is taken.*agent_port"):
        agents.start("n1", port=one.transport.port)


def test_a_port_is_free_at_once_after_close(agents: Agents) -> None:
    one, two = agents.start("n0"), agents.start("n1")
    one.send(two, one.beat())
    agents.run_until(lambda: two.heard)
    two.transport.close(0)
    again = agents.start("n1", port=two.transport.port)
    one.send(again, one.beat(2))
    agents.run_until(lambda: again.heard)


# ---- the end ----


def test_what_was_sent_last_still_arrives(agents: Agents) -> None:
    one = agents.start("n0")
    with other_process() as other:
        guide = Guide(one.node, 1, "", False, "")
        one.transport.send(other.address, guide)
        agents.run_until(lambda: one.heard)
        one.transport.send(other.address, End(one.node, 1, 0, "done"))
        began = agents.now()
        one.transport.close(5)
        assert agents.now() - began < 2
        assert [other.hear(), other.hear()] == [guide, End(one.node, 1, 0, "done")]


def test_closing_while_a_request_is_handled_still_answers_it(agents: Agents) -> None:
    one, two = agents.start("n0"), agents.start("n1")

    def reply(message: Message) -> None:
        two.transport.send(message.sender.address, End(two.node, 1, 0, "done"))
        two.transport.close(0)

    two.reply = reply
    one.send(two, End(one.node, 1, 0, "done"))
    one.send(two, one.beat())
    agents.run_until(lambda: one.heard)
    assert one.heard == [End(two.node, 1, 0, "done")]
    assert len(two.heard) == 1  # after its end an agent hears nothing


def test_closing_is_bounded_when_nobody_answers(agents: Agents) -> None:
    one, server = agents.start("n0"), Server(agents)
    one.transport.send(server.address, End(one.node, 1, 0, "done"))
    began = agents.now()
    one.transport.close(0.5)
    assert 0.4 < agents.now() - began < 2
    one.transport.send(server.address, one.beat())  # no effect
    one.transport.tick()
    one.transport.close(0.5)


def test_closing_does_not_wait_when_there_is_nothing_to_wait_for(agents: Agents) -> None:
    one = agents.start("n0")
    began = agents.now()
    one.transport.close(5)
    assert agents.now() - began < 1


def test_the_token_never_travels(agents: Agents) -> None:
    one, server = agents.start("n0"), Server(agents)
    one.transport.send(server.address, one.beat())
    agents.run_until(lambda: server.asked)
    request = server.asked[0][1]
    assert TOKEN.encode() not in b"".join([*request.headers, *request.headers.values(), request.body])
