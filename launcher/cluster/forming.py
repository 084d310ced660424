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
from launcher.cluster.model import GENESIS, Generation, Node, Timing, Wanted, shortened
from launcher.cluster.outbox import Outbox
from launcher.cluster.proposal import Proposal, Stage
from launcher.cluster.voter import Standing, Voter, standing

CROWD = 64  # with more followers than this, not each of them makes this node look at all of them


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
        self.refused: dict[str, str] = {}  # by name, what they have that we have not
        self.leaving = False  # this node takes part in the vote, but not in what is voted
        self._outbox, self._voter, self._contacts = outbox, voter, contacts
        self._me = outbox.me
        self._wanted, self._timing, self._rng = wanted, timing, rng
        self._proposal_type, self._on_chosen = proposal_type, on_chosen
        self._followers: dict[str, _Follower] = {}
        self._ready: dict[str, Join] | None = None  # see `ready`; None: to be found anew
        self._ready_known = 0
        self._reason = ""
        self._since = self._idle_since = self._not_before = 0.0
        self._proposal: Proposal | None = None
        self._is_short = False
        self._words: tuple[str, float] | None = None  # the latest, and when

    def begin(self, reason: str, idle_since: float) -> None:
        self.active, self._is_short, self._words = True, False, None
        self._reason, self._idle_since, self._since = reason, idle_since, self._outbox.now

    def stop(self) -> None:
        self.active = False
        self._proposal = None

    # ---- who is here ----

    def hear(self, join: Join) -> bool:
        """Whether it is time to look what can be done. Most joins only repeat the last one; and in a crowd the last to
        come, or the next tick, is soon enough."""
        name = join.sender.name
        before = self._followers.get(name)
        self._followers[name] = _Follower(join, self._outbox.now)
        if before is not None and before.join == join:
            return False
        ready = self.ready()
        if self._is_ready(join):
            ready[name] = join
        else:
            ready.pop(name, None)
        return len(self._followers) <= CROWD or len(ready) + 1 >= self._wanted.max_nodes

    def forget(self, address: str) -> None:
        self._keep(lambda follower: follower.join.sender.address != address)

    def forget_members(self, generation: Generation) -> None:
        for member in generation.members if self._followers else ():
            self._followers.pop(member.name, None)
        self._ready = None

    def forget_silent(self) -> None:
        oldest = self._outbox.now - self._timing.silence_s
        self._keep(lambda follower: follower.at >= oldest)

    def _keep(self, is_kept: Callable[[_Follower], bool]) -> None:
        kept = {name: follower for name, follower in self._followers.items() if is_kept(follower)}
        if len(kept) < len(self._followers):
            self._followers, self._ready = kept, None

    def followers(self) -> list[Node]:
        return [follower.join.sender for follower in self._followers.values()]

    def addresses(self) -> set[str]:
        return {follower.join.sender.address for follower in self._followers.values()} | {self._me.address}

    def ready(self) -> dict[str, Join]:
        """By name, the followers that can vote now: words pass in both directions, and they know what we know."""
        known = self._voter.committed.number
        if self._ready is None or self._ready_known != known:
            joins = {name: follower.join for name, follower in self._followers.items()}
            self._ready = {name: join for name, join in joins.items() if self._is_ready(join)}
            self._ready_known = known
        return self._ready

    def _is_ready(self, join: Join) -> bool:
        return join.heard and join.known == self._voter.committed.number

    def waiting_for(self) -> str:
        """Who is missing, by name and by address: what a person needs to go and look."""
        base, wanted = self._voter.committed, self._wanted
        here = self.addresses()
        needed = str(wanted.max_nodes) if wanted.fixed else f"at least {wanted.min_nodes}"
        of_base = f", among them half of {base}" if base.members else ""
        names = {self._me.name, *self._followers}
        at = {member.name: member.address for member in base.members}
        expected = dict.fromkeys([*at, *(f"n{rank}" for rank in range(wanted.max_nodes))])
        missing = [self._described(name, at.get(name, "")) for name in expected if name not in names]
        addresses = set(at.values())
        silent = [
            f"{a} (it {refusal})" if (refusal := self._contacts.refusal(a)[0]) else a
            for a in self._contacts.known
            if a not in here and a not in addresses
        ]
        heard = f"; waiting for {shortened(missing)}" if missing else ""
        heard += f"; nobody answers at {shortened(silent)}" if silent else ""
        return f"{len(here)} node(s) here ({shortened(sorted(names))}), {needed} needed{of_base}{heard}"

    def _described(self, name: str, address: str) -> str:
        remark = f"refused: {self.refused[name]}" if name in self.refused else address
        return f"{name} ({remark})" if remark else name

    def recent_words(self) -> str:
        """`waiting_for`, not older than a heartbeat: every follower is told, and a thousand ask at once."""
        if self._words is None or self._outbox.now - self._words[1] >= self._timing.heartbeat_s:
            self._words = self.waiting_for(), self._outbox.now
        return self._words[0]

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
        if self._is_short and not self.leaving:
            self._outbox.say(self.waiting_for())
        elif self._is_short:
            return
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
        learn = Learn(self._me, chosen.number, chosen)
        for address in sorted(others):
            self._outbox.send(address, learn)
        self._on_chosen(chosen)

    def _ask(self, proposal: Proposal, question: Prepare | Accept) -> None:
        """Ourselves first: that alone may decide it."""
        for address in sorted((node.address for node in proposal.asked.values()), key=lambda a: a != self._me.address):
            if self._proposal is proposal:
                self._outbox.send(address, question)

    def _drop(self) -> None:
        self._proposal = None
        self._not_before = self._outbox.now + self._rng.uniform(0.0, self._timing.vote_s)
