"""Effects are carried out in membership's order, and wait for the ranks' end; orders and saves reach every node."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator

import pytest

from launcher.agent.cluster_crew import ClusterCrew
from launcher.agent.crew import Orders, RunOver, Turn
from launcher.cluster.membership import Membership
from launcher.cluster.messages import Join, Message, Promise
from launcher.cluster.model import Durable, Generation, Identity, Node, Timing, Wanted
from launcher.errors import ExitCode
from launcher.event_loop import EventLoop

TIMING = Timing(heartbeat_s=0.02, silence_s=1.0, vote_s=0.3, gather_s=0.2, bound_s=5.0, pause_s=1.0, join_pause_s=2.0)


class Net:
    """Hands messages over in the loop's next turn; a closed agent refuses connections."""

    def __init__(self, loop: EventLoop) -> None:
        self.loop = loop
        self.agents: dict[str, tuple[Callable[[Message], None], Callable[[str], None]]] = {}
        self.sent: list[tuple[str, Message]] = []
        self._queue: list[tuple[str, str, Message]] = []
        loop.every("net", 0.005, self.deliver)

    def send(self, sender: str, address: str, message: Message) -> None:
        self.sent.append((sender, message))
        self._queue.append((sender, address, message))

    def deliver(self) -> None:
        queue, self._queue = self._queue, []
        for sender, address, message in queue:
            if address in self.agents:
                self.agents[address][0](message)
            elif sender in self.agents:
                self.agents[sender][1](address)


class Wire:
    def __init__(self, net: Net, address: str) -> None:
        self.net, self.address = net, address

    def send(self, address: str, message: Message) -> None:
        self.net.send(self.address, address, message)

    def tick(self) -> None: ...

    def close(self) -> None:
        self.net.agents.pop(self.address, None)


class Archive:
    claims: dict[int, Generation]

    def __init__(self, claims: dict[int, Generation]) -> None:
        self.claims = claims
        self.durable: Durable | None = None
        self.lost = False

    def persist(self, durable: Durable) -> None:
        self.durable = durable

    def claim(self, base: int, value: Generation) -> Generation:
        return self.claims.setdefault(base, value)

    def check(self) -> None:
        if self.lost:
            raise OSError(116, "another agent has this node's place")


class Ranks:
    """What the supervisor would do with its ranks; `dying` ranks take until `die`."""

    def __init__(self) -> None:
        self.have_stepped = True
        self.withdrawn: list[str] = []
        self.prepared = False
        self.all_started = True
        self.save_at: int | None = None

    def withdraw(self, reason: str) -> None:
        self.withdrawn.append(reason)

    def prepare_save(self, reason: str) -> bool:
        self.prepared = self.all_started
        return self.all_started

    def agree_on_save(self, step: int) -> None:
        self.save_at = step


class Agent:
    def __init__(self, net: Net, name: str, wanted: Wanted, claims: dict[int, Generation]) -> None:
        address = f"{name}:1"
        node = Node(name, address, 2, f"boot of {name}")
        membership = Membership(
            node,
            seeds=["n0:1", "n1:1"],
            wanted=wanted,
            timing=TIMING,
            identity=Identity("sha"),
            rng=random.Random(1),
            free_port=lambda: 20001,
            durable=Durable(node.incarnation),
        )
        self.ranks, self.said, self.archive = Ranks(), list[str](), Archive(claims)

        def connect(
            on_message: Callable[[Message], None],
            on_unreachable: Callable[[str], None],
            on_refused: Callable[[str, str], None],
        ) -> Wire:
            net.agents[address] = (on_message, on_unreachable)
            return Wire(net, address)

        self.crew = ClusterCrew(
            net.loop,
            membership,
            self.archive,
            connect,
            heartbeat_s=TIMING.heartbeat_s,
            say=self.said.append,
            stop_exit_code=ExitCode.STOPPED_143,
            timer=name,
        )
        self.membership = membership
        self.crew.start(self.ranks)


@pytest.fixture
def net() -> Iterator[Net]:
    loop = EventLoop()
    yield Net(loop)
    loop.close()


ELASTIC = Wanted(1, 2)


def pair(net: Net, wanted: Wanted = ELASTIC) -> tuple[Agent, Agent, Turn, Turn]:
    claims: dict[int, Generation] = {}
    a, b = Agent(net, "n0", wanted, claims), Agent(net, "n1", wanted, claims)
    first, second = a.crew.next_turn(), b.crew.next_turn()
    assert isinstance(first, Turn)
    assert isinstance(second, Turn)
    return a, b, first, second


def until(net: Net, condition: Callable[[], bool], within_s: float = 4.0) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline
        net.loop.wait(0.01)


def test_ranks_are_numbered_through_and_the_first_node_leads(net: Net) -> None:
    _, _, first, second = pair(net)
    assert (first.ranks, second.ranks) == (range(2), range(2, 4))
    assert (first.leads, second.leads) == (True, False)
    assert {first.world_size, second.world_size} == {4}
    assert {first.master_addr, second.master_addr} == {"n0"}


def test_the_leaders_orders_reach_the_others(net: Net) -> None:
    a, b, first, second = pair(net)
    made = Orders('{"spec": 1}', 7)
    assert a.crew.orders(first, lambda: made) == made
    assert b.crew.orders(second, lambda: pytest.fail("only the leader makes orders")) == made


def test_nothing_is_voted_while_the_ranks_of_the_old_generation_run(net: Net) -> None:
    a, b, first, second = pair(net)
    a.crew.failed(first, "rank 0 was killed")
    until(net, lambda: bool(b.ranks.withdrawn))
    assert b.crew.withdrawn(second)
    net.sent.clear()
    for _ in range(40):
        net.loop.wait(0.01)
    assert not [m for sender, m in net.sent if sender == "n1:1" and isinstance(m, Promise | Join)]
    b.crew.ranks_gone(second)
    turns = a.crew.next_turn(), b.crew.next_turn()
    assert [turn.number for turn in turns if isinstance(turn, Turn) and turn.num_nodes == 2] == [turns[0].number] * 2  # type: ignore[union-attr]


def test_all_ranks_are_asked_before_the_step_is_named(net: Net) -> None:
    a, b, first, second = pair(net)
    b.ranks.all_started = False
    b.crew.leave("SIGTERM", at_once=False)
    until(net, lambda: a.ranks.prepared)
    a.crew.waits_at(5)
    for _ in range(20):
        net.loop.wait(0.01)
    assert a.ranks.save_at is None  # a rank of n1 may still run on
    b.ranks.all_started = True
    until(net, lambda: a.ranks.save_at == b.ranks.save_at == 6)
    for agent, turn in ((b, second), (a, first)):
        agent.crew.ranks_gone(turn)
        agent.crew.saved(turn, 6)
    left, gone_on = b.crew.next_turn(), a.crew.next_turn()
    assert isinstance(left, RunOver)
    assert left.exit_code is ExitCode.STOPPED_143
    assert isinstance(gone_on, Turn)
    assert gone_on.num_nodes == 1


def test_before_the_first_step_there_is_nothing_to_save(net: Net) -> None:
    a, b, _, _ = pair(net)
    a.ranks.have_stepped = False
    b.crew.leave("SIGTERM", at_once=False)
    until(net, lambda: bool(a.ranks.withdrawn) and bool(b.ranks.withdrawn))
    assert not a.ranks.prepared


def test_a_checkpoint_of_a_lost_generation_is_not_committed(net: Net) -> None:
    a, b, first, second = pair(net)
    assert a.crew.may_commit(first) == ""
    b.crew.failed(second, "rank 2 was killed")
    until(net, lambda: bool(a.ranks.withdrawn))
    assert "is over" in a.crew.may_commit(first)
    assert "is over" in b.crew.may_commit(second)


def test_an_agent_that_has_lost_its_place_goes_alone(net: Net) -> None:
    a, b, first, _ = pair(net)
    a.archive.lost = True
    assert "another agent" in a.crew.may_commit(first)
    assert a.ranks.withdrawn
    a.crew.ranks_gone(first)
    over = a.crew.next_turn()
    assert isinstance(over, RunOver)
    assert over.exit_code is ExitCode.STOPPED_143
    assert not b.crew.over()


def test_a_node_that_fails_again_and_again_leaves_the_others_their_run(net: Net) -> None:
    a, b, first, second = pair(net)
    b.crew.failed(second, "rank 2 was killed")
    until(net, lambda: bool(a.ranks.withdrawn))
    a.crew.ranks_gone(first)
    b.crew.give_up(second, ExitCode.STOPPED_143, "4 attempts in a row failed")
    over = b.crew.next_turn()
    assert isinstance(over, RunOver)
    assert over.exit_code is ExitCode.STOPPED_143
    assert "4 attempts" in over.reason
    until(net, lambda: isinstance(a.membership.running, Generation) and len(a.membership.running.members) == 1)


def test_a_fixed_number_of_nodes_ends_together(net: Net) -> None:
    a, b, first, second = pair(net, Wanted(2, 2))
    b.crew.ranks_gone(second)
    b.crew.give_up(second, ExitCode.STOPPED_143, "4 attempts in a row failed")
    until(net, lambda: bool(a.ranks.withdrawn))
    a.crew.ranks_gone(first)
    assert [over.exit_code for over in (a.crew.next_turn(), b.crew.next_turn()) if isinstance(over, RunOver)] == [
        ExitCode.STOPPED_143,
        ExitCode.STOPPED_143,
    ]


def test_a_node_that_will_not_come_ends_a_run_of_fixed_size_with_its_code(net: Net) -> None:
    waiting = Agent(net, "n0", Wanted(2, 2), {})
    waiting.crew.will_not_come(ExitCode.STOPPED, "n1: reclaimed")  # that one comes again
    assert not waiting.membership.ended
    waiting.crew.will_not_come(ExitCode.WRONG_INPUT, "n1 (gpu-2): model.path does not exist")
    over = waiting.crew.next_turn()
    assert over == RunOver(ExitCode.WRONG_INPUT, "n0: n1 (gpu-2): model.path does not exist")


def test_an_elastic_run_goes_on_without_who_will_not_come(net: Net) -> None:
    alone = Agent(net, "n0", ELASTIC, {})
    alone.crew.will_not_come(ExitCode.WRONG_INPUT, "n1 (gpu-2): model.path does not exist")
    turn = alone.crew.next_turn()
    assert isinstance(turn, Turn)
    assert any("goes on without it" in text for text in alone.said)


def test_a_turn_that_is_over_gets_no_orders(net: Net) -> None:
    a, b, first, second = pair(net)

    def prepare() -> Orders:
        b.crew.failed(second, "rank 2 was killed")
        until(net, lambda: a.crew.withdrawn(first))
        return Orders("{}", 0)

    assert a.crew.orders(first, prepare) is None
    assert b.crew.orders(second, lambda: pytest.fail("not the leader")) is None


def test_the_end_of_one_is_the_end_of_all_with_its_code_and_words(net: Net) -> None:
    a, b, first, second = pair(net)
    b.crew.ranks_gone(second)
    b.crew.give_up(second, ExitCode.WRONG_INPUT, "data.train: line 3 is no JSON")
    until(net, lambda: bool(a.ranks.withdrawn))
    a.crew.ranks_gone(first)
    ends = a.crew.next_turn(), b.crew.next_turn()
    assert ends == (RunOver(ExitCode.WRONG_INPUT, "n1: data.train: line 3 is no JSON"),) * 2


def test_the_run_is_finished_when_all_nodes_are(net: Net) -> None:
    a, b, first, second = pair(net)
    for agent, turn in ((a, first), (b, second)):
        agent.crew.ranks_gone(turn)
        agent.crew.finished(turn, "")
    assert {agent.crew.next_turn().exit_code for agent in (a, b)} == {ExitCode.FINISHED}  # type: ignore[union-attr]


def test_a_second_signal_ends_this_node_at_once(net: Net) -> None:
    a, b, _, second = pair(net)
    b.crew.leave("SIGTERM", at_once=True)
    assert b.ranks.withdrawn
    b.crew.ranks_gone(second)
    over = b.crew.next_turn()
    assert isinstance(over, RunOver)
    assert over.exit_code is ExitCode.STOPPED_143
    b.crew.close()
    until(net, lambda: bool(a.ranks.withdrawn))
