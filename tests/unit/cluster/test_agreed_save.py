"""All ranks save at one step, whatever order words and steps come in."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from launcher.cluster.agreed_save import LeadersSave
from launcher.cluster.messages import SaveState
from launcher.cluster.model import Node

ME = Node("n0", "10.0.0.1:29430", 2, "aa")


def state(
    generation: int = 1, *, prepared: bool = False, waits_at: int | None = None, stopped: bool = False
) -> SaveState:
    return SaveState(ME, 1, generation, prepared, waits_at, stopped)


def test_the_step_is_known_once_all_are_prepared_and_one_waits() -> None:
    save = LeadersSave(ME, 1, 1, ["n0", "n1"], "n1 has to go")
    assert not save.hear("n0", state(prepared=True, waits_at=7))
    assert save.question().save_at is None
    assert save.hear("n1", state(prepared=True))
    assert save.question().save_at == 8
    assert not save.hear("n1", state(prepared=True, waits_at=7))  # what is known is not news
    assert save.save_at == 8


def test_words_of_another_generation_or_a_stranger_count_for_nothing() -> None:
    save = LeadersSave(ME, 1, 1, ["n0", "n1"], "")
    save.hear("n0", state(2, prepared=True, waits_at=3))
    save.hear("n7", state(prepared=True, waits_at=3, stopped=True))
    save.hear("n1", state(prepared=True))
    save.hear("n0", state(prepared=True))
    assert save.save_at is None
    assert save.missing == ["n0", "n1"]


def test_it_is_done_when_all_have_stopped() -> None:
    save = LeadersSave(ME, 1, 1, ["n0", "n1"], "")
    save.hear("n0", state(prepared=True, waits_at=3, stopped=True))
    assert not save.done
    save.hear("n1", state(prepared=True, stopped=True))
    assert save.done


class Cluster:
    """Ranks that step together as a collective makes them, agents between them, messages in any order."""

    def __init__(self, seed: int, num_nodes: int, ranks_per_node: int, *, broken: bool = False) -> None:
        self.rng, self.broken = random.Random(seed), broken
        self.nodes = [f"n{i}" for i in range(num_nodes)]
        self.ranks = [(node, r) for node in self.nodes for r in range(ranks_per_node)]
        self.step = dict.fromkeys(self.ranks, 0)
        self.asked = dict.fromkeys(self.ranks, False)  # prepare_save lies in its socket
        self.told: dict[tuple[str, int], int | None] = dict.fromkeys(self.ranks)
        self.waiting: set[tuple[str, int]] = set()
        self.saved: dict[tuple[str, int], int] = {}
        self.states = {node: state() for node in self.nodes}
        self.leader = LeadersSave(ME, 1, 1, ["n0"] if broken else self.nodes, "")

    def moves(self) -> list[Callable[[], None]]:
        found: list[Callable[[], None]] = []
        for rank in self.ranks:
            if rank in self.saved:
                continue
            if rank in self.waiting:
                if self.told[rank] is not None:
                    found.append(lambda rank=rank: self.go_on(rank))  # type: ignore[misc]
            elif all(self.step[other] >= self.step[rank] and self.in_reach(other, rank) for other in self.ranks):
                found.append(lambda rank=rank: self.finish_step(rank))  # type: ignore[misc]
        for node in self.nodes:
            found += [lambda node=node: self.ask(node), lambda node=node: self.answer(node)]  # type: ignore[misc]
        return found

    def in_reach(self, other: tuple[str, int], rank: tuple[str, int]) -> bool:
        """`other` takes part in the step that `rank` is in: it has begun it, so it does not wait before it."""
        return self.step[other] > self.step[rank] or (other not in self.waiting and other not in self.saved)

    def finish_step(self, rank: tuple[str, int]) -> None:
        self.step[rank] += 1
        if self.asked[rank] and self.told[rank] is None:
            self.waiting.add(rank)
            node = self.states[rank[0]]
            if node.waits_at is None:
                self.states[rank[0]] = state(prepared=node.prepared, waits_at=self.step[rank])
        else:
            self.check(rank)

    def go_on(self, rank: tuple[str, int]) -> None:
        self.waiting.discard(rank)
        self.check(rank)

    def check(self, rank: tuple[str, int]) -> None:
        told = self.told[rank]
        if told is not None and self.step[rank] >= told:
            self.saved[rank] = self.step[rank]

    def ask(self, node: str) -> None:
        """The leader's question arrives."""
        question = self.leader.question()
        for rank in (r for r in self.ranks if r[0] == node):
            self.asked[rank] = True
            if question.save_at is not None:
                self.told[rank] = question.save_at
        self.states[node] = state(prepared=True, waits_at=self.states[node].waits_at)

    def answer(self, node: str) -> None:
        self.leader.hear(node, self.states[node])

    def run(self) -> set[int]:
        for _ in range(5000):
            if len(self.saved) == len(self.ranks):
                return set(self.saved.values())
            self.rng.choice(self.moves())()
        raise AssertionError("no save")


@pytest.mark.parametrize("num_nodes", [1, 2, 3])
def test_every_rank_saves_at_one_step_in_any_order_of_words_and_steps(num_nodes: int) -> None:
    for seed in range(300):
        assert len(Cluster(seed, num_nodes, ranks_per_node=2).run()) == 1, seed


def test_a_leader_that_does_not_wait_for_all_nodes_is_caught() -> None:
    """What the second condition is for: a node that has not heard of it yet runs past the step."""

    def goes_wrong(seed: int) -> bool:
        try:
            return len(Cluster(seed, 3, ranks_per_node=2, broken=True).run()) > 1
        except AssertionError:
            return True

    assert any(goes_wrong(seed) for seed in range(300))
