"""The part that keeps the cluster one: what a node promises, and what it remembers of it.

For every chosen generation its members choose exactly one successor, by single-decree Paxos (Lamport, "Paxos Made
Simple", 2001). Invariants, for each voter, over all its restarts:
- `voted` never decreases, and each number is promised at most once;
- nothing is accepted below a number that has been promised;
- a successor is voted for only as one of the newest generation that the voter knows; what is newer is learned first.
`docs/membership.md` has the argument why this is enough.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from enum import Enum

from launcher.cluster.model import Accepted, Durable, Generation, Node


class Standing(Enum):
    """What part of a generation's members agrees."""

    MAJORITY = "more than half"
    HALF = "exactly half: the claim decides"
    MINORITY = "less than half"


def standing(base: Generation, agreeing: Iterable[Node]) -> Standing:
    """Who is not a member of `base`, by name and incarnation, has no vote in it."""
    num_votes = len({member.key for member in base.members} & {node.key for node in agreeing})
    if 2 * num_votes > len(base.members):
        return Standing.MAJORITY
    return Standing.HALF if 2 * num_votes == len(base.members) else Standing.MINORITY


class Voter:
    """Changes only memory: whoever calls it persists `durable` before a word of the answer leaves this node."""

    def __init__(self, me: Node, durable: Durable | None) -> None:
        self.durable = durable or Durable(me.incarnation)
        self.me = replace(me, incarnation=self.durable.incarnation)

    @property
    def committed(self) -> Generation:
        return self.durable.committed

    @property
    def voted(self) -> int:
        return self.durable.voted

    def promise(self, number: int, base: int) -> bool:
        if number <= self.voted or base != self.committed.number:
            return False
        self.durable = replace(self.durable, voted=number)
        return True

    def accept(self, ballot: int, generation: Generation) -> bool:
        if ballot < self.voted or generation.base != self.committed.number:
            return False
        self.durable = replace(self.durable, voted=ballot, accepted=Accepted(ballot, generation))
        return True

    def learn(self, generation: Generation) -> bool:
        """Chosen generations form one chain with growing numbers: a higher one is a later one."""
        if generation.number <= self.committed.number:
            return False
        voted = max(self.voted, generation.number)
        self.durable = replace(self.durable, voted=voted, accepted=None, committed=generation)
        return True

    def may_enter(self, generation: Generation) -> bool:
        """Asked once, when `generation` has just been learned; since that is durable before it is entered, none is
        entered twice. After a higher vote it is not worth entering: somebody already forms what comes after it."""
        return generation.has(self.me) and generation.number == self.voted
