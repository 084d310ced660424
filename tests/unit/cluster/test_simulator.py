"""Ten thousand schedules keep every invariant; each rule that is broken on purpose is caught within as many."""

from __future__ import annotations

from dataclasses import replace

import pytest

from launcher.cluster.membership import Membership
from launcher.cluster.model import Accepted, Generation
from launcher.cluster.proposal import Proposal, Stage
from launcher.cluster.voter import Voter
from tests.unit.cluster.simulator import World, first_broken

NUM_SCHEDULES = 10_000


@pytest.mark.slow
def test_no_schedule_breaks_a_rule() -> None:
    assert first_broken(range(NUM_SCHEDULES)) is None


def test_a_seed_is_a_schedule() -> None:
    first, again = World(7), World(7)
    assert (first.run(), first.num_events, first.now) == (again.run(), again.num_events, again.now)


def test_schedules_reach_what_they_are_for() -> None:
    """A simulator in which nothing happens finds nothing: most runs change generations, and most stand in the end."""
    worlds = [World(seed) for seed in range(300)]
    num_standing = sum(world.run() == "stands" for world in worlds)
    assert num_standing > 200
    assert sum(world.referee.num_trained > 1 for world in worlds) > 150
    assert sum(world.num_claims > 1 for world in worlds) > 30  # the first generation takes one always


# ---- broken on purpose ----


class PromisesTwice(Voter):
    def promise(self, number: int, base: int) -> bool:
        return super().promise(number, base) or (number == self.voted and base == self.committed.number)


class AcceptsBelowItsPromise(Voter):
    def accept(self, ballot: int, generation: Generation) -> bool:
        if generation.base != self.committed.number:
            return False
        self.durable = replace(self.durable, voted=max(self.voted, ballot), accepted=Accepted(ballot, generation))
        return True


class DecidesAnewForEachNumber(Proposal):
    """A majority of the base decides, whatever may have been chosen before: the first draft of this protocol."""

    def _perhaps_chosen(self) -> Generation | None:
        return None


class TakesHalfWithoutClaim(Proposal):
    def settle_claim(self, holder: Generation) -> bool:
        mine = self.value
        super().settle_claim(holder)
        self.value = mine
        return True


class NeedsNoMajority(Proposal):
    def chosen(self) -> Generation | None:
        return self.value if self.stage is Stage.ACCEPTING and self._accepted else None


class VotesInside(Membership):
    """Leaves its generation in its own books only: the ranks go on."""

    def _step_out(self, reason: str) -> None:
        self._run = None


def with_parts(voter: type[Voter] = Voter, proposal: type[Proposal] = Proposal) -> type[Membership]:
    class Broken(Membership):
        voter_type = voter
        proposal_type = proposal

    return Broken


@pytest.mark.parametrize(
    ("broken", "amnesia", "rules"),
    [
        pytest.param(with_parts(PromisesTwice), False, {"one promise to a number"}, id="promises-twice"),
        pytest.param(with_parts(AcceptsBelowItsPromise), False, {"one chain"}, id="accepts-below-its-promise"),
        pytest.param(with_parts(proposal=DecidesAnewForEachNumber), False, {"one chain"}, id="decides-anew"),
        pytest.param(with_parts(proposal=TakesHalfWithoutClaim), False, {"one chain"}, id="half-without-claim"),
        pytest.param(with_parts(proposal=NeedsNoMajority), False, {"one chain"}, id="no-majority"),
        pytest.param(VotesInside, False, {"quit before voting", "quit before entering"}, id="votes-inside"),
        pytest.param(Membership, True, {"one chain", "one trainer"}, id="amnesia"),
    ],
)
def test_a_broken_rule_is_caught(broken: type[Membership], amnesia: bool, rules: set[str]) -> None:
    found = first_broken(range(NUM_SCHEDULES), broken, amnesia=amnesia)
    assert found is not None
    seed, error = found
    print(f"caught by schedule {seed}: {error}")
    assert error.rule in rules
