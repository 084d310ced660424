"""What a cluster does when this or that happens, on a network that loses nothing unless told to."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable

from launcher.cluster.effects import AskClaim, AskPause, Effect, Enter, GiveUp, Persist, Quit, Say, Send
from launcher.cluster.membership import Membership
from launcher.cluster.messages import Accept, AcceptedBy, Join, Learn, Message, Prepare, Promise
from launcher.cluster.model import (
    Durable,
    Generation,
    Identity,
    LeaveAsked,
    LocalEvent,
    LocalFailed,
    LocalFinished,
    Node,
    Paused,
    Timing,
    Wanted,
)

TIMING = Timing(gather_s=10.0, bound_s=100.0, join_pause_s=20.0)
JOB = Identity("abc", {"torch": "2.11"})


class Cluster:
    """Agents by name; messages arrive at once and in order. lost: which messages the network swallows."""

    def __init__(self, wanted: Wanted, *names: str, seeds: tuple[str, ...] = ("n0", "n1", "n2", "n3")) -> None:
        self.wanted, self.seeds = wanted, [f"{name}:1" for name in seeds]
        self.now = 0.0
        self.agents: dict[str, Membership] = {}
        self.disks: dict[str, Durable] = {}
        self.done: dict[str, list[Effect]] = {}
        self.claims: dict[int, Generation] = {}
        self.claims_work = True
        self.lost: Callable[[str, str, Message], bool] = lambda sender, target, message: False
        self._boots = 0
        self._queue: deque[tuple[str, str, Message]] = deque()
        self.start(*names)

    def start(self, *names: str, identity: Identity = JOB) -> None:
        for name in names:
            self._boots += 1
            node = Node(name, f"{name}:1", 1, f"boot{self._boots}")
            self.agents[name] = Membership(
                node,
                seeds=self.seeds,
                wanted=self.wanted,
                timing=TIMING,
                identity=identity,
                rng=random.Random(self._boots),
                free_port=lambda: 29500,
                durable=self.disks.get(name),
            )
            self._do(name, self.agents[name].on_start(self.now))
        self._deliver()

    def kill(self, *names: str) -> None:
        for name in names:
            del self.agents[name]

    def refuse(self, name: str, *, at: str) -> None:
        self._do(at, self.agents[at].on_unreachable(f"{name}:1", self.now))
        self._deliver()

    def tell(self, name: str, event: LocalEvent) -> None:
        self._do(name, self.agents[name].on_local(event, self.now))
        self._deliver()

    def tick(self, seconds: float) -> None:
        end = self.now + seconds
        while self.now < end:
            self.now += TIMING.heartbeat_s
            for name in list(self.agents):
                self._do(name, self.agents[name].on_tick(self.now))
                self._deliver()

    def running(self) -> dict[str, int]:
        return {name: a.running.number if a.running else 0 for name, a in self.agents.items() if not a.ended}

    def members(self, name: str) -> list[str]:
        running = self.agents[name].running
        return [member.name for member in running.members] if running else []

    def gave_up(self, name: str) -> GiveUp | None:
        return next((effect for effect in self.done[name] if isinstance(effect, GiveUp)), None)

    def _do(self, name: str, effects: list[Effect]) -> None:
        for effect in effects:
            self.done.setdefault(name, []).append(effect)
            if isinstance(effect, Send):
                self._queue.append((name, effect.address.removesuffix(":1"), effect.message))
            elif isinstance(effect, Persist):
                self.disks[name] = effect.durable
            elif isinstance(effect, AskClaim) and self.claims_work:
                holder = self.claims.setdefault(effect.base, effect.value)
                self._do(name, self.agents[name].on_claim(effect.base, holder, self.now))

    def _deliver(self) -> None:
        while self._queue:
            sender, target, message = self._queue.popleft()
            if target in self.agents and not self.lost(sender, target, message):
                self._do(target, self.agents[target].on_message(message, self.now))


def cut(*side: str) -> Callable[[str, str, Message], bool]:
    return lambda sender, target, message: (sender in side) != (target in side)


FIXED_2, FIXED_3, ELASTIC = Wanted(2, 2), Wanted(3, 3), Wanted(1, 4)


def elastic(*names: str) -> Cluster:
    cluster = Cluster(ELASTIC, *names)
    cluster.tick(TIMING.gather_s + 0.5)
    assert set(cluster.running().values()) == {1}
    return cluster


# ---- the first generation ----


def test_one_node_alone_needs_nobody() -> None:
    cluster = Cluster(Wanted(1, 1), "n0", seeds=("n0",))
    assert cluster.running() == {"n0": 1}


def test_fixed_starts_as_soon_as_the_last_is_there() -> None:
    cluster = Cluster(FIXED_3, "n0", "n1")
    cluster.tick(5)
    assert cluster.running() == {"n0": 0, "n1": 0}
    cluster.start("n2")
    assert cluster.running() == {"n0": 1, "n1": 1, "n2": 1}
    assert cluster.members("n2") == ["n0", "n1", "n2"]


def test_fixed_gives_up_at_the_bound_and_names_who_is_missing() -> None:
    cluster = Cluster(FIXED_2, "n0", seeds=("n0", "n1"))
    cluster.tick(TIMING.bound_s + 1)
    end = cluster.gave_up("n0")
    assert end is not None
    assert end.exit_code == 138
    assert "n1:1" in end.reason


def test_elastic_starts_with_what_is_there_after_the_bound() -> None:
    cluster = Cluster(ELASTIC, "n0", "n1")
    cluster.tick(TIMING.gather_s - 1)
    assert cluster.running() == {"n0": 0, "n1": 0}
    cluster.tick(2)
    assert cluster.running() == {"n0": 1, "n1": 1}


def test_without_the_first_seed_the_second_forms_the_first_generation() -> None:
    cluster = Cluster(ELASTIC, "n1", "n2")
    cluster.tick(TIMING.silence_s + TIMING.gather_s + 1)
    assert cluster.members("n2") == ["n1", "n2"]


def test_the_first_seed_that_lost_its_memory_does_not_start_a_second_run() -> None:
    cluster = elastic("n0", "n1")
    cluster.kill("n0", "n1")
    del cluster.disks["n0"]
    cluster.start("n0")
    cluster.tick(60)
    assert cluster.running() == {"n0": 0}  # the claim says who the first generation were; n1, half of it, is not here
    cluster.start("n1")
    cluster.tick(5)
    assert cluster.members("n0") == ["n0", "n1"]


# ---- faults ----


def test_a_rank_that_fails_stops_the_ranks_of_all_nodes_at_once() -> None:
    cluster = elastic("n0", "n1", "n2")
    cluster.tell("n2", LocalFailed(1, retryable=True, reason="rank 2 was killed"))
    for name in ("n0", "n1", "n2"):
        assert any(isinstance(effect, Quit) and effect.number == 1 for effect in cluster.done[name])
    assert cluster.running() == {"n0": 2, "n1": 2, "n2": 2}  # without a single tick


def test_a_leader_that_refuses_connections_is_replaced_at_once() -> None:
    cluster = elastic("n0", "n1", "n2")
    cluster.kill("n0")
    cluster.refuse("n0", at="n2")
    cluster.refuse("n0", at="n1")
    assert cluster.running() == {"n1": 2, "n2": 2}
    assert cluster.members("n1") == ["n1", "n2"]


def test_a_silent_leader_is_replaced_after_the_silence() -> None:
    cluster = elastic("n0", "n1", "n2")
    cluster.kill("n0")
    cluster.tick(TIMING.silence_s + 1.5)
    assert cluster.running() == {"n1": 2, "n2": 2}


def test_fixed_waits_for_a_lost_node_and_gives_it_its_place_back() -> None:
    cluster = Cluster(FIXED_2, "n0", "n1")
    cluster.kill("n0")
    cluster.tick(20)
    assert cluster.running() == {"n1": 0}
    cluster.start("n0")
    cluster.tick(5)
    assert cluster.members("n1") == ["n0", "n1"]


def test_a_node_back_without_memory_takes_its_name_but_not_its_vote() -> None:
    cluster = Cluster(FIXED_2, "n0", "n1")
    before = cluster.agents["n0"].running
    cluster.kill("n1")
    del cluster.disks["n1"]
    cluster.start("n1")
    cluster.tick(5)
    after = cluster.agents["n0"].running
    assert before is not None
    assert after is not None
    assert [m.name for m in after.members] == [m.name for m in before.members]
    assert after.members[1].incarnation != before.members[1].incarnation
    assert 1 in cluster.claims  # n0 alone was half


def test_half_without_the_claim_waits() -> None:
    cluster = elastic("n0", "n1")
    cluster.claims_work = False
    cluster.kill("n1")
    cluster.tick(20)
    assert cluster.running() == {"n0": 0}
    cluster.claims_work = True
    cluster.tick(3)
    assert cluster.members("n0") == ["n0"]


def test_of_two_halves_one_trains_and_after_the_cut_there_is_one_run() -> None:
    cluster = elastic("n0", "n1", "n2", "n3")
    cluster.lost = cut("n0", "n1")
    cluster.tick(20)
    assert sorted(cluster.running().values()) == [0, 0, 2, 2]
    cluster.lost = lambda sender, target, message: False
    cluster.tick(12)  # those outside are let in: a pause that nobody confirms takes its bound
    cluster.tick(TIMING.join_pause_s)
    assert len(set(cluster.running().values())) == 1
    assert len(cluster.members("n0")) == 4


def test_less_than_half_waits_and_says_for_whom() -> None:
    cluster = elastic("n0", "n1", "n2")
    cluster.kill("n1", "n2")
    cluster.tick(20)
    assert cluster.running() == {"n0": 0}
    said = [effect.text for effect in cluster.done["n0"] if isinstance(effect, Say)]
    assert "n1 (n1:1)" in said[-1]
    assert "n2 (n2:1)" in said[-1]


def test_a_generation_that_may_have_been_chosen_is_taken_up_and_not_replaced() -> None:
    cluster = elastic("n0", "n1", "n2")
    cluster.lost = lambda sender, target, message: isinstance(message, (AcceptedBy, Learn))
    cluster.tell("n2", LocalFailed(1, retryable=True, reason="rank 2 was killed"))
    accepted = cluster.disks["n1"].accepted
    assert accepted is not None
    cluster.kill("n0")
    cluster.lost = lambda sender, target, message: False
    cluster.refuse("n0", at="n2")
    cluster.refuse("n0", at="n1")
    cluster.tick(3)
    learned = [effect.durable.committed for effect in cluster.done["n1"] if isinstance(effect, Persist)]
    assert accepted.generation in learned
    assert cluster.members("n1") == ["n1", "n2"]


def test_the_ranks_are_gone_and_the_vote_durable_before_a_voter_answers() -> None:
    cluster = elastic("n0", "n1", "n2")
    agent = cluster.agents["n2"]
    committed = agent.voter.committed
    prepare = Prepare(cluster.agents["n1"].me, committed.number, committed.number + 1, committed.number)
    kinds = [
        type(effect.message if isinstance(effect, Send) else effect)
        for effect in agent.on_message(prepare, cluster.now)
    ]
    assert [kind for kind in kinds if kind in (Quit, Persist, Promise)] == [Quit, Persist, Promise]


def test_a_voter_answers_once_for_a_number_also_after_a_restart() -> None:
    cluster = elastic("n0", "n1", "n2")
    proposer, committed = cluster.agents["n1"].me, cluster.agents["n2"].voter.committed
    prepare = Prepare(proposer, committed.number, 7, committed.number)
    cluster._do("n2", cluster.agents["n2"].on_message(prepare, cluster.now))
    cluster.kill("n2")
    cluster.start("n2")
    again = cluster.agents["n2"].on_message(prepare, cluster.now)
    late = Generation(6, committed.members, committed.number, 1, "late")
    too_late = cluster.agents["n2"].on_message(Accept(proposer, committed.number, 6, late), cluster.now)
    assert not [e for e in again + too_late if isinstance(e, Send) and isinstance(e.message, (Promise, AcceptedBy))]


def test_an_agent_that_restarts_does_not_enter_its_generation_again() -> None:
    cluster = elastic("n0", "n1", "n2")
    cluster.kill("n1")
    cluster.start("n1")
    entered = [effect.generation.number for effect in cluster.done["n1"] if isinstance(effect, Enter)]
    assert entered == [1, 2]
    assert cluster.running() == {"n0": 2, "n1": 2, "n2": 2}


# ---- coming and going ----


def test_a_newcomer_is_let_in_after_an_agreed_save() -> None:
    cluster = elastic("n0", "n1")
    cluster.start("n2")
    cluster.tick(1)
    assert any(isinstance(effect, AskPause) for effect in cluster.done["n0"])
    assert cluster.running() == {"n0": 1, "n1": 1, "n2": 0}
    cluster.tell("n0", Paused(1))
    cluster.tick(1)
    assert cluster.members("n2") == ["n0", "n1", "n2"]


def test_a_spare_does_not_give_up_while_the_run_goes_on() -> None:
    cluster = Cluster(Wanted(1, 2), "n0", "n1")
    cluster.start("n2")
    cluster.tick(TIMING.bound_s * 1.5)
    assert cluster.running() == {"n0": 1, "n1": 1, "n2": 0}


def test_who_leaves_in_order_votes_for_those_who_stay() -> None:
    cluster = elastic("n0", "n1")
    cluster.tell("n0", LeaveAsked("SIGTERM"))
    cluster.tell("n0", Paused(1))
    cluster.tick(1)
    end = cluster.gave_up("n0")
    assert end is not None
    assert end.exit_code == 138
    assert cluster.members("n1") == ["n1"]
    assert set(cluster.claims) == {0}  # two of two: no claim was needed


def test_when_all_leave_nobody_waits_for_anybody() -> None:
    cluster = elastic("n0", "n1", "n2")
    for name in ("n0", "n1", "n2"):
        cluster.tell(name, LeaveAsked("SIGTERM"))
    cluster.tell("n0", Paused(1))
    cluster.tick(TIMING.pause_s + 1)
    assert cluster.running() == {}


def test_who_wants_to_join_waits_for_a_long_step_and_who_has_to_leave_does_not() -> None:
    cluster = elastic("n0", "n1")
    cluster.start("n2")
    cluster.tick(TIMING.join_pause_s - 1)
    assert cluster.running() == {"n0": 1, "n1": 1, "n2": 0}
    cluster = elastic("n0", "n1")
    cluster.start("n2")
    cluster.tick(1)
    cluster.tell("n1", LeaveAsked("SIGTERM"))
    cluster.tick(TIMING.pause_s - 1)
    assert cluster.members("n0") == ["n0", "n1"]
    cluster.tick(2)
    assert cluster.members("n0") == ["n0", "n2"]


def test_a_second_agent_of_a_name_waits_until_the_first_is_silent() -> None:
    cluster = elastic("n0", "n1")
    elsewhere = Node("n1", "elsewhere:1", 1, "another")
    join = Join(elsewhere, 1, 1, True, False, JOB)
    leader = cluster.agents["n0"]
    leader.on_message(join, cluster.now)
    assert cluster.running() == {"n0": 1, "n1": 1}
    del cluster.agents["n1"]
    cluster.now += TIMING.silence_s + 0.1
    leader.on_message(join, cluster.now)
    assert leader.running is None


def test_another_job_is_refused_with_the_difference() -> None:
    cluster = elastic("n0", "n1")
    cluster.start("n2", identity=Identity("abc", {"torch": "2.10"}))
    end = cluster.gave_up("n2")
    assert end is not None
    assert end.exit_code == 3
    assert "torch: 2.10 here, 2.11 there" in end.reason
    said = [effect.text for effect in cluster.done["n0"] if isinstance(effect, Say)]
    assert any("n2 (n2:1) was refused: torch: 2.11 here, 2.10 there" in text for text in said)
    assert cluster.running() == {"n0": 1, "n1": 1}


def test_a_node_that_nobody_wants_ends_with_the_reason() -> None:
    cluster = Cluster(FIXED_2, "n1", seeds=("n0",))
    agent = cluster.agents["n1"]
    for _ in range(40):
        agent.on_refused("n0:1", "does not accept this run's token", cluster.now)
        cluster.tick(1)
    end = cluster.gave_up("n1")
    assert end is not None
    assert end.exit_code == 3
    assert "n0:1 does not accept this run's token" in end.reason


# ---- the end ----


def test_the_run_ends_when_all_have_finished_and_not_before() -> None:
    cluster = elastic("n0", "n1")
    cluster.tell("n1", LocalFinished(1))
    cluster.tick(5)
    assert cluster.running() == {"n0": 1, "n1": 1}
    cluster.tell("n0", LocalFinished(1))
    cluster.tick(1)
    ends = [cluster.gave_up(name) for name in ("n0", "n1")]
    assert [end.exit_code for end in ends if end] == [0, 0]


def test_a_fault_that_a_rerun_would_meet_again_ends_the_run_everywhere() -> None:
    cluster = elastic("n0", "n1", "n2")
    cluster.tell("n2", LocalFailed(1, retryable=False, reason="KeyError in user code"))
    cluster.tick(1)
    ends = [cluster.gave_up(name) for name in ("n0", "n1", "n2")]
    assert [(end.exit_code, end.reason) for end in ends if end] == [(1, "n2: KeyError in user code")] * 3


def test_a_cause_found_after_the_others_have_gone_on_still_ends_the_run() -> None:
    cluster = elastic("n0", "n1", "n2")
    cluster.tell("n1", LocalFailed(1, retryable=True, reason="rank 1: connection closed by peer"))  # n2's victim
    cluster.tick(1)
    assert set(cluster.running().values()) == {2}
    cluster.tell("n2", LocalFailed(1, retryable=False, reason="KeyError in user code"))
    cluster.tick(1)
    ends = [cluster.gave_up(name) for name in ("n0", "n1", "n2")]
    assert [(end.exit_code, end.reason) for end in ends if end] == [(1, "n2: KeyError in user code")] * 3


def test_who_waits_to_be_let_in_hears_of_the_end() -> None:
    cluster = elastic("n0", "n1")
    cluster.start("n2")
    cluster.tick(1)
    for name in ("n0", "n1"):
        cluster.tell(name, LocalFinished(1))
    cluster.tick(1)
    end = cluster.gave_up("n2")
    assert end is not None
    assert end.exit_code == 0


def test_nothing_is_done_after_the_end() -> None:
    cluster = elastic("n0", "n1")
    cluster.tell("n1", LocalFailed(1, retryable=False, reason="x"))
    cluster.tick(TIMING.silence_s + 1)
    for name in ("n0", "n1"):
        assert isinstance(cluster.done[name][-1], GiveUp)


def test_slow_and_lossy_is_not_dead() -> None:
    cluster = elastic("n0", "n1", "n2", "n3")
    rng = random.Random(1)
    cluster.lost = lambda sender, target, message: rng.random() < 0.05
    cluster.tick(600)
    assert set(cluster.running().values()) == {1}
