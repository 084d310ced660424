"""One attempt to choose the successor of a generation, under one number.

Invariant: what is put to the vote is safe. If under a lower number a generation may have been chosen, it is that one.
Paxos's two questions (prepare, accept), with the claim between them when only half of the base's members take part.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum

from launcher.cluster.messages import AcceptedBy, Promise
from launcher.cluster.model import Generation, Node, Wanted
from launcher.cluster.voter import Standing, standing


class Stage(Enum):
    PREPARING = "waiting for promises"
    CLAIMING = "waiting for the claim"
    ACCEPTING = "waiting for votes"


class Proposal:
    """asked: by name, everyone who takes part: members of the base, for their votes, and those who want to join."""

    def __init__(self, number: int, base: Generation, asked: Mapping[str, Node], deadline: float) -> None:
        self.number = number
        self.base = base
        self.asked = dict(asked)
        self.deadline = deadline
        self.stage = Stage.PREPARING
        self.value: Generation | None = None
        self._recovered = False
        self._claimed = False
        self._promises: dict[str, Promise] = {}
        self._accepted: dict[str, Node] = {}

    def add_promise(self, promise: Promise) -> bool:
        """True when everyone who was asked has answered."""
        if self.stage is Stage.PREPARING and promise.number == self.number and promise.sender.name in self.asked:
            self._promises[promise.sender.name] = promise
        return len(self._promises) == len(self.asked)

    def settle(self, wanted: Wanted, reason: str) -> Generation | None:
        """Fix what to propose, from the promises that are there; None if they do not suffice."""
        agreeing = standing(self.base, (promise.sender for promise in self._promises.values()))
        if agreeing is Standing.MINORITY:
            return None
        self.value = self._perhaps_chosen()
        self._recovered = self.value is not None
        if self.value is None:
            self.value = self._fresh(wanted, reason)
        if self.value is not None:
            self.stage = Stage.CLAIMING if agreeing is Standing.HALF else Stage.ACCEPTING
        return self.value

    @property
    def needs_claim(self) -> bool:
        return self.stage is Stage.CLAIMING

    def settle_claim(self, holder: Generation) -> bool:
        """The claim belongs to `holder`. Free to choose, we join its side; bound by a vote for another, we cannot."""
        if self._recovered and holder != self.value:
            return False
        self.value = holder
        self._claimed = True
        self.stage = Stage.ACCEPTING
        return True

    def add_vote(self, vote: AcceptedBy) -> None:
        if self.stage is Stage.ACCEPTING and vote.ballot == self.number:
            self._accepted[vote.sender.name] = vote.sender

    def chosen(self) -> Generation | None:
        """The generation that a quorum of the base has accepted."""
        if self.stage is not Stage.ACCEPTING or 2 * len(self._accepted) < len(self.base.members):
            return None
        agreeing = standing(self.base, self._accepted.values())
        decided = agreeing is Standing.MAJORITY or (agreeing is Standing.HALF and self._claimed)
        return self.value if decided else None

    def _perhaps_chosen(self) -> Generation | None:
        reports = [promise.accepted for promise in self._promises.values() if promise.accepted is not None]
        return max(reports, key=lambda accepted: accepted.ballot).generation if reports else None

    def _fresh(self, wanted: Wanted, reason: str) -> Generation | None:
        ready = [promise.sender for promise in self._promises.values() if not promise.leaving]
        members = in_order(self.base, ready)[: wanted.max_nodes]
        if not members or len(members) < wanted.min_nodes:
            return None
        port = self._promises[members[0].name].port
        return Generation(self.number, tuple(members), self.base.number, port, reason)


def in_order(base: Generation, nodes: Iterable[Node]) -> list[Node]:
    """A name keeps its place among those of the base, newcomers follow: rank 0 stays where its data are."""
    place = {member.name: index for index, member in enumerate(base.members)}
    return sorted(nodes, key=lambda node: (place.get(node.name, len(place)), len(node.name), node.name))
