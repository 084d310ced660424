"""The outside observer of the simulated cluster: it sees what machines do, and objects when a rule is broken."""

from __future__ import annotations

from dataclasses import dataclass

from launcher.cluster.membership import Membership
from launcher.cluster.messages import AcceptedBy, Message, Promise
from launcher.cluster.model import Durable, Generation, NodeKey


class BrokenRuleError(AssertionError):
    """An invariant is broken. `rule` names it."""

    def __init__(self, rule: str, detail: str) -> None:
        super().__init__(f"{rule}: {detail}")
        self.rule = rule


@dataclass
class Machine:
    """disk: what survives a crash. inside: the generation whose ranks run here. doomed: effects left until it crashes.
    ambush: the kind of message that, when next sent, brings trouble on the sender."""

    name: str
    agent: Membership | None = None
    disk: Durable | None = None
    inside: Generation | None = None
    boot: int = 0
    doomed: int | None = None
    ambush: type[Message] | None = None
    frozen_until: float = 0.0
    late_until: float = 0.0
    stays_dead: bool = False
    gone: bool = False

    @property
    def address(self) -> str:
        return f"{self.name}:1"


class Referee:
    """Sees what an outside observer sees, and objects.

    one chain: one generation to a number, one successor to a generation, whoever knows of it.
    one trainer: at most one generation has all its members inside, and these have growing numbers.
    voted never falls: per node and incarnation, over restarts.
    one promise to a number; quit before voting; quit before entering; each generation once.
    """

    def __init__(self, *, forgetful: bool) -> None:
        """forgetful: nodes may lose their memory unpunished, to see whether what that leads to is caught as well."""
        self._forgetful = forgetful
        self.by_number: dict[int, Generation] = {}
        self._successors: dict[int, Generation] = {}
        self._inside: dict[int, set[NodeKey]] = {}
        self._voted: dict[NodeKey, int] = {}
        self._promised: set[tuple[NodeKey, int]] = set()
        self._last_trained = 0
        self._last_entered: dict[NodeKey, int] = {}
        self.num_trained = 0

    def on_chosen(self, generation: Generation) -> None:
        if generation.number == 0:
            return
        for known, key in ((self.by_number, generation.number), (self._successors, generation.base)):
            if known.setdefault(key, generation) != generation:
                raise BrokenRuleError("one chain", f"{known[key]} and {generation} after {generation.base}")

    def on_persist(self, name: str, durable: Durable) -> None:
        key = (name, durable.incarnation)
        if not self._forgetful and durable.voted < self._voted.get(key, 0):
            raise BrokenRuleError("voted never falls", f"{key}: {durable.voted} after {self._voted[key]}")
        self._voted[key] = durable.voted
        self.on_chosen(durable.committed)

    def on_vote(self, machine: Machine, vote: Promise | AcceptedBy) -> None:
        if machine.inside:
            raise BrokenRuleError("quit before voting", f"{machine.name} is still in {machine.inside}")
        if isinstance(vote, Promise):
            promise = (vote.sender.key, vote.number)
            if not self._forgetful and promise in self._promised:
                raise BrokenRuleError("one promise to a number", f"{promise}")
            self._promised.add(promise)

    def on_enter(self, machine: Machine, key: NodeKey, generation: Generation) -> None:
        if machine.inside:
            raise BrokenRuleError("quit before entering", f"{machine.name} is still in {machine.inside}")
        if not self._forgetful and generation.number <= self._last_entered.get(key, 0):
            raise BrokenRuleError("each generation once", f"{machine.name} enters {generation} again, or goes back")
        self._last_entered[key] = generation.number
        self.on_chosen(generation)
        machine.inside = generation
        inside = self._inside.setdefault(generation.number, set())
        inside.add(key)
        if self.is_full(generation):
            others = [self.by_number[n] for n in self._inside if n != generation.number]
            if any(self.is_full(other) for other in others) or generation.number < self._last_trained:
                raise BrokenRuleError("one trainer", f"{generation} while or after {self._last_trained}")
            self.num_trained += generation.number != self._last_trained
            self._last_trained = generation.number

    def on_quit(self, machine: Machine, key: NodeKey) -> None:
        if machine.inside:
            self._inside[machine.inside.number].discard(key)
        machine.inside = None

    def is_full(self, generation: Generation) -> bool:
        return len(self._inside.get(generation.number, ())) == len(generation.members)
