"""How a node that others follow forms the next generation: who is here, whether that is enough, and the vote.

Invariant: nothing is proposed before so many members of the newest generation follow that they could decide it; a node
that has lost sight of the others disturbs nobody.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from launcher.cluster.contacts import Contacts
from launcher.cluster.effects import AskClaim
from launcher.cluster.messages import Accept, AcceptedBy, Join, Learn, Prepare, Promise
from launcher.cluster.model import GENESIS, Generation, Node, Timing, Wanted
from launcher.cluster.outbox import Outbox
from launcher.cluster.proposal import Proposal, Stage
from launcher.cluster.voter import Standing, Voter, standing


@dataclass(frozen=True, slots=True)
class _Follower:
    join: Join
    at: float


class Forming:
    """`active` while this node is its own guide. Followers are also heard while it leads: they wait to be let in."""

    def __init__(
        self,
        outbox: Outbox,
        voter: Voter,
        contacts: Contacts,
        *,
        wanted: Wanted,
        timing: Timing,
        rng: random.Random,
        proposal_type: type[Proposal],
        on_chosen: Callable[[Generation], None],
    ) -> None:
        self.active = False
        self.leaving = False  # this node takes part in the vote, but not in what is voted
        self._outbox, self._voter, self._contacts = outbox, voter, contacts
        self._me = outbox.me
        self._wanted, self._timing, self._rng = wanted, timing, rng
        self._proposal_type, self._on_chosen = proposal_type, on_chosen
        self._followers: dict[str, _Follower] = {}
        self._reason = ""
        self._since = self._idle_since = self._not_before = 0.0
        self._proposal: Proposal | None = None
        self._is_short = False

    def begin(self, reason: str, idle_since: float) -> None:
        self.active, self._is_short = True, False
        self._reason, self._idle_since, self._since = reason, idle_since, self._outbox.now

    def stop(self) -> None:
        self.active = False
        self._proposal = None

    # ---- who is here ----

    def hear(self, join: Join) -> None:
        self._followers[join.sender.name] = _Follower(join, self._outbox.now)

    def forget(self, address: str) -> None:
        self._followers = {n: f for n, f in self._followers.items() if f.join.sender.address != address}

    def forget_members(self, generation: Generation) -> None:
        for member in generation.members:
            self._followers.pop(member.name, None)

    def forget_silent(self) -> None:
        oldest = self._outbox.now - self._timing.silence_s
        self._followers = {name: follower for name, follower in self._followers.items() if follower.at >= oldest}

    def addresses(self) -> set[str]:
        return {follower.join.sender.address for follower in self._followers.values()} | {self._me.address}

    def ready(self) -> dict[str, Join]:
        """By name, the followers that can vote now: words pass in both directions, and they know what we know."""
        known = self._voter.committed.number
        joins = {name: follower.join for name, follower in self._followers.items()}
        return {name: join for name, join in joins.items() if join.heard and join.known == known}

    def waiting_for(self) -> str:
        base = self._voter.committed
        here = self.addresses()
        missing = [str(member) for member in base.members if member.address not in here]
        if base == GENESIS:
            missing = [address for address in self._contacts.known if address not in here]
        of_base = f", among them half of {base}" if base.members else ""
        heard = f"; not heard from {', '.join(missing)}" if missing else ""
        return f"{len(here)} nodes are here, at least {self._wanted.min_nodes} are needed{of_base}{heard}"

    # ---- whether that is enough ----

    def is_stuck(self) -> bool:
        """Too few for long enough: another node may reach more of us."""
        return self._is_short and not self._proposal and self._outbox.now - self._since > 3 * self._timing.silence_s

    def all_leave(self) -> bool:
        if not self.active or not self.leaving:
            return False
        ready = self.ready()
        return all(join.leaving for join in ready.values()) and not self._awaited(self._voter.committed, ready)

    def advance(self) -> None:
        """Propose, once enough nodes are here and the rest is not worth waiting for."""
        now = self._outbox.now
        if not self.active or self._proposal or now < self._not_before:
            return
        base, joins = self._voter.committed, self.ready()
        here = {name: join.sender for name, join in joins.items()} | {self._me.name: self._me}
        num_fit = sum(not join.leaving for join in joins.values()) + (not self.leaving)
        self._is_short = num_fit < self._wanted.min_nodes or standing(base, here.values()) is Standing.MINORITY
        if self._is_short:
            self._outbox.say(self.waiting_for())
        elif num_fit >= self._wanted.max_nodes or now >= self._patient_until(base, joins):
            self._propose(base, here)

    def _awaited(self, base: Generation, joins: dict[str, Join]) -> list[Node]:
        here, now = {self._me.name, *joins}, self._outbox.now
        return [m for m in base.members if m.name not in here and not self._contacts.is_lost(m.address, now)]

    def _patient_until(self, base: Generation, joins: dict[str, Join]) -> float:
        if base == GENESIS:
            return self._idle_since + self._timing.gather_s
        return self._since + self._timing.silence_s if self._awaited(base, joins) else self._outbox.now

    # ---- the vote ----

    def on_tick(self) -> None:
        self.forget_silent()
        proposal = self._proposal
        if proposal and self._outbox.now >= proposal.deadline:
            if proposal.stage is Stage.PREPARING:
                self._settle(proposal)  # with those who have answered
            else:
                self._drop()

    def on_promise(self, promise: Promise) -> None:
        if self._proposal and self._proposal.add_promise(promise) and self._proposal.stage is Stage.PREPARING:
            self._settle(self._proposal)

    def on_claim(self, base: int, holder: Generation) -> None:
        proposal = self._proposal
        if proposal is None or not proposal.needs_claim or proposal.base.number != base:
            return
        if proposal.settle_claim(holder):
            self._put_to_vote(proposal, holder)
        else:
            self._outbox.say(
                f"the claim for the successor of {proposal.base} belongs to {holder}, not to what was voted"
            )
            self._drop()

    def on_vote(self, vote: AcceptedBy) -> None:
        if self._proposal:
            self._proposal.add_vote(vote)
            self._conclude(self._proposal)

    def _propose(self, base: Generation, here: dict[str, Node]) -> None:
        number = 1 + max([self._voter.voted, *(follower.join.voted for follower in self._followers.values())])
        self._proposal = self._proposal_type(number, base, here, deadline=self._outbox.now + self._timing.vote_s)
        self._ask(self._proposal, Prepare(self._me, base.number, number, base.number))

    def _settle(self, proposal: Proposal) -> None:
        value = proposal.settle(self._wanted, self._reason)
        if value is None:
            self._drop()
        elif proposal.needs_claim:
            proposal.deadline = self._outbox.now + self._timing.vote_s
            self._outbox.add(AskClaim(proposal.base.number, value))
        else:
            self._put_to_vote(proposal, value)

    def _put_to_vote(self, proposal: Proposal, value: Generation) -> None:
        proposal.deadline = self._outbox.now + self._timing.vote_s
        self._ask(proposal, Accept(self._me, proposal.base.number, proposal.number, value))

    def _conclude(self, proposal: Proposal) -> None:
        chosen = proposal.chosen()
        if chosen is None:
            return
        self._proposal = None
        others = {node.address for node in (*proposal.asked.values(), *chosen.members)} - {self._me.address}
        for address in sorted(others):
            self._outbox.send(address, Learn(self._me, chosen.number, chosen))
        self._on_chosen(chosen)

    def _ask(self, proposal: Proposal, question: Prepare | Accept) -> None:
        """Ourselves first: that alone may decide it."""
        for address in sorted((node.address for node in proposal.asked.values()), key=lambda a: a != self._me.address):
            if self._proposal is proposal:
                self._outbox.send(address, question)

    def _drop(self) -> None:
        self._proposal = None
        self._not_before = self._outbox.now + self._rng.uniform(0.0, self._timing.vote_s)
