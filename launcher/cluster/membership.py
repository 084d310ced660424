"""Who is in the run, now: the state machine inside each agent. Events and a clock in, effects out; no network, no
files. `docs/membership.md` describes the protocol.

A node runs a generation (`running.py`), or it follows a guide, or it is its own guide and forms the next generation
(`forming.py`). This file decides which, and when. Where it is wrong about who is alive, that costs time and nothing
else: that two sides never train is kept by `voter.py` and `proposal.py`.

Invariant: the local ranks are stopped (`Quit`) before this node votes for, or enters, another generation, and what it
has voted is durable (`Persist`) before anybody hears of it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterable, Sequence

from launcher.cluster.contacts import Contacts
from launcher.cluster.effects import AskPause, Effect, Enter, GiveUp, Quit
from launcher.cluster.ending import Ending
from launcher.cluster.forming import Forming
from launcher.cluster.messages import (
    Accept,
    AcceptedBy,
    Beat,
    End,
    Guide,
    Join,
    Learn,
    Message,
    Prepare,
    Promise,
    Refuse,
)
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
from launcher.cluster.outbox import Outbox
from launcher.cluster.proposal import Proposal
from launcher.cluster.running import Running
from launcher.cluster.voter import Voter
from launcher.errors import ExitCode

_REFUSED_FOR = 10  # times silence_s; then this node gives up


class Membership:
    """One node's part. Every `on_...` returns what is to be done, in order. After `GiveUp` nothing comes any more."""

    voter_type = Voter
    proposal_type = Proposal

    def __init__(
        self,
        me: Node,
        *,
        seeds: Sequence[str],
        wanted: Wanted,
        timing: Timing,
        identity: Identity,
        rng: random.Random,
        free_port: Callable[[], int],
        durable: Durable | None = None,
    ) -> None:
        """seeds: addresses where nodes may be found, the same on each, in the order in which they form generation 1."""
        self.voter = self.voter_type(me, durable)
        self.me = self.voter.me
        self.contacts = Contacts(self.me, seeds, rng, timing.silence_s)
        self.contacts.follow_order_of(self.voter.committed)
        self.wanted, self._timing, self._identity, self._free_port = wanted, timing, identity, free_port
        self._outbox = Outbox(self.me, self.voter, to_self=self._on_current)
        self._forming = Forming(
            self._outbox,
            self.voter,
            self.contacts,
            wanted=wanted,
            timing=timing,
            rng=rng,
            proposal_type=self.proposal_type,
            on_chosen=self._learn,
        )
        self._run: Running | None = None
        self._ending: Ending | None = None
        self._leaving: LeaveAsked | None = None
        self._leave_by = 0.0
        # While in no generation:
        self._guide = ""  # the address of the node that is followed; our own while we form a generation; or nobody's
        self._guide_heard = False
        self._guide_at = 0.0
        self._guide_waits_for = ""
        self._idle_since = 0.0
        self._reason = "start"

    @property
    def ended(self) -> bool:
        return self._outbox.closed

    @property
    def running(self) -> Generation | None:
        return self._run.generation if self._run else None

    # ---- events ----

    def on_start(self, now: float) -> list[Effect]:
        self._outbox.now = self._idle_since = now
        self._outbox.persist()
        self._seek()
        return self._outbox.take()

    def on_message(self, message: Message, now: float) -> list[Effect]:
        self._outbox.now = now
        self.contacts.mark_heard(message.sender.address)
        known = self.voter.committed.number
        if self.ended:
            return []
        if self._ending:
            self._ending.hear(message)
        elif isinstance(message, End):
            self._on_end(message)
        elif isinstance(message, Learn):
            self._learn(message.generation)
        elif message.known > known:
            self._send_join(message.sender.address)  # whatever it is about, we are behind: be told first
        else:
            if message.known < known:
                self._outbox.send(message.sender.address, Learn(self.me, known, self.voter.committed))
            self._on_current(message)
        return self._outbox.take()

    def on_tick(self, now: float) -> list[Effect]:
        """To be called every heartbeat_s, or more often."""
        self._outbox.now = now
        if self.ended:
            return []
        if self._ending:
            self._tell_end(self._ending)
        elif self._leaving and now >= self._leave_by:
            self._give_up(ExitCode.STOPPED, f"left without the others' consent: {self._leaving.reason}")
        elif self._run:
            self._watch(self._run)
        elif self._is_refused():
            self._give_up(ExitCode.REFUSED, self.waiting_for())
        elif now - self._idle_since > self._timing.bound_s:
            self._give_up(ExitCode.STOPPED, f"waited {self._timing.bound_s:g} s: {self.waiting_for()}")
        elif self._forming.active:
            self._form()
        else:
            self._follow_on()
        return self._outbox.take()

    def on_unreachable(self, address: str, now: float) -> list[Effect]:
        """The connection to `address` was refused or reset: no agent is there."""
        self._outbox.now = now
        if self.ended:
            return []
        if self._ending:
            self._ending.forget(address)
        elif self._run:
            self._lose(self._run, self._run.watched_at(address), "connection refused or reset")
        else:
            self.contacts.mark_lost(address, now)
            self._forming.forget(address)
            if self._guide == address:
                self._seek()
            else:
                self._forming.advance()
        return self._outbox.take()

    def on_refused(self, address: str, reason: str, now: float) -> list[Effect]:
        """The agent at `address` does not take our words: it has another token, or is in another run."""
        self._outbox.now = now
        self.contacts.mark_refusing(address, reason, now)
        return []

    def on_local(self, event: LocalEvent, now: float) -> list[Effect]:
        self._outbox.now = now
        run = self._run
        if self.ended or self._ending:
            return []
        if isinstance(event, LocalFailed) and not event.retryable:
            # Also of a generation that is over: the others' ranks may have failed of it, and said so, before its cause
            # was known here.
            members = self.voter.committed.members
            others = members if run is None or run.is_leader else (run.leader,)
            self._end(event.exit_code, f"{self.me.name}: {event.reason}", others)
        elif isinstance(event, LeaveAsked):
            self._leaving, self._leave_by, self._forming.leaving = event, now + self._timing.pause_s, True
            if run:
                self._watch(run)
            elif self.wanted.fixed:
                self._give_up(ExitCode.STOPPED, event.reason)
        elif run and event.generation == run.generation.number:
            match event:
                case LocalFailed():
                    self._step_out(f"{self.me.name}: {event.reason}")
                    self._seek()
                case Paused() if run.pause_by is not None:
                    self._change()
                case LocalFinished():
                    run.finished.add(self.me.name)
                    self._watch(run)
        return self._outbox.take()

    def on_claim(self, base: int, holder: Generation, now: float) -> list[Effect]:
        """The claim for `base` has been read back: it belongs to `holder`, and always will."""
        self._outbox.now = now
        if not self.ended:
            self._forming.on_claim(base, holder)
        return self._outbox.take()

    # ---- messages from those who know as much as we do, or less ----

    def _on_current(self, message: Message) -> None:
        match message:
            case Beat():
                self._on_beat(message)
            case Join():
                self._on_join(message)
            case Guide():
                self._on_guide(message)
            case Prepare():
                if self.voter.promise(message.number, message.base):
                    self._vote_away(message.sender)
                    known, accepted = self.voter.committed.number, self.voter.durable.accepted
                    port, leaving = self._free_port(), self._leaving is not None
                    self._outbox.reply(message, Promise(self.me, known, message.number, accepted, port, leaving))
            case Accept():
                if self.voter.accept(message.ballot, message.generation):
                    self._vote_away(message.sender)
                    self._outbox.reply(message, AcceptedBy(self.me, self.voter.committed.number, message.ballot))
            case Promise():
                self._forming.on_promise(message)
            case AcceptedBy():
                self._forming.on_vote(message)
            case Refuse() if self._run is None and message.sender.address == self._guide:
                self._give_up(ExitCode.REFUSED, f"{message.sender} refuses this node: {message.reason}")

    def _on_beat(self, beat: Beat) -> None:
        run = self._run
        if run is None or beat.generation != run.generation.number:
            if beat.generation == self.voter.committed.number:  # its sender believes that we are still in it
                self._outbox.reply(beat, self._pointer())
            return
        run.hear(beat, self._outbox.now)
        if run.is_leader:
            self._outbox.reply(beat, self._beat(run))

    def _on_join(self, join: Join) -> None:
        run = self._run
        if not (run.is_leader if run else self._forming.active):
            self._outbox.reply(join, self._pointer())
            return
        differences = join.identity.differences(self._identity)
        if differences:
            self._outbox.reply(join, Refuse(self.me, self.voter.committed.number, "; ".join(differences)))
            ours = "; ".join(self._identity.differences(join.identity))
            self._outbox.say(f"{join.sender} was refused: {ours}")
            self._forming.refused[join.sender.name] = ours
            return
        is_out = run is not None and run.is_out(join, self._outbox.now, self._timing.silence_s)
        is_time = False
        if is_out or run is None or not run.has_name(join.sender.name):  # else it said so before it entered
            is_time = self._forming.hear(join)
        if is_out:
            self._step_out(f"{join.sender.name} is out of it")
            self._seek()
        self._outbox.reply(join, self._pointer())
        if is_time:
            self._forming.advance()

    def _on_guide(self, guide: Guide) -> None:
        if guide.known < self.voter.committed.number:
            return
        sender = guide.sender.address
        run = self._run
        if run:
            if not guide.is_call:
                return
            if run.is_out(guide, self._outbox.now, self._timing.silence_s) and (
                run.is_leader or guide.sender.name == run.leader.name
            ):
                self._step_out(guide.reason if not run.is_leader else f"{guide.sender.name} is out of it")
                self._seek()
            else:
                self._outbox.reply(guide, self._pointer())
        elif sender == self._guide:
            self._on_word_of_guide(guide)
        elif guide.to == sender:
            waited = self._outbox.now - self._guide_at >= self._timing.heartbeat_s
            unanswered = waited and not self._forming.active and not self._guide_heard
            if guide.running or unanswered or self.contacts.is_before(sender, self._guide):
                self.contacts.mark_found(sender)
                self._follow(sender)
        elif self._forming.active and guide.to != self.me.address:
            better = guide.running or self.contacts.is_before(guide.to, self.me.address)
            if better and self._can_follow(guide.to):
                self._follow(guide.to)

    def _on_word_of_guide(self, guide: Guide) -> None:
        first, self._guide_heard, self._guide_at = not self._guide_heard, True, self._outbox.now
        self._guide_waits_for = guide.waits_for
        if guide.to == self._guide:
            if guide.running:
                self._idle_since = self._outbox.now  # a spare: the run goes on without us, no reason to give up
            if first:
                self._send_join(self._guide)
        elif guide.to and self._can_follow(guide.to):
            self._follow(guide.to)
        else:  # it follows nobody, or somebody whom we cannot reach
            self.contacts.pass_over(self._guide, self._outbox.now)
            self._seek()

    # ---- in a generation ----

    def _enter(self, generation: Generation) -> None:
        self._run = Running(generation, self.me, self._outbox.now)
        self._forming.stop()
        self._forming.forget_members(generation)
        self.contacts.mark_all_found(generation)
        self._guide = generation.leader.address
        self._outbox.add(Enter(generation))
        self._watch(self._run)

    def _watch(self, run: Running) -> None:
        silent = run.silent(self._outbox.now, self._timing.silence_s)
        if silent:
            self._lose(run, silent, f"silent for {self._timing.silence_s:g} s")
        elif not run.is_leader:
            self._outbox.send(run.leader.address, self._beat(run))
        elif run.all_finished:
            self._end(ExitCode.FINISHED, "training has reached its planned end", run.generation.members)
        else:
            self._watch_pause(run)

    def _watch_pause(self, run: Running) -> None:
        """On the leader: whether the generation is to be changed, and whether the agreed save takes too long."""
        leaving = sorted(run.leaving | ({self.me.name} if self._leaving else set()))
        if run.pause_by is None:
            reason = f"{', '.join(leaving)} has to go" if leaving else self._reason_to_grow(run)
            if reason:
                self._reason = reason
                run.pause_by = self._outbox.now + (self._timing.pause_s if leaving else self._timing.join_pause_s)
                run.pausing_for_leave = bool(leaving)
                self._outbox.add(AskPause(run.generation.number, reason))
        elif leaving and not run.pausing_for_leave:
            run.pausing_for_leave = True
            run.pause_by = min(run.pause_by, self._outbox.now + self._timing.pause_s)
        elif self._outbox.now >= run.pause_by:
            self._change()

    def _reason_to_grow(self, run: Running) -> str:
        self._forming.forget_silent()
        if len(run) == self.wanted.max_nodes:
            return ""
        self._call_missing()
        joining = sorted(name for name, join in self._forming.ready().items() if not join.leaving)
        return f"{', '.join(joining)} wants to join" if joining else ""

    def _change(self) -> None:
        self._step_out(self._reason)
        self._seek()

    def _lose(self, run: Running, names: Collection[str], how: str) -> None:
        lost = run.members_named(names)
        if lost:
            for node in lost:
                self.contacts.mark_lost(node.address, self._outbox.now)
            self._step_out(f"lost {', '.join(map(str, lost))}: {how}")
            self._seek()

    def _step_out(self, reason: str) -> None:
        """Out of the generation for good. The caller says where to go next."""
        if self._run is None:
            return
        number = self._run.generation.number
        self._run = None
        self._outbox.add(Quit(number, reason))
        self._idle_since, self._reason = self._outbox.now, reason
        if self._leaving and self.wanted.fixed:  # no generation can be formed without us: do not hold up the exit
            self._give_up(ExitCode.STOPPED, self._leaving.reason)

    # ---- in none: whom to follow ----

    def _seek(self) -> None:
        address = self.contacts.first(self._outbox.now)
        if address is not None:
            self._follow(address)
        else:  # all refuse: no hurry, the next tick tries again
            self._follow(self.contacts.next_to_try(), at_once=False)

    def _follow(self, address: str, at_once: bool = True) -> None:
        if self.ended:
            return
        self._forming.stop()
        self._guide, self._guide_heard, self._guide_at = address, False, self._outbox.now
        if address == self.me.address:
            self._forming.begin(self._reason, self._idle_since)
            self._call_missing()
            self._forming.advance()
        elif at_once:
            self._send_join(address)

    def _can_follow(self, address: str) -> bool:
        if address == self.me.address:
            return self.contacts.may_form
        return not self.contacts.is_passed_over(address, self._outbox.now)

    def _follow_on(self) -> None:
        if self._outbox.now - self._guide_at > self._timing.silence_s:
            self.contacts.mark_lost(self._guide, self._outbox.now)
            self._seek()
        elif self._guide:
            self._send_join(self._guide)

    def _vote_away(self, proposer: Node) -> None:
        """What comes before the answer to a proposer: out of the running generation, and the vote made durable."""
        if self._run:
            self._step_out(f"{proposer.name} forms another generation")
            self._follow(proposer.address)
        self._outbox.persist()

    def _form(self) -> None:
        self._forming.on_tick()
        if self._forming.is_stuck():
            self.contacts.pass_over(self.me.address, self._outbox.now)
            self._seek()
        elif self._leaving and self._forming.all_leave():
            self._give_up(ExitCode.STOPPED, f"all nodes leave: {self._leaving.reason}")
        elif self._forming.active:
            self._call_missing()
            self._forming.advance()

    def waiting_for(self) -> str:
        """While in no generation: who is missing, or what."""
        if self._forming.active:
            return self._forming.waiting_for()
        if self._guide_heard:
            return f"{self._guide} answers: {self._guide_waits_for or 'it has not formed a generation with this node'}"
        refusal, _ = self.contacts.refusal(self._guide)
        if refusal:
            return f"{self._guide} {refusal}"
        newest = self.voter.committed
        left_out = bool(newest.members) and not newest.has(self.me)
        why = f"; {newest} has gone on without this node and may be training" if left_out else ""
        return f"{self._guide or 'nobody known'} does not answer{why}"

    def _is_refused(self) -> bool:
        """For so long that it is no matter of who came first."""
        if self._forming.active or self._guide_heard:
            return False
        refusal, since = self.contacts.refusal(self._guide)
        return bool(refusal) and self._outbox.now - since > _REFUSED_FOR * self._timing.silence_s

    def _learn(self, generation: Generation) -> None:
        if not self.voter.learn(generation):
            return
        self._step_out(f"generation {generation.number} has taken its place")
        if self.ended:
            return
        self._forming.stop()
        self.contacts.follow_order_of(generation)
        self._outbox.persist()
        if self._leaving and not generation.has(self.me):
            self._give_up(ExitCode.STOPPED, self._leaving.reason)
        elif self.voter.may_enter(generation):
            self._enter(generation)
        else:
            self._seek()

    # ---- the end ----

    def _end(self, exit_code: int, reason: str, untold: Iterable[Node]) -> None:
        self._step_out(reason)
        untold = [*untold, *self._forming.followers()]  # who waits to be let in, too
        end = End(self.me, self.voter.committed.number, exit_code, reason)
        self._ending = Ending(end, untold, self._outbox, until=self._outbox.now + self._timing.silence_s)
        self._tell_end(self._ending)

    def _on_end(self, end: End) -> None:
        run = self._run
        self._outbox.reply(end, End(self.me, self.voter.committed.number, end.exit_code, end.reason))
        members = run.generation.members if run and run.is_leader else ()
        self._end(end.exit_code, end.reason, [member for member in members if member.key != end.sender.key])

    def _tell_end(self, ending: Ending) -> None:
        if ending.is_done:
            self._give_up(ending.end.exit_code, ending.end.reason)
        ending.tell()

    def _give_up(self, exit_code: int, reason: str) -> None:
        if self._run:
            number, self._run = self._run.generation.number, None
            self._outbox.add(Quit(number, reason))
        self._outbox.add(GiveUp(exit_code, reason))

    def _call_missing(self) -> None:
        """Members of the newest generation may not have noticed that it is over, others not know that there is one."""
        here = self._forming.addresses()
        if self._run:
            here.update(member.address for member in self._run.generation.members)
        for address in self.contacts.known:
            if address not in here:
                self._outbox.send(address, self._pointer())

    def _pointer(self) -> Guide:
        known = self.voter.committed.number
        if self._run:
            return Guide(self.me, known, self._run.leader.address, running=True, reason="")
        to = self._guide if self._forming.active or self._guide_heard else ""  # what does not answer us is no advice
        waits_for = self._forming.recent_words() if self._forming.active else self._guide_waits_for
        return Guide(self.me, known, to, running=False, reason=self._reason, waits_for=waits_for)

    def _beat(self, run: Running) -> Beat:
        number, leaving = run.generation.number, self._leaving is not None
        return Beat(self.me, self.voter.committed.number, number, leaving, self.me.name in run.finished)

    def _send_join(self, address: str) -> None:
        heard = address == self._guide and self._guide_heard
        known, voted = self.voter.committed.number, self.voter.voted
        self._outbox.send(address, Join(self.me, known, voted, heard, self._leaving is not None, self._identity))
