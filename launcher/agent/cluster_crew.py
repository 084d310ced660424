"""This node among several: carries out what membership decides, in its order, and brings the leader's orders and the
agreed saves to where they belong.

Invariant: nothing that membership wants after a `Quit` is done before the ranks of that generation are gone, nor
anything after a `Persist` before that is durable. Effects wait in a queue for it, and what comes later waits behind.
"""

from __future__ import annotations

import errno
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from launcher.agent.crew import Orders, Ranks, RunOver, Seat, Turn
from launcher.agent.peer_tier import Place
from launcher.cluster import messages
from launcher.cluster.agreed_save import LeadersSave, NodesSave
from launcher.cluster.couriers import Couriers
from launcher.cluster.effects import AskClaim, AskPause, Effect, Enter, GiveUp, Persist, Quit, Say, Send
from launcher.cluster.membership import Membership
from launcher.cluster.messages import (
    AllStandStill,
    AskCourier,
    AskOrders,
    AskSave,
    CourierAt,
    Message,
    PartSaved,
    SaveOutcome,
    SaveState,
    Standstill,
    WrittenFile,
)
from launcher.cluster.model import Durable, Generation, LeaveAsked, LocalEvent, LocalFailed, LocalFinished, Node, Paused
from launcher.cluster.shared_save import LeadersParts, NodesParts
from launcher.cluster.standstill import LeadersStandstill
from launcher.errors import ExitCode
from launcher.event_loop import EventLoop
from launcher.progress_record import RankProgress

_ASKS_FOR_ANOTHER_START = (ExitCode.STOPPED, ExitCode.STOPPED_143)
_AWAY_S = 0.5
_SAY_AGAIN_S = 60.0
_SAY_WAIT_AFTER_S = 3.0  # what is settled sooner is not worth a line
ORDERS_BOUND_S = 3600.0  # the leader verifies checkpoints meanwhile, which may be large; its heartbeats show its life


class Wire(Protocol):
    """What a crew needs of `launcher.transport.Transport`."""

    def send(self, address: str, message: Message) -> None: ...

    def tick(self) -> None: ...

    def close(self) -> None: ...


class Archive(Protocol):
    """What a crew needs of `ClusterFolder`."""

    def persist(self, durable: Durable) -> None: ...

    def claim(self, base: int, value: Generation) -> Generation: ...

    def check(self) -> None: ...


class ClusterCrew:
    alone = False

    def __init__(
        self,
        loop: EventLoop,
        membership: Membership,
        archive: Archive,
        connect: Callable[[Callable[[Message], None], Callable[[str], None], Callable[[str, str], None]], Wire],
        *,
        heartbeat_s: float,
        say: Callable[[str], None],
        stop_exit_code: ExitCode,
        timer: str = "heartbeat",
        peer_place: Callable[[str], Place] | None = None,
    ) -> None:
        """`connect` is given what is to hear of messages, unreachable and refusing addresses, and returns the wire.
        `timer`: a name on the loop that nobody else uses. `peer_place`: this node among those that keep each other's
        state, of a run id; None where they do not."""
        self.peer_place = peer_place
        self._loop, self._membership, self._archive, self._say = loop, membership, archive, say
        self._heartbeat_s, self._stop_exit_code, self._timer = heartbeat_s, stop_exit_code, timer
        self._queue: deque[Effect] = deque()
        self._busy = False
        self._entered: Generation | None = None  # to be taken by the supervisor
        self._generation: Generation | None = None  # of the turn that it has taken last
        self._turn: Turn | None = None  # until its ranks are gone
        self._quitting = False  # the queue waits for the ranks' end
        self._over: RunOver | None = None
        self._orders: messages.Orders | None = None
        self._awaits_orders = False
        self._leaders_save: LeadersSave | None = None
        self._nodes_save: NodesSave | None = None
        self._leaders_parts: LeadersParts | None = None
        self._nodes_parts: NodesParts | None = None
        self._leaders_standstill: LeadersStandstill | None = None
        self._couriers = Couriers(membership.me)
        self._ranks: Ranks | None = None
        self._heard_at_s = time.monotonic()
        self._idle_since_s: float | None = None
        self._is_leaving = False
        self._saved_at: int | None = None
        self._said_at: dict[str, float] = {}
        self._wire = connect(self._on_message, self._on_unreachable, self._on_refused)

    def start(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._loop.every(self._timer, self._heartbeat_s, self._beat)
        self._do(self._membership.on_start(time.monotonic()))

    @property
    def me(self) -> Node:
        return self._membership.me

    # -- what the supervisor asks and says -----------------------------------------------------------------------------

    def next_turn(self) -> Turn | RunOver:
        while self._entered is None and self._over is None:
            self._loop.wait()
        if self._over is not None:
            return self._over
        assert self._entered is not None  # or the loop above would still run
        generation, self._entered = self._entered, None
        seats = tuple(Seat(m.name, m.address.rpartition(":")[0], m.num_ranks) for m in generation.members)
        index = next(i for i, member in enumerate(generation.members) if member.key == self.me.key)
        self._generation = generation
        self._turn = Turn(generation.number, generation.reason, seats, index, generation.master_port)
        self._leaders_save = self._nodes_save = self._saved_at = None
        self._couriers.begin(generation.members)
        known = self._membership.voter.committed.number
        names = [member.name for member in generation.members]
        self._leaders_parts = LeadersParts(self.me, known, generation.number, names) if index == 0 else None
        self._nodes_parts = NodesParts(self.me, known, generation.number)
        self._leaders_standstill = LeadersStandstill(generation.number, names) if index == 0 else None
        return self._turn

    def orders(self, turn: Turn, prepare: Callable[[], Orders]) -> Orders | None:
        if turn.leads:
            made = prepare()
            if self.withdrawn(turn):
                return None
            known = self._membership.voter.committed.number
            self._orders = messages.Orders(self.me, known, turn.number, made.spec, made.resume_step)
            for member in self._others():
                self._wire.send(member.address, self._orders)
            return made
        self._awaits_orders = True
        self._ask_for_orders()
        deadline = time.monotonic() + ORDERS_BOUND_S
        while not self.withdrawn(turn) and not self._has_orders_of(turn.number):
            self._loop.wait()
            if time.monotonic() > deadline:
                self.give_up(turn, ExitCode.STOPPED, f"{turn.seats[0].name} has given no orders for 1 h")
                deadline = float("inf")
        self._awaits_orders = False
        if self.withdrawn(turn) or self._orders is None:
            return None
        return Orders(self._orders.spec, self._orders.resume_step)

    def withdrawn(self, turn: Turn) -> bool:
        return self._quitting or self._over is not None or self._turn is not turn

    def over(self) -> bool:
        return self._over is not None

    def goes_on(self, turn: Turn) -> bool:
        running = self._membership.running
        return running is not None and running.number == turn.number

    def may_commit(self, turn: Turn) -> str:
        running = self._membership.running
        if self._quitting or running is None or running.number != turn.number:
            return f"generation {turn.number} is over for this node: another may be training already"
        try:
            self._archive.check()
        except OSError as error:
            if error.errno == errno.ESTALE and self._ranks is not None:  # another agent has this node's place
                self.drop_out(self._stop_exit_code, str(error))
                self._ranks.withdraw(str(error))
            return str(error)
        return ""

    def waits_at(self, step: int) -> None:
        if self._nodes_save is not None and self._nodes_save.waits_at is None:
            self._nodes_save.waits_at = step
            self._tell_save_state()

    def leave(self, source: str, *, at_once: bool) -> None:
        if at_once:
            self._over = RunOver(
                self._stop_exit_code, f"stopped at once by {source}; the same command continues the run"
            )
            if self._turn is not None and self._ranks is not None:
                self._ranks.withdraw(f"{source} a second time")
            return
        self._is_leaving = True
        self._tell(LeaveAsked(f"stopped by {source}"))

    def ranks_gone(self, turn: Turn) -> None:
        if self._turn is turn:
            self._turn = None
        if self._quitting:
            self._quitting = False
            self._advance()

    def failed(self, turn: Turn, reason: str) -> None:
        self.ranks_gone(turn)
        self._tell(LocalFailed(turn.number, retryable=True, reason=reason))
        self._loop.wait(0)  # others' ranks sit in a collective: the word leaves before the cause is looked for

    def give_up(self, turn: Turn, exit_code: ExitCode, reason: str) -> None:
        if exit_code in _ASKS_FOR_ANOTHER_START and not self._membership.wanted.fixed:
            self._tell(LeaveAsked(reason))  # a node whose ranks fail again and again must not end the others' run
            return
        self._tell(LocalFailed(turn.number, retryable=False, reason=reason, exit_code=int(exit_code)))

    def drop_out(self, exit_code: ExitCode, reason: str) -> None:
        """Without a word or a vote: a rank of this node may still run, and the others see it gone when its agent is."""
        self._over = RunOver(exit_code, reason)

    def will_not_come(self, exit_code: ExitCode, reason: str) -> None:
        if not self._membership.wanted.fixed:
            self._say(f"goes on without it, and does not start it again: {reason}")
        elif exit_code not in (ExitCode.FINISHED, *_ASKS_FOR_ANOTHER_START):
            self._tell(LocalFailed(0, retryable=False, reason=reason, exit_code=int(exit_code)))

    def finished(self, turn: Turn, reason: str) -> None:
        self._tell(LocalFinished(turn.number))

    def saved(self, turn: Turn, step: int | None) -> None:
        self._saved_at = step
        if self._nodes_save is not None:
            self._nodes_save.stopped = True
            self._tell_save_state()

    def abandoned(self, turn: Turn, kept: str) -> None:
        running = self._membership.running
        if running is not None and running.number == turn.number:  # nobody has asked for this end
            self.failed(turn, "the ranks ended without a save")

    def tick(self) -> None:
        self._heard_at_s = time.monotonic()
        self._wire.tick()

    def close(self) -> None:
        self._loop.stop_timer(self._timer)
        self._wire.close()

    # -- membership ----------------------------------------------------------------------------------------------------

    def _beat(self) -> None:
        self._do(self._membership.on_tick(time.monotonic()))
        if self._leaders_save is not None and not self._leaders_save.done:
            self._ask_all_to_save(self._leaders_save)
        if self._awaits_orders:
            self._ask_for_orders()
        for part in self._nodes_parts.unanswered if self._nodes_parts is not None and self._turn is not None else ():
            self._tell_part(part)
        for address, question in self._couriers.questions(self._membership.voter.committed.number).items():
            self._wire.send(address, question)
        self._say_what_is_awaited()

    def _say_what_is_awaited(self) -> None:
        now = time.monotonic()
        if self._membership.running is not None or self._membership.ended or self._is_leaving:
            self._idle_since_s = None
        elif self._idle_since_s is None:
            self._idle_since_s = now
        elif now - self._idle_since_s > _SAY_WAIT_AFTER_S:
            self._say_once(self._membership.waiting_for())

    def _say_once(self, text: str) -> None:
        """What has just been said is not said again for a while."""
        now = time.monotonic()
        if now - self._said_at.get(text, float("-inf")) > _SAY_AGAIN_S:
            self._said_at = {said: at for said, at in self._said_at.items() if now - at <= _SAY_AGAIN_S}
            self._said_at[text] = now
            self._say(text)

    def _on_unreachable(self, address: str) -> None:
        self._do(self._membership.on_unreachable(address, time.monotonic()))

    def _on_refused(self, address: str, reason: str) -> None:
        self._do(self._membership.on_refused(address, reason, time.monotonic()))

    def _tell(self, event: LocalEvent) -> None:
        if not self._busy and time.monotonic() - self._heard_at_s > _AWAY_S:
            self._loop.wait(0)  # this thread was away: what others have said meanwhile comes before it judges them
        self._do(self._membership.on_local(event, time.monotonic()))

    def _do(self, effects: Sequence[Effect]) -> None:
        self._queue.extend(effects)
        self._advance()

    def _advance(self) -> None:
        """Carry out what waits, up to a `Quit` whose ranks still run. What an effect leads to comes after the rest."""
        if self._busy:
            return
        self._busy = True
        try:
            while self._queue and not self._quitting:
                self._carry_out(self._queue.popleft())
        finally:
            self._busy = False

    def _carry_out(self, effect: Effect) -> None:
        match effect:
            case Send():
                self._wire.send(effect.address, effect.message)
            case Persist():
                self._archive.persist(effect.durable)
            case Enter():
                self._entered = effect.generation
            case Quit():
                self._quit(effect)
            case AskClaim():
                self._ask_claim(effect)
            case AskPause():
                self._begin_save(effect)
            case GiveUp():
                code = ExitCode(effect.exit_code)
                reason = effect.reason
                if code is ExitCode.STOPPED:
                    saved = f"; saved at step {self._saved_at}" if self._saved_at is not None else ""
                    code, reason = self._stop_exit_code, f"{reason}{saved}; the same command continues the run"
                self._over = self._over or RunOver(code, reason)
            case Say():
                self._say_once(effect.text)

    def _quit(self, quit_: Quit) -> None:
        if self._entered is not None and self._entered.number == quit_.number:
            self._entered = None
        elif self._turn is not None and self._turn.number == quit_.number:
            self._say(f"attempt {quit_.number} is over: {quit_.reason}")
            self._quitting = True
            assert self._ranks is not None  # turns are taken after `start`
            self._ranks.withdraw(quit_.reason)

    def _ask_claim(self, ask: AskClaim) -> None:
        try:
            holder = self._archive.claim(ask.base, ask.value)
        except OSError as error:  # membership asks again
            self._say(f"the claim for the successor of generation {ask.base} cannot be written or read: {error}")
            return
        self._do(self._membership.on_claim(ask.base, holder, time.monotonic()))

    # -- what agents say to each other beside membership ---------------------------------------------------------------

    def _on_message(self, message: Message) -> None:
        match message:
            case AskSave():
                self._on_ask_save(message)
            case SaveState():
                self._hear_save_state(message.sender.name, message)
            case PartSaved():
                self._hear_part(message)
            case SaveOutcome():
                self._hear_outcome(message)
            case Standstill():
                self._hear_standstill(message)
            case AllStandStill():
                self._hear_hang(message)
            case AskCourier():
                self._tell_courier(message.sender)
            case CourierAt():
                self._couriers.hear(message)
            case AskOrders() | messages.Orders():
                self._on_orders(message)
            case _:
                self._do(self._membership.on_message(message, time.monotonic()))

    def _tell_courier(self, asker: Node) -> None:
        answer = self._couriers.answer(self._membership.voter.committed.number)
        if answer is not None:
            self._wire.send(asker.address, answer)

    def _on_orders(self, message: AskOrders | messages.Orders) -> None:
        """The leader is asked for them, or has answered."""
        if isinstance(message, AskOrders):
            if self._has_orders_of(message.generation) and self._orders is not None:
                self._wire.send(message.sender.address, self._orders)
        elif self._turn is not None and message.generation == self._turn.number:
            self._orders = message

    def _others(self) -> list[Node]:
        members = self._generation.members if self._generation is not None else ()
        return [member for member in members if member.key != self.me.key]

    def _has_orders_of(self, generation: int) -> bool:
        return self._orders is not None and self._orders.generation == generation

    def _ask_for_orders(self) -> None:
        if self._turn is not None and self._generation is not None:
            question = AskOrders(self.me, self._membership.voter.committed.number, self._turn.number)
            self._wire.send(self._generation.leader.address, question)

    # -- agreed saves --------------------------------------------------------------------------------------------------

    def _begin_save(self, ask: AskPause) -> None:
        """On the leader. Where no step has been made there is nothing to save."""
        generation = self._generation
        is_taken = generation is not None and generation.number == ask.generation
        if generation is None or not is_taken or self._ranks is None or not self._ranks.have_stepped:
            self._tell(Paused(ask.generation))
            return
        self._say(f"{ask.reason}: all ranks save at an agreed step")
        names = [member.name for member in generation.members]
        known = self._membership.voter.committed.number
        self._leaders_save = LeadersSave(self.me, known, generation.number, names, ask.reason)
        self._ask_all_to_save(self._leaders_save)

    def _ask_all_to_save(self, save: LeadersSave) -> None:
        question = save.question()
        for member in self._others():
            self._wire.send(member.address, question)
        self._on_ask_save(question)

    def _on_ask_save(self, ask: AskSave) -> None:
        generation = self._generation
        if generation is None or generation.number != ask.generation:
            return
        if self._nodes_save is None:
            self._nodes_save = NodesSave(self.me, self._membership.voter.committed.number, ask.generation)
        mine = self._nodes_save
        if self._turn is not None and not self._quitting and self._ranks is not None:
            mine.prepared = mine.prepared or self._ranks.prepare_save(ask.reason)
            if ask.save_at is not None:
                self._ranks.agree_on_save(ask.save_at)
        self._tell_save_state()

    def _tell_save_state(self) -> None:
        if self._nodes_save is None or self._generation is None:
            return
        state = self._nodes_save.state()
        if self._generation.leader.key == self.me.key:
            self._hear_save_state(self.me.name, state)
        else:
            self._wire.send(self._generation.leader.address, state)

    def _hear_save_state(self, name: str, state: SaveState) -> None:
        save = self._leaders_save
        if save is None:
            return
        if save.hear(name, state):
            self._ask_all_to_save(save)
        if save.done:
            self._leaders_save = None
            self._tell(Paused(save.generation))

    # -- hangs ---------------------------------------------------------------------------------------------------------

    def stand_still(self, turn: Turn, ranks: Sequence[RankProgress]) -> None:
        if self._turn is not turn or self._quitting or self._generation is None:
            return
        said = Standstill(self.me, self._membership.voter.committed.number, turn.number, tuple(ranks))
        if turn.leads:
            self._hear_standstill(said)
        else:
            self._wire.send(self._generation.leader.address, said)

    def _hear_standstill(self, said: Standstill) -> None:
        leaders = self._leaders_standstill
        if leaders is None or self._ranks is None:
            return
        ranks = leaders.hear(said.sender.name, said, time.monotonic())
        if ranks:
            told = AllStandStill(self.me, self._membership.voter.committed.number, said.generation, ranks)
            for member in self._others():
                self._wire.send(member.address, told)
            self._ranks.hung(ranks)

    def _hear_hang(self, told: AllStandStill) -> None:
        if self._turn is not None and self._turn.number == told.generation and self._ranks is not None:
            self._ranks.hung(told.ranks)

    # -- checkpoints from memory ---------------------------------------------------------------------------------------

    def part_written(self, turn: Turn, step: int, files: Sequence[WrittenFile], error: str) -> None:
        if self._turn is turn and self._nodes_parts is not None:
            self._tell_part(self._nodes_parts.written(step, tuple(files), error))

    def published(self, turn: Turn, step: int, error: str) -> None:
        if self._leaders_parts is None or self._leaders_parts.generation != turn.number:
            return
        outcome = self._leaders_parts.settle(step, error)
        for member in self._others():
            self._wire.send(member.address, outcome)
        self._hear_outcome(outcome)

    def couriers(self) -> Mapping[str, str]:
        return self._couriers.known

    def courier_listens(self, address: str) -> None:
        self._couriers.listens(address)

    def _tell_part(self, part: PartSaved) -> None:
        if self._generation is None:
            return
        if self._generation.leader.key == self.me.key:
            self._hear_part(part)
        else:
            self._wire.send(self._generation.leader.address, part)

    def _hear_part(self, part: PartSaved) -> None:
        parts, turn = self._leaders_parts, self._turn
        outcome = parts.outcome_of(part.step) if parts is not None and parts.generation == part.generation else None
        if outcome is not None:
            if part.sender.key != self.me.key:
                self._wire.send(part.sender.address, outcome)
            return
        if parts is None or turn is None or self._ranks is None:
            return
        gathered = parts.hear(part.sender.name, part)
        if gathered is not None and gathered.error:
            self.published(turn, gathered.step, gathered.error)
        elif gathered is not None:
            self._ranks.publish(gathered.step, gathered.files)

    def _hear_outcome(self, outcome: SaveOutcome) -> None:
        if self._nodes_parts is not None and self._ranks is not None and self._nodes_parts.hear(outcome):
            self._ranks.save_settled(outcome.step, outcome.error)
