"""Snapshots from node to node: agents with real couriers, over real connections."""

from __future__ import annotations

import os
import signal
import socket
import time
from pathlib import Path

import pytest

from launcher.agent import courier_client
from launcher.agent.peer_tier import Fetched, Sent
from launcher.checkpoint.snapshot import read_snapshot
from launcher.courier.messages import Cause, Failure, Written
from launcher.courier.peers import INTRODUCE_S
from launcher.host.storage import StorageKind
from tests.unit.courier.conftest import Node, Nodes, contents_of
from tests.unit.courier.relay import Relay
from tests.unit.courier.snapshots import (
    Slot,
    damage,
    files_of_rank,
    fill_slot,
    identity_of,
    slots_of_step,
)

pytestmark = pytest.mark.slow  # real processes, and waits for bounds

MIB = 1 << 20


@pytest.fixture(autouse=True)
def _no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(courier_client, "_RESTART_PAUSE_S", 0.2)


@pytest.fixture
def two(nodes: Nodes) -> tuple[Node, Node]:
    return nodes.add("n0"), nodes.add("n1")


def expected_contents(step: int, world_size: int = 2) -> dict[str, dict[str, bytes]]:
    return {f"{rank} at {step}": files_of_rank(step, rank, world_size) for rank in range(world_size)}


def files_in(slots: list[Slot]) -> dict[str, dict[str, bytes]]:
    found = {}
    for identity, fd in slots:
        snapshot = read_snapshot(fd)
        assert snapshot is not None
        found[f"{identity.rank} at {identity.step}"] = {
            e.name: os.pread(fd, e.record.size_bytes, e.offset) for e in snapshot.files
        }
    return found


def test_the_snapshots_of_a_node_are_on_the_next_one_bit_for_bit(nodes: Nodes, two: tuple[Node, Node]) -> None:
    n0, n1 = two
    slots = slots_of_step(5)
    sent = nodes.send(n0, n1.address, slots)
    assert isinstance(sent, Sent)
    assert sent.num_bytes == sum(len(content) for rank in (0, 1) for content in files_of_rank(5, rank).values())
    assert n1.held_contents() == expected_contents(5)
    assert n1.kept == [("n0", 5)]
    with n1.peers.lent() as lent:
        assert [dict(held.snapshot.note) for held in lent] == [{"samples_seen": 40}] * 2
        assert {held.tier for held in lent} == {"peer"}


def test_many_ranks_and_empty_files_arrive(nodes: Nodes, two: tuple[Node, Node]) -> None:
    n0, n1 = two
    slots = [
        fill_slot(identity_of(5, rank, 11), {f"part-{rank}": rank * 100_001, f"empty-{rank}": b""})
        for rank in range(11)
    ]
    assert isinstance(nodes.send(n0, n1.address, slots), Sent)
    assert n1.held_contents() == files_in(slots)


def test_the_newer_step_takes_the_place_of_the_older_one_and_not_the_other_way(
    nodes: Nodes, two: tuple[Node, Node]
) -> None:
    n0, n1 = two
    for step in (5, 6):
        assert isinstance(nodes.send(n0, n1.address, slots_of_step(step)), Sent)
    assert n1.held_contents() == expected_contents(6)
    refused = nodes.send(n0, n1.address, slots_of_step(5))
    assert isinstance(refused, Failure)
    assert "a newer step is held" in refused.reason
    assert n1.held_contents() == expected_contents(6)
    assert isinstance(nodes.send(n0, n1.address, slots_of_step(4, generation=2)), Sent), "a later generation went back"
    assert n1.held_contents() == expected_contents(4)
    assert n1.held_steps() == {4, 5, 6}, "the two before it stay until they are surely of no use"
    for step in (5, 6):
        assert isinstance(nodes.send(n0, n1.address, slots_of_step(step, generation=2)), Sent)
    assert len(n1.peers.inventory()) == 3 * 2, "three steps of two ranks, all of the new generation"


def test_each_node_that_sends_has_a_place_of_its_own(nodes: Nodes) -> None:
    n0, n1, n2 = (nodes.add(name) for name in ("n0", "n1", "n2"))
    first, second = slots_of_step(5, 4, ranks=[0, 1]), slots_of_step(5, 4, ranks=[2, 3])
    assert isinstance(nodes.send(n0, n2.address, first), Sent)
    assert isinstance(nodes.send(n1, n2.address, second), Sent)
    assert sorted(identity.rank for identity in n2.peers.inventory()) == [0, 1, 2, 3]
    n2.peers.forget_all_but(["n1"])
    assert sorted(identity.rank for identity in n2.peers.inventory()) == [2, 3]


def test_what_is_lent_stays_as_it_is_while_a_newer_step_arrives(nodes: Nodes, two: tuple[Node, Node]) -> None:
    n0, n1 = two
    assert isinstance(nodes.send(n0, n1.address, slots_of_step(5)), Sent)
    with n1.peers.lent() as lent:
        assert isinstance(nodes.send(n0, n1.address, slots_of_step(6)), Sent)
        assert [contents_of(held) for held in lent] == [files_of_rank(5, rank) for rank in range(2)]
    assert n1.held_contents() == expected_contents(6)


@pytest.mark.parametrize("how", ["cut", "flip"])
@pytest.mark.parametrize("after_bytes", [10, 50, 300, 5 * MIB])
def test_a_connection_that_is_cut_or_changed_costs_the_step_and_not_the_one_before(
    nodes: Nodes, two: tuple[Node, Node], how: str, after_bytes: int
) -> None:
    n0, n1 = two
    assert isinstance(nodes.send(n0, n1.address, slots_of_step(5)), Sent)
    slots = slots_of_step(6, ballast_bytes=16 * MIB)
    with Relay(n1.port) as relay:
        relay.limit_bytes, relay.at_limit = after_bytes, how
        failure = nodes.send(n0, relay.address, slots)
        assert isinstance(failure, Failure)
        assert failure.cause is Cause.NETWORK
        assert n1.held_contents() == expected_contents(5)
        relay.limit_bytes = None
        assert isinstance(nodes.send(n0, relay.address, slots), Sent), "the next time it works"
    assert n1.held_contents() == files_in(slots)


def test_a_stalled_connection_is_given_up_within_its_bound(nodes: Nodes) -> None:
    n0, n1 = nodes.add("n0", stall_s=1.0), nodes.add("n1", stall_s=1.0)
    assert isinstance(nodes.send(n0, n1.address, slots_of_step(5)), Sent)
    slots = slots_of_step(6, ballast_bytes=16 * MIB)
    with Relay(n1.port) as relay:
        relay.limit_bytes, relay.at_limit = 2 * MIB, "stall"
        started = time.monotonic()
        failure = nodes.send(n0, relay.address, slots)
        assert isinstance(failure, Failure)
        assert "stalled" in failure.reason
        assert time.monotonic() - started < 10
    assert n1.held_contents() == expected_contents(5)
    assert isinstance(nodes.send(n0, n1.address, slots), Sent)


def test_of_the_steps_that_wait_for_a_slow_connection_the_newest_is_sent(nodes: Nodes, two: tuple[Node, Node]) -> None:
    n0, n1 = two
    outcomes: dict[int, Sent | Failure] = {}
    with Relay(n1.port) as relay:
        relay.limit_bytes, relay.at_limit = 1 * MIB, "stall"
        n0.peers.send(relay.address, slots_of_step(5, ballast_bytes=16 * MIB), lambda o: outcomes.update({5: o}))
        nodes.wait_until(relay.reached.is_set)
        relay.limit_bytes = None
        for step in (6, 7, 8):
            n0.peers.send(relay.address, slots_of_step(step), lambda o, step=step: outcomes.update({step: o}))
        nodes.wait_until(lambda: len(outcomes) == 4)
    superseded = Failure(Cause.SUPERSEDED, "a newer step is to be sent")
    assert [outcomes[step] for step in (6, 7)] == [superseded] * 2
    assert isinstance(outcomes[5], Failure)
    assert isinstance(outcomes[8], Sent)
    assert n1.held_contents() == expected_contents(8)


def test_a_lost_neighbour_does_not_delay_what_goes_to_the_new_one(nodes: Nodes) -> None:
    n0, n1, n2 = (nodes.add(name, stall_s=60.0) for name in ("n0", "n1", "n2"))
    outcomes: list[Sent | Failure] = []
    with Relay(n1.port) as relay:
        relay.limit_bytes, relay.at_limit = 1 * MIB, "stall"
        n0.peers.send(relay.address, slots_of_step(5, ballast_bytes=16 * MIB), outcomes.append)
        nodes.wait_until(relay.reached.is_set)
        assert isinstance(nodes.send(n0, n2.address, slots_of_step(6)), Sent)
        nodes.wait_until(lambda: outcomes)
    assert isinstance(outcomes[0], Failure)
    assert outcomes[0].cause is Cause.CANCELLED


def test_sending_can_be_called_off(nodes: Nodes) -> None:
    n0, n1 = nodes.add("n0", stall_s=60.0), nodes.add("n1", stall_s=60.0)
    outcomes: list[Sent | Failure] = []
    with Relay(n1.port) as relay:
        relay.limit_bytes, relay.at_limit = 1 * MIB, "stall"
        for step in (5, 6):
            n0.peers.send(relay.address, slots_of_step(step, ballast_bytes=16 * MIB), outcomes.append)
        nodes.wait_until(relay.reached.is_set)
        n0.peers.call_off_sending()
        nodes.wait_until(lambda: len(outcomes) == 2)
    assert [isinstance(outcome, Failure) and outcome.cause for outcome in outcomes] == [Cause.CANCELLED] * 2


def test_what_a_node_holds_outlives_its_courier_and_the_new_one_has_the_same_port(
    nodes: Nodes, two: tuple[Node, Node]
) -> None:
    n0, n1 = two
    assert isinstance(nodes.send(n0, n1.address, slots_of_step(5)), Sent)
    os.kill(n1.pid, signal.SIGKILL)
    nodes.wait_until(lambda: len(n1.ports) == 2)
    assert n1.ports[0] == n1.ports[1]
    assert n1.held_contents() == expected_contents(5)
    fetched = nodes.fetch(n0, n1.address, [identity_of(5, 1)])
    assert isinstance(fetched, Fetched)
    assert isinstance(nodes.send(n0, n1.address, slots_of_step(6)), Sent)


@pytest.mark.parametrize("dies", ["sender", "receiver"])
def test_a_courier_killed_in_the_middle_costs_the_step_and_not_the_one_before(nodes: Nodes, dies: str) -> None:
    n0, n1 = nodes.add("n0", stall_s=60.0), nodes.add("n1", stall_s=60.0)
    assert isinstance(nodes.send(n0, n1.address, slots_of_step(5)), Sent)
    slots = slots_of_step(6, ballast_bytes=16 * MIB)
    outcomes: list[Sent | Failure] = []
    with Relay(n1.port) as relay:
        relay.limit_bytes, relay.at_limit = 4 * MIB, "stall"
        n0.peers.send(relay.address, slots, outcomes.append)
        nodes.wait_until(relay.reached.is_set)
        os.kill((n0 if dies == "sender" else n1).pid, signal.SIGKILL)
        nodes.wait_until(lambda: outcomes)
    assert isinstance(outcomes[0], Failure)
    assert outcomes[0].cause is (Cause.LOST if dies == "sender" else Cause.NETWORK)
    assert n1.held_contents() == expected_contents(5)
    nodes.wait_until(lambda: len(n0.ports) + len(n1.ports) == 3)
    assert isinstance(nodes.send(n0, n1.address, slots), Sent)
    assert n1.held_contents() == files_in(slots)


def test_a_node_that_replaces_a_lost_one_gets_what_the_neighbour_holds(nodes: Nodes, two: tuple[Node, Node]) -> None:
    n0, n1 = two
    assert isinstance(nodes.send(n0, n1.address, slots_of_step(5)), Sent)
    new = nodes.add("n0")
    there = nodes.inventory(new, n1.address)
    assert isinstance(there, list)
    assert sorted(there, key=lambda identity: identity.rank) == [identity_of(5, rank) for rank in range(2)]
    fetched = nodes.fetch(new, n1.address, [identity_of(5, 1), identity_of(5, 0)])
    assert isinstance(fetched, Fetched)
    assert [contents_of(held) for held in fetched.snapshots] == [files_of_rank(5, rank) for rank in (1, 0)]


def test_a_nodes_own_slots_can_be_fetched(nodes: Nodes, two: tuple[Node, Node]) -> None:
    n0, n1 = two
    n1.has(slots_of_step(7))
    fetched = nodes.fetch(n0, n1.address, [identity_of(7, 0)])
    assert isinstance(fetched, Fetched)
    assert contents_of(fetched.snapshots[0]) == files_of_rank(7, 0)


def test_what_is_not_there_or_damaged_is_not_fetched(nodes: Nodes, two: tuple[Node, Node]) -> None:
    n0, n1 = two
    slots = slots_of_step(7)
    n1.has(slots)
    missing = nodes.fetch(n0, n1.address, [identity_of(7, 0), identity_of(8, 1)])
    assert isinstance(missing, Failure)
    assert "step 8 of rank 1" in missing.reason
    damage(slots[0], "scheduler.pt")
    damaged = nodes.fetch(n0, n1.address, [identity_of(7, 0)])
    assert isinstance(damaged, Failure)
    assert damaged.cause is Cause.DAMAGED
    assert "scheduler.pt" in damaged.reason


def test_a_slot_that_is_damaged_is_not_kept(nodes: Nodes, two: tuple[Node, Node]) -> None:
    n0, n1 = two
    slots = slots_of_step(5)
    damage(slots[1], "rng_state_1.pth")
    failure = nodes.send(n0, n1.address, slots)
    assert isinstance(failure, Failure)
    assert "rng_state_1.pth of rank 1 is damaged" in failure.reason
    assert n1.peers.inventory() == []


def test_more_than_there_is_room_for_is_refused_before_it_comes(nodes: Nodes) -> None:
    n0, n1 = nodes.add("n0"), nodes.add("n1", limit_bytes=MIB)
    with Relay(n1.port) as relay:
        failure = nodes.send(n0, relay.address, slots_of_step(5, ballast_bytes=2 * MIB))
        assert isinstance(failure, Failure)
        assert "more than the 1048576" in failure.reason
        assert len(relay.passed) < 10_000
    assert isinstance(nodes.send(n0, n1.address, slots_of_step(5)), Sent)


# -- strangers ---------------------------------------------------------------------------------------------------------


def test_without_the_runs_token_nothing_is_taken_and_nothing_given(nodes: Nodes, two: tuple[Node, Node]) -> None:
    n0, n1 = two
    assert isinstance(nodes.send(n0, n1.address, slots_of_step(5)), Sent)
    stranger = nodes.add("n0", token="another secret")
    failure = nodes.send(stranger, n1.address, slots_of_step(6))
    assert isinstance(failure, Failure)
    assert failure.cause is Cause.NETWORK
    assert isinstance(nodes.fetch(stranger, n1.address, [identity_of(5, 0)]), Failure)
    assert isinstance(nodes.inventory(stranger, n1.address), Failure)
    assert n1.held_contents() == expected_contents(5)
    nodes.wait_until(lambda: any("does not have this run's token" in line for line in n1.said))


def test_the_token_does_not_travel_and_what_has_passed_cannot_be_sent_again(
    nodes: Nodes, two: tuple[Node, Node]
) -> None:
    n0, n1 = two
    with Relay(n1.port) as relay:
        assert isinstance(nodes.send(n0, relay.address, slots_of_step(5)[:1]), Sent)
        assert relay.num_connections == 1
        assert b"latest" in relay.passed, "this is what went over the network"
        assert b"secret" not in relay.passed
    n1.peers.forget_all_but(())
    with socket.create_connection(("127.0.0.1", n1.port), timeout=10) as again:
        again.sendall(relay.passed)
        nodes.wait_until(lambda: any("token" in line for line in n1.said))
    assert n1.peers.inventory() == []


def test_connections_that_say_nothing_are_closed_and_hold_up_nobody(nodes: Nodes, two: tuple[Node, Node]) -> None:
    n0, n1 = two
    started = time.monotonic()
    silent = [socket.create_connection(("127.0.0.1", n1.port), timeout=30) for _ in range(40)]
    try:
        assert silent[0].recv(100).startswith(b"ftlaunch courier")
        assert silent[0].recv(100) == b""
        assert time.monotonic() - started < 0.8 * INTRODUCE_S, "not in time, but because there are too many"
        assert isinstance(nodes.send(n0, n1.address, slots_of_step(5)), Sent)
        silent[-1].sendall(b"GET / HTTP/1.1\r\nHost: here\r\n\r\n" * 3)
        nodes.wait_until(lambda: any("no courier of this version" in line for line in n1.said))
    finally:
        for connection in silent:
            connection.close()
    assert isinstance(nodes.send(n0, n1.address, slots_of_step(6)), Sent)


def test_nobody_there_is_said(nodes: Nodes, two: tuple[Node, Node]) -> None:
    n0, _ = two
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    failure = nodes.send(n0, f"127.0.0.1:{port}", slots_of_step(5))
    assert isinstance(failure, Failure)
    assert "Connection refused" in failure.reason


# -- side by side ------------------------------------------------------------------------------------------------------


def test_storage_that_stands_still_does_not_delay_the_peers(
    nodes: Nodes, two: tuple[Node, Node], tmp_path: Path
) -> None:
    n0, n1 = two
    folder = tmp_path / "run/ftlaunch/staging/gen-1/checkpoint-5"
    folder.mkdir(parents=True)
    os.mkfifo(folder / "latest")  # opening it waits for ever
    outcomes: list[Written | Failure] = []
    n0.courier.write(slots_of_step(5), tmp_path / "run", StorageKind.POSIX, 1, "checkpoint-5", outcomes.append)
    n0.wait_until((folder / "scheduler.pt").exists)
    assert isinstance(nodes.send(n0, n1.address, slots_of_step(6)), Sent)
    assert isinstance(nodes.send(n1, n0.address, slots_of_step(6)), Sent)
    assert not outcomes


def test_memory_and_descriptors_do_not_pile_up(nodes: Nodes, two: tuple[Node, Node]) -> None:
    n0, n1 = two

    def num_open() -> list[int]:
        return [len(os.listdir(f"/proc/{pid}/fd")) for pid in (n0.pid, n1.pid, os.getpid())]

    slots = [fill_slot(identity_of(5, rank, 6), {f"part-{rank}": 4 * MIB if rank == 5 else 1000}) for rank in range(6)]
    assert isinstance(nodes.send(n0, n1.address, slots), Sent)
    nodes.wait_until(lambda: True)
    before = num_open()
    for _ in range(5):
        assert isinstance(nodes.send(n0, n1.address, slots), Sent)
    with Relay(n1.port) as relay:
        relay.limit_bytes = 1 * MIB  # the small ones arrive
        assert isinstance(nodes.send(n0, relay.address, slots), Failure)
    nodes.wait_until(lambda: num_open() == before)
