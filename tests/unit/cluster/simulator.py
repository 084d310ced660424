"""A cluster inside one process: seeded clock, network, disks and claim folder around the real state machines.

A seed fixes a whole schedule: how many nodes, fixed or elastic, how bad the network is, which faults come when. The
invariants are checked at every effect they depend on; at the end the network heals, and then there has to be progress.
A failure is replayed by its seed: `World(seed).run()`.

    python -m tests.unit.cluster.simulator 0 10000     # schedules 0 to 9999, with a summary
"""

from __future__ import annotations

import heapq
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias

from launcher.cluster.effects import AskClaim, AskPause, Effect, Enter, GiveUp, Persist, Quit, Send
from launcher.cluster.membership import Membership
from launcher.cluster.messages import Accept, AcceptedBy, Learn, Message, Prepare, Promise
from launcher.cluster.model import (
    Durable,
    Generation,
    Identity,
    LeaveAsked,
    LocalEvent,
    LocalFailed,
    Node,
    Paused,
    Timing,
    Wanted,
)
from launcher.cluster.voter import Standing, standing
from tests.unit.cluster.referee import BrokenRuleError, Machine, Referee

HEARTBEAT_S = 0.5
IDENTITY = Identity("sha")
MAX_MESSAGES_PER_NODE_S = 50  # answers must not breed answers without end
HEALING_S = 60.0  # within this, once the network has healed, a generation has to stand
Action: TypeAlias = Callable[[], None]


@dataclass
class Weather:
    """How the network and the claim folder behave now. cut: pairs (from, to) that nothing passes between."""

    drop: float = 0.0
    double: float = 0.0
    slow: float = 0.0
    cut: set[tuple[str, str]] = field(default_factory=set)
    no_claims: set[str] = field(default_factory=set)


class World:
    """One schedule. `agent_type` may be a `Membership` with a rule broken; `amnesia`: restarts keep the incarnation but
    lose what goes with it, which no agent may do."""

    def __init__(self, seed: int, agent_type: type[Membership] = Membership, *, amnesia: bool = False) -> None:
        self.seed, self._agent_type, self._amnesia = seed, agent_type, amnesia
        self.rng = rng = random.Random(seed)
        self.now = 0.0
        self.num_events = 0
        self.referee = Referee(forgetful=amnesia)
        self._queue: list[tuple[float, int, Action]] = []
        self._claims: dict[int, Generation] = {}
        num_nodes = rng.choice((1, 2, 2, 3, 3, 3, 4, 5, 5))
        fixed = rng.random() < 0.25
        num_late = 0 if fixed else rng.choice((0, 0, 1))
        self.wanted = Wanted(num_nodes if fixed else rng.randint(1, (num_nodes + 1) // 2), num_nodes + num_late)
        if fixed:
            self.wanted = Wanted(num_nodes, num_nodes)
        self.machines = [Machine(f"n{rank}") for rank in range(num_nodes + num_late)]
        self._at_address = {machine.address: machine for machine in self.machines}
        self._seeds = [machine.address for machine in self.machines[: rng.randint(1, num_nodes)]]
        self._rivalry = rng.random() < 0.3  # nobody dies, everybody is taken for dead
        # Safety may rest on no duration: with short silences and long votes, proposers overlap.
        silence_s, vote_s = rng.choice((1.0, 2.0)), 3.0 if self._rivalry else rng.choice((0.6, 3.0))
        self.timing = Timing(HEARTBEAT_S, silence_s, vote_s, gather_s=2.0, bound_s=1e9, pause_s=1.5, join_pause_s=4.0)
        rough = rng.random() < 0.7
        self.weather = Weather(
            rng.uniform(0, 0.2) * rough,
            rng.uniform(0, 0.1) * rough,
            rng.choice((0.05, 0.4)) * rough,
        )
        self._faults = [self._lay_ambush] if self._rivalry else self._all_faults()
        self._faults_end = rng.uniform(4.0, 16.0)

    @property
    def num_claims(self) -> int:
        return len(self._claims)

    # ---- the schedule ----

    def run(self) -> str:
        """How it ended: "stands", or why no generation could stand."""
        for machine in self.machines:
            late = self.rng.uniform(0, self._faults_end) if self.rng.random() < 0.2 else self.rng.uniform(0, 1)
            self._at(late, partial(self._boot, machine))
        for _ in range(self.rng.randint(0, 8)):
            self._at(self.rng.uniform(0.5, self._faults_end), self.rng.choice(self._faults))
        self._run_until(self._faults_end)
        self._heal()
        healed = self.now
        while self.now < healed + HEALING_S:
            self._run_until(self.now + 2.0)
            if self.num_events > MAX_MESSAGES_PER_NODE_S * len(self.machines) * self.now:
                raise BrokenRuleError("no storm", f"{self.num_events} events in {self.now:.0f} s")
            if self._stands():
                return "stands"
            if self.now > healed + HEALING_S / 4 and self._excuse():
                return self._excuse()
        raise BrokenRuleError("progress", f"nothing stands {HEALING_S:g} s after the network has healed")

    def _all_faults(self) -> list[Action]:
        return [
            self._crash_any,
            self._crash_any,
            self._lose_disk,
            self._split,
            self._split,
            self._cut_one_way,
            self._fail_rank,
            self._freeze_any,
            self._lay_ambush,
            self._lay_ambush,
            self._lay_ambush,
            self._leave,
            self._cut_from_claims,
        ]

    def _crash_any(self) -> None:
        machine = self.rng.choice(self.machines)
        if self.rng.random() < 0.5:
            self._crash(machine)
        else:
            machine.doomed = self.rng.randint(0, 4)  # in the midst of what it does next
        self._boot_later(machine)

    def _lose_disk(self) -> None:
        machine = self.rng.choice(self.machines)
        self._crash(machine)
        if self._amnesia and machine.disk:
            machine.disk = Durable(machine.disk.incarnation)
        else:
            machine.disk = None
        self._boot_later(machine)

    def _boot_later(self, machine: Machine) -> None:
        machine.stays_dead = self.rng.random() < 0.3
        if not machine.stays_dead:
            self._at(self.now + self.rng.choice((0.3, 2.0, 6.0)), partial(self._boot, machine))

    def _split(self) -> None:
        side = {machine.name for machine in self.machines if self.rng.random() < 0.5}
        cut = {(a.name, b.name) for a in self.machines for b in self.machines if (a.name in side) != (b.name in side)}
        self._cut(cut)
        if self.rng.random() < 0.3:
            self._cut_from_claims()

    def _cut_one_way(self) -> None:
        a, b = self.rng.choice(self.machines), self.rng.choice(self.machines)
        self._cut({(a.name, b.name)})

    def _cut(self, pairs: set[tuple[str, str]]) -> None:
        self.weather.cut |= pairs
        self._at(self.now + self.rng.choice((1.0, 4.0, 9.0)), lambda: self.weather.cut.difference_update(pairs))

    def _cut_from_claims(self) -> None:
        name = self.rng.choice(self.machines).name
        self.weather.no_claims.add(name)
        self._at(self.now + self.rng.uniform(1, 6), lambda: self.weather.no_claims.discard(name))

    def _fail_rank(self) -> None:
        machine = self.rng.choice(self.machines)
        if machine.inside:
            self._tell(machine, LocalFailed(machine.inside.number, retryable=True, reason="rank 0 has died"))

    def _freeze_any(self) -> None:
        self._freeze(self.rng.choice(self.machines))

    def _freeze(self, machine: Machine) -> None:
        machine.frozen_until = self.now + self.rng.uniform(0.5, 5)

    def _slander(self, machine: Machine) -> None:
        """Its words are late, and everyone takes it for dead while it goes on: this makes rivals."""
        machine.late_until = self.now + 0.2
        for other in self.machines:
            if other is not machine and self.rng.random() < 0.8:
                self._at(self.now + self.rng.uniform(0, 0.3), partial(self._reset, other, machine))

    def _reset(self, machine: Machine, peer: Machine) -> None:
        if machine.agent:
            self._do(machine, machine.agent.on_unreachable(peer.address, self.now))

    def _lay_ambush(self) -> None:
        """Where a protocol breaks: in the midst of a vote, the proposer above all."""
        for machine in self.machines:
            if self.rng.random() < 0.5:
                machine.ambush = self.rng.choice((Prepare, Promise, Accept, Accept, AcceptedBy, Learn))

    def _spring_ambush(self, machine: Machine) -> None:
        machine.ambush = None
        trouble = 0.6 if self._rivalry else self.rng.random()
        if trouble < 0.3:
            machine.doomed = self.rng.randint(0, 3)
            self._boot_later(machine)
        elif trouble < 0.5:
            self._freeze(machine)
        elif trouble < 0.8:
            self._slander(machine)
        else:
            others = [other for other in self.machines if self.rng.random() < 0.7]
            self._cut({pair for o in others for pair in ((machine.name, o.name), (o.name, machine.name))})

    def _leave(self) -> None:
        machine = self.rng.choice(self.machines)
        self._tell(machine, LeaveAsked("notice"))

    def _heal(self) -> None:
        self.weather = Weather()
        for machine in self.machines:
            machine.doomed, machine.ambush, machine.frozen_until = None, None, 0.0
            if machine.agent is None and not machine.stays_dead and not machine.gone:
                self._boot(machine)

    # ---- what the end has to be ----

    def _stands(self) -> bool:
        """A generation has all its members inside, and nobody is left out for whom there would be room."""
        standing_now = [m.inside for m in self.machines if m.inside and self.referee.is_full(m.inside)]
        found = [machine for machine in self.machines if machine.agent and not self._is_lost(machine.agent)]
        return bool(standing_now) and len(standing_now[0].members) == min(len(found), self.wanted.max_nodes)

    def _is_lost(self, agent: Membership) -> bool:
        """It is out of the newest generation it knows, and whoever it could turn to is dead."""
        others = (self._at_address[address] for address in agent.contacts.known if address != agent.me.address)
        return not agent.contacts.may_form and not any(other.agent for other in others)

    def _excuse(self) -> str:
        """Why the rules forbid that a generation stands; empty if they do not."""
        agents = [machine.agent for machine in self.machines if machine.agent and not self._is_lost(machine.agent)]
        if len(agents) < self.wanted.min_nodes:
            return "too few nodes"
        alive = [agent.me for agent in agents]
        newest = max((agent.voter.committed for agent in agents), key=lambda generation: generation.number)
        quorum = standing(newest, alive)
        if quorum is Standing.MINORITY:
            return "most of the last generation are dead or have lost their memory"
        if quorum is Standing.HALF and newest.number in self._claims:
            return "half of the last generation are dead, and the claim is theirs"
        return ""

    # ---- machines ----

    def _boot(self, machine: Machine) -> None:
        if machine.agent or machine.gone:
            return
        machine.boot += 1
        fresh = f"{machine.name}.{machine.boot}"
        machine.agent = self._agent_type(
            Node(machine.name, machine.address, 1, fresh),
            seeds=self._seeds,
            wanted=self.wanted,
            timing=self.timing,
            identity=IDENTITY,
            rng=self.rng,
            free_port=lambda: self.rng.randint(20000, 60000),
            durable=machine.disk,
        )
        machine.doomed = None
        self._do(machine, machine.agent.on_start(self.now))
        self._at(self.now + self.rng.uniform(0, HEARTBEAT_S), partial(self._tick, machine, machine.boot))

    def _crash(self, machine: Machine) -> None:
        if machine.agent:
            self.referee.on_quit(machine, machine.agent.me.key)
            machine.agent = None

    def _tick(self, machine: Machine, boot: int) -> None:
        if machine.agent and machine.boot == boot:
            if machine.frozen_until <= self.now:
                self._do(machine, machine.agent.on_tick(self.now))
            self._at(self.now + HEARTBEAT_S, partial(self._tick, machine, boot))

    def _tell(self, machine: Machine, event: LocalEvent) -> None:
        if machine.agent:
            self._do(machine, machine.agent.on_local(event, self.now))

    def _do(self, machine: Machine, effects: list[Effect]) -> None:
        """In order, and not beyond the point where the machine crashes."""
        for effect in effects:
            agent = machine.agent
            if agent is None:
                return
            if machine.doomed is not None:
                machine.doomed -= 1
                if machine.doomed < 0:
                    self._crash(machine)
                    return
            self._carry_out(machine, agent, effect)

    def _carry_out(self, machine: Machine, agent: Membership, effect: Effect) -> None:
        match effect:
            case Send():
                self._watch_words(machine, effect.message)
                self._send(machine, effect.address, effect.message)
            case Persist():
                machine.disk = effect.durable
                self.referee.on_persist(machine.name, effect.durable)
            case Enter():
                self.referee.on_enter(machine, agent.me.key, effect.generation)
            case Quit():
                self.referee.on_quit(machine, agent.me.key)
            case AskClaim():
                self._ask_claim(machine, effect)
            case AskPause() if self.rng.random() < 0.8:
                self._at(self.now + 0.5, partial(self._tell, machine, Paused(effect.generation)))
            case GiveUp():
                self._crash(machine)
                machine.gone = True

    def _watch_words(self, machine: Machine, message: Message) -> None:
        if isinstance(message, (Promise, AcceptedBy)):
            self.referee.on_vote(machine, message)
        if machine.ambush and isinstance(message, machine.ambush):
            self._spring_ambush(machine)

    # ---- the network and the claim folder ----

    def _send(self, sender: Machine, address: str, message: Message) -> None:
        weather, rng = self.weather, self.rng
        target = self._at_address[address]
        if (sender.name, target.name) in weather.cut or rng.random() < weather.drop:
            return
        is_late = sender.late_until > self.now or rng.random() < weather.slow
        delay = rng.uniform(0.1, 3.0) if is_late else rng.uniform(0.01, 0.1)
        self._at(self.now + delay, partial(self._deliver, sender, target, message))
        if rng.random() < weather.double:
            self._at(self.now + delay + rng.uniform(0, 1.0), partial(self._deliver, sender, target, message))

    def _deliver(self, sender: Machine, target: Machine, message: Message) -> None:
        if (sender.name, target.name) in self.weather.cut:
            return
        if target.frozen_until > self.now:
            self._at(target.frozen_until, partial(self._deliver, sender, target, message))
        elif target.agent:
            self._do(target, target.agent.on_message(message, self.now))
        elif self.rng.random() < 0.7 and (target.name, sender.name) not in self.weather.cut:
            self._reset(sender, target)

    def _ask_claim(self, machine: Machine, ask: AskClaim) -> None:
        if machine.name not in self.weather.no_claims:
            self._at(self.now + self.rng.uniform(0.005, 0.2), partial(self._write_claim, machine, machine.boot, ask))

    def _write_claim(self, machine: Machine, boot: int, ask: AskClaim) -> None:
        """Happens even if the asker is dead by now; the answer may be lost or late."""
        holder = self._claims.setdefault(ask.base, ask.value)
        if machine.agent and machine.boot == boot and machine.name not in self.weather.no_claims:
            self._at(self.now + self.rng.uniform(0.005, 0.5), partial(self._answer_claim, machine, boot, ask, holder))

    def _answer_claim(self, machine: Machine, boot: int, ask: AskClaim, holder: Generation) -> None:
        if machine.agent and machine.boot == boot:
            self._do(machine, machine.agent.on_claim(ask.base, holder, self.now))

    # ---- the clock ----

    def _at(self, when: float, action: Action) -> None:
        self.num_events += 1
        heapq.heappush(self._queue, (when, self.num_events, action))

    def _run_until(self, end: float) -> None:
        while self._queue and self._queue[0][0] <= end:
            self.now, _, action = heapq.heappop(self._queue)
            action()
        self.now = end


def first_broken(
    seeds: range, agent_type: type[Membership] = Membership, *, amnesia: bool = False
) -> tuple[int, BrokenRuleError] | None:
    for seed in seeds:
        try:
            World(seed, agent_type, amnesia=amnesia).run()
        except BrokenRuleError as error:
            return seed, error
    return None


def main(first: int, last: int) -> None:
    began, endings, num_events, num_trained = time.perf_counter(), Counter[str](), 0, Counter[int]()
    busiest = 0.0
    for seed in range(first, last):
        world = World(seed)
        try:
            endings[world.run()] += 1
        except BrokenRuleError as error:
            endings[f"BROKEN: {error.rule}"] += 1
            print(f"seed {seed}: {error}")
        num_events += world.num_events
        busiest = max(busiest, world.num_events / world.now / len(world.machines))
        num_trained[world.referee.num_trained] += 1
    took_s = time.perf_counter() - began
    print(f"{last - first} schedules in {took_s:.1f} s, {num_events} events, {(last - first) / took_s:.0f} schedules/s")
    print(f"busiest: {busiest:.0f} events per node and second")
    print(dict(endings), "generations that trained, per schedule:", dict(sorted(num_trained.items())), sep="\n")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
