"""The supervisor: takes turn after turn until the run has ended, and tells the truth in its exit code.

What to do is decided elsewhere (`lifecycle.py` inside a generation, `policy/restart.py` after a failure, the crew for
all nodes, `diagnose/` for causes); here it is carried out and recorded.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from launcher.agent.completion import proof_of_completion
from launcher.agent.console import Console
from launcher.agent.crew import Crew, Orders, RunOver, Turn
from launcher.agent.early_imports import EarlyImports
from launcher.agent.events import EventLog
from launcher.agent.forkserver_client import ForkServerError
from launcher.agent.generation import RankProcess, free_port
from launcher.agent.hangs import Hang, Hangs
from launcher.agent.incident import Incident, IncidentRecorder
from launcher.agent.lifecycle import (
    Action,
    Bound,
    Ending,
    KillGroup,
    Lifecycle,
    RankExit,
    StopAsked,
    Tell,
    WaitsAt,
    signal_name,
)
from launcher.agent.past import read_failures, read_past
from launcher.agent.rank_group import RankGroup
from launcher.agent.recorder import RunRecorder
from launcher.agent.resume import newest_step
from launcher.agent.run_settings import RunSettings
from launcher.agent.stacks import flight_recorder
from launcher.agent.tiers import Tiers
from launcher.checkpoint.identity import FROZEN_BY_STATE
from launcher.cluster.messages import WrittenFile
from launcher.diagnose.evidence import name_exit
from launcher.errors import ExitCode, UserError, may_pass, unusable_folder
from launcher.event_loop import CalledOff, EventLoop, StopSignals
from launcher.fanout.head import Head
from launcher.link import Message
from launcher.plan.launch_files import hostfile_text
from launcher.plan.spec import RankSpec
from launcher.policy.restart import Action as PolicyAction
from launcher.policy.restart import Decision, FailedAttempt, decide
from launcher.progress_record import RankProgress

_TO_BE_CONTINUED = (ExitCode.STOPPED, ExitCode.STOPPED_143)
_RESCUE_S = 10.0  # for a state that is in memory only; after an agreed save there is none


class Supervisor:
    """One start of the run on this node. The crew's `Ranks`."""

    def __init__(
        self,
        settings: RunSettings,
        imports: EarlyImports,
        recorder: RunRecorder,
        incidents: IncidentRecorder,
        signals: StopSignals,
        loop: EventLoop,
        crew: Crew,
        head: Head | None = None,
    ) -> None:
        """`head`: what has started the other nodes' agents, where this node has."""
        self.settings = settings
        self._imports = imports
        self.recorder = recorder
        self.progress = recorder.progress
        self.started_at_step = 0
        self.led = crew.alone  # whether this node has led the latest turn
        self._events: EventLog = recorder.events
        self._console: Console = recorder.console
        self._incidents = incidents
        self._lifecycle = Lifecycle(range(1), grace_s=settings.grace_s)
        self._turn: Turn | None = None
        self._all_started = False
        self._has_started = False
        self._resumed_at = 0  # step that the latest attempt went on from
        self._stop_source: str | None = None
        self._num_signals = 0
        self._heeded = False
        self._history: list[FailedAttempt] = []
        self._loop = loop
        self._crew = crew
        self._head = head
        self._signals = signals
        self._group: RankGroup | None = None
        self._hang: Hang | None = None  # of this attempt
        self._hangs = Hangs(
            loop,
            recorder.events,
            recorder.console.say,
            settings.hang_seconds,
            settings.work_folder.logs,
            flight_recorder(settings.output_dir, settings.work_folder.logs, settings.environ, recorder.events.node)
            if settings.spec.device == "cuda"
            else None,
        )
        training = settings.spec.config.get("training", {})
        self._tiers = Tiers(
            settings.spec,
            loop,
            crew,
            recorder,
            settings.environ,
            settings.token,
            settings.work_folder.logs,
            settings.scratch.path,
            every_steps=settings.every_steps,
            keep=settings.keep,
            frozen={key: training.get(key) for key in FROZEN_BY_STATE},
            tell=self._tell_ranks,
        )

    # -- the run -------------------------------------------------------------------------------------------------------

    def run(self) -> ExitCode:
        """Until the run has ended. Whatever happens, nothing that was started is left behind."""
        settings = self.settings
        self._loop.deliver(self._signals, self._on_signal)
        self._loop.on_tick = self._tick
        group = self._group = RankGroup(
            self._loop,
            self._console,
            settings.environ,
            settings.token,
            settings.work_folder.logs,
            fork=settings.fork,
            template=self._imports.template,
            server=self._imports.server,
            spared=self._own_pids,
            tell_phase=self.recorder.phase,
        )
        try:
            over = self._turns(group)
            if over.exit_code in _TO_BE_CONTINUED and self._num_signals < 2:
                rescued = self._tiers.rescue(_RESCUE_S)
                if rescued is not None:
                    over = replace(over, reason=f"{over.reason}; step {rescued} was saved from memory")
        except UserError as error:
            self._events.emit("run_ended", exit_code=error.exit_code, reason=str(error), steps=0, goodput=0.0)
            raise
        except OSError as error:
            passing = may_pass(error) or self._has_started
            code = settings.stop_exit_code if passing else ExitCode.WRONG_INPUT
            steps = self.progress.best_step
            self._events.emit("run_ended", exit_code=int(code), reason=str(error), steps=steps, goodput=0.0)
            if passing and not may_pass(error):
                raise unusable_folder(error, code, worked_before=True) from error
            raise
        finally:
            group.end()
            self._group = None
            self._tiers.close()
            self._hangs.close()
            self._say(settings.work_folder.close())
            settings.scratch.close()
            self._crew.close()
            self._loop.close()
            self.recorder.close()
        self._events.emit(
            "run_ended",
            exit_code=int(over.exit_code),
            reason=over.reason,
            steps=self.progress.best_step,
            goodput=self.progress.goodput(time.monotonic()),
        )
        self._console.say(f"{over.reason} (exit code {int(over.exit_code)})")
        return over.exit_code

    def _own_pids(self) -> list[int]:
        """Processes that are not the ranks' or the fork server's."""
        head = [self._head.pid] if self._head is not None and self._head.pid is not None else []
        return [*head, *self._tiers.pids]

    def _turns(self, group: RankGroup) -> RunOver:
        while True:
            turn = self._crew.next_turn()
            if isinstance(turn, RunOver):
                return turn
            self._take(group, turn)

    def _take(self, group: RankGroup, turn: Turn) -> None:
        self._turn, self._all_started, self.led = turn, False, turn.leads
        self._events.generation = turn.number
        self._loop.clear_bounds()  # a turn that was withdrawn before its ranks were started has left one
        self._lifecycle = Lifecycle(turn.ranks, grace_s=self.settings.grace_s, alone=self._crew.alone)
        incident = None
        try:
            orders = self._orders(turn)
            if orders is not None:
                incident = self._attempt(group, turn, orders)
        except UserError as error:
            group.kill()
            group.wait_for_the_killed()
            group.close()
            self._crew.ranks_gone(turn)
            if self._crew.alone:
                raise
            self._crew.give_up(turn, ExitCode(error.exit_code), str(error))
            return
        if self._lifecycle.undead:
            if incident is not None:
                self._decide(turn.number, incident)
            self._crew.drop_out(*self._stuck())
            return
        self._crew.ranks_gone(turn)
        self._say(self.settings.work_folder.show_logs())
        self._report(turn, incident)

    def _say(self, trouble: str) -> None:
        if trouble:
            self._console.say(trouble)

    def _orders(self, turn: Turn) -> Orders | None:
        """None where the turn is over before there were any."""
        try:
            return self._crew.orders(turn, partial(self._make_orders, turn))
        except CalledOff:
            return None

    def _make_orders(self, turn: Turn) -> Orders:
        """On the leader: which checkpoint to continue from, and everything else that ranks are told. Raises CalledOff
        once the turn is over: what follows on it is another leader's to do."""
        settings = self.settings
        resume = self._tiers.resume(turn, partial(self._is_called_off, turn))
        fired = self.recorder.fired_drills | read_past(settings.output_dir).fired_drills  # on other nodes, too
        failures = read_failures(settings.output_dir)
        spec = replace(
            settings.spec,
            num_faults=failures.num_faults,
            trained_s=failures.trained_s,
            generation=turn.number,
            num_nodes=turn.num_nodes,
            global_batch_size=resume.global_batch_size or settings.spec.global_batch_size,
            resume_from=resume.path,
            resume_tier=resume.tier,
            resume_snapshots=asdict(resume.snapshots) if resume.snapshots is not None else None,
            peers=turn.num_nodes > 1 and self._tiers.has_ring,
            drills=tuple(drill for drill in settings.drills if drill.number not in fired),
        )
        slots: dict[str, int] = {}  # two nodes may share a machine; DeepSpeed wants each address once
        for seat in turn.seats:
            slots[seat.ip] = slots.get(seat.ip, 0) + seat.num_ranks
        hostfile = settings.output_dir / "ftlaunch" / "launch" / "hostfile"
        hostfile.write_text(hostfile_text(list(slots.items())), "utf-8")
        return Orders(spec.to_json(), resume.step)

    def _attempt(self, group: RankGroup, turn: Turn, orders: Orders) -> Incident | None:
        """None when the ranks ended as asked, or because the turn is over; else what went wrong, already recorded."""
        if not self._has_started:
            self._has_started, self.started_at_step = True, orders.resume_step
            self.progress.best_step = orders.resume_step
        self.recorder.attempt_begins(time.monotonic(), turn.ranks)
        self._incidents.attempt_begins(turn.number)
        self._tiers.begin(turn)
        self._hang = None
        self._hangs.begin(turn)
        try:
            started = self._start_ranks(group, turn, orders)
        except ForkServerError as failure:
            group.kill()
            group.wait_for_the_killed()
            group.close()
            self._tiers.end(stepped=False, failure=None)
            self._crew.failed(turn, str(failure))
            return self._loop.aside(partial(self._incidents.fork_server_failed, turn.number, failure))
        if started:
            while not self._lifecycle.over and not self._lifecycle.undead:
                self._loop.wait()
                if self._hangs.are_heard_of:
                    self._end_what_hangs(group, turn)
        else:
            group.kill()
            group.wait_for_the_killed()
        self._hangs.watch.end()
        self._loop.clear_bounds()
        first = self._lifecycle.first_failure
        self._tiers.end(stepped=self._lifecycle.stepped, failure=first.exit if first is not None else None)
        self.recorder.attempt_ends()
        incident = self._look_for_a_cause(group, turn)
        group.close()
        self.settings.scratch.clear_after_ranks()
        return incident

    def _end_what_hangs(self, group: RankGroup, turn: Turn) -> None:
        """Where the rank that is behind is another node's, that node ends the attempt for all."""
        hang = self._hangs.look_into(turn, group.processes) if not self._lifecycle.killing else None
        if hang is None or not hang.is_ours or self._lifecycle.killing:
            return
        self._hang = hang
        culprit = hang.finding.culprit
        self._carry_out(self._lifecycle.on_hang(culprit.rank if culprit is not None else turn.ranks.start))

    def _look_for_a_cause(self, group: RankGroup, turn: Turn) -> Incident | None:
        failure = self._lifecycle.first_failure
        if failure is None or failure.exit is None or self._lifecycle.ending() is not Ending.FAILED:
            return None
        over_elsewhere = self._crew.withdrawn(turn)
        ended = name_exit(failure.exit.code, failure.exit.signal) if self._hang is None else "hung"
        if not self._lifecycle.undead:
            self._crew.failed(turn, f"rank {failure.rank} {ended}")
        look = partial(
            self._incidents.ranks_failed,
            turn.number,
            self._lifecycle,
            group.processes,
            self.recorder.input_error,
            hang=self._hang,
        )
        # Where another node had failed first, ranks here were its victims; unless their own fault is one that stays.
        return self._loop.aside(partial(look, only_if_it_stays=over_elsewhere))

    def _start_ranks(self, group: RankGroup, turn: Turn, orders: Orders) -> bool:
        """False when the attempt was called off before all ranks were started. Raises ForkServerError."""
        settings = self.settings
        port = turn.master_port
        if self._crew.alone:
            port = free_port(turn.master_addr, turn.master_port)
        assert port is not None  # membership's generations have one
        name = "spec.json" if self._crew.alone else f"spec-{self._events.node}.json"
        spec = self._tiers.with_own_folder(turn, RankSpec.from_json(orders.spec), partial(self._is_called_off, turn))
        if spec is None:
            return False
        spec_path = settings.work_folder.write_spec(name, spec.to_json())
        self._events.emit(
            "generation_started",
            world_size=turn.world_size,
            nodes=[seat.name for seat in turn.seats],
            master=f"{turn.master_addr}:{port}",
            reason=turn.reason,
        )
        where = spec.resume_from if spec.resume_tier == "disk" else "memory"
        origin = f"from step {orders.resume_step} ({where})" if spec.resume_from else "from the beginning"
        nodes = "" if self._crew.alone else f" on {turn.num_nodes} node(s) ({', '.join(s.name for s in turn.seats)})"
        self._console.say(f"attempt {turn.number}: {turn.world_size} rank(s){nodes}, {origin}")
        self._resumed_at = orders.resume_step
        self._hangs.watch.watch(lambda: group.processes, partial(self._on_standstill, turn))
        self._all_started = group.start(
            turn,
            spec_path,
            port,
            memory_of=self._memory_of,
            variables=self._hangs.variables(turn.number),
            abandoned=lambda: self._is_called_off(turn),
            on_message=self._on_message,
            on_exit=self._on_exit,
        )
        return self._all_started

    def _memory_of(self, rank: int) -> Sequence[int]:
        return self._hangs.watch.record_of(rank), *self._tiers.slots_of(rank)

    def _is_called_off(self, turn: Turn) -> bool:
        stopped = self._crew.alone and self._stop_source is not None
        return stopped or self._lifecycle.killing or self._crew.withdrawn(turn)

    # -- after a turn --------------------------------------------------------------------------------------------------

    def _report(self, turn: Turn, incident: Incident | None) -> None:
        lifecycle = self._lifecycle
        ending = lifecycle.ending() if lifecycle.over else Ending.ABANDONED
        if incident is None and ending is Ending.FINISHED:
            try:
                missing = self._prove(turn) if turn.leads else None
            except CalledOff:
                return
            if missing is None:
                self._crew.finished(turn, f"training is complete at step {self.progress.best_step}")
                return
            self._console.say(f"the ranks say that they finished, but {missing}")
            self._crew.failed(turn, "the planned end is not proven")
            incident = self._loop.aside(partial(self._incidents.unfinished, turn.number))
        if incident is not None:
            self._react(turn, incident)
        elif ending is Ending.STOPPED:
            self._crew.saved(turn, lifecycle.save_at)
        elif ending is not Ending.WITHDRAWN and ending is not Ending.FAILED:
            latest = newest_step(self.settings.output_dir)
            kept = f"the latest checkpoint is of step {latest}" if latest else "there is no checkpoint yet"
            self._crew.abandoned(turn, kept)

    def _prove(self, turn: Turn) -> str | None:
        """What is missing of the planned end. Reads every byte of final/. Raises CalledOff where another generation is
        at work by now: what it finds there is that one's."""
        prove = partial(proof_of_completion, self.settings.output_dir)
        missing = self._loop.aside(prove, lambda: not self._crew.goes_on(turn))
        if not self._crew.goes_on(turn):
            raise CalledOff
        return missing

    def _react(self, turn: Turn, incident: Incident) -> None:
        """To a failure on this node: try again after a pause, or end the run."""
        decision = self._decide(turn.number, incident)
        if decision.action is PolicyAction.STOP:
            assert decision.exit_code is not None  # decide() gives one with every STOP
            stopped = decision.exit_code is ExitCode.STOPPED
            code = self.settings.stop_exit_code if stopped else decision.exit_code
            # The screen of the incident is shown here; the other nodes have nothing but the reason.
            reason = decision.reason if self._crew.alone else incident.message or decision.reason
            self._crew.give_up(turn, code, reason)
        else:
            self._crew.failed(turn, incident.fault_class)
            self._pause(decision.delay_s)

    def _stuck(self) -> tuple[ExitCode, str]:
        ranks = ", ".join(map(str, self._lifecycle.undead))
        what = f"rank {ranks} does not die of SIGKILL (stuck in a driver or on a dead file system)"
        return self.settings.stop_exit_code, f"{what}: nothing more is started on this node; run it again on another"

    def _decide(self, generation: int, incident: Incident) -> Decision:
        reached_step = max(self._lifecycle.reached_step, self.started_at_step)
        at_step = max(self._lifecycle.reached_step, self._resumed_at) if self._lifecycle.trained else None
        self._history.append(
            FailedAttempt(
                generation,
                incident.fault_class,
                incident.retryable,
                reached_step,
                at_step=at_step,
                input_error_code=incident.input_error_code,
            )
        )
        self.progress.faults.append(incident.label or incident.fault_class)
        decision = decide(
            self._history,
            max_without_progress=self.settings.max_without_progress,
            backoff_s=self.settings.backoff_s,
            started_at_step=self.started_at_step,
        )
        self._events.emit(
            "decision",
            action=decision.action.value,
            reason=decision.reason,
            inputs={
                "class": incident.fault_class,
                "retryable": incident.retryable,
                "reached_step": reached_step,
                "at_step": at_step,
                "failed_attempts": len(self._history),
                "without_progress": decision.without_progress,
                "max_without_progress": self.settings.max_without_progress,
                "delay_seconds": decision.delay_s,
            },
        )
        self._incidents.show(incident, decision, self._console)
        return decision

    def _pause(self, delay_s: float) -> None:
        """Wait before a restart, unless asked to stop meanwhile."""
        past: list[bool] = []
        self._loop.set_bound("pause", delay_s, lambda: past.append(True))
        while self._stop_source is None and not self._crew.over() and not past:
            self._loop.wait()
        self._loop.clear_bounds()

    # -- what the crew asks (`Ranks`) ----------------------------------------------------------------------------------

    @property
    def have_stepped(self) -> bool:
        return self._lifecycle.stepped

    def withdraw(self, reason: str) -> None:
        self._carry_out(self._lifecycle.withdraw(reason))

    def prepare_save(self, reason: str) -> bool:
        if self._all_started:
            self._carry_out(self._lifecycle.prepare_save(reason))
        return self._all_started

    def agree_on_save(self, step: int) -> None:
        self._carry_out(self._lifecycle.agree_on_save(step))

    def publish(self, step: int, files: Sequence[WrittenFile]) -> None:
        self._tiers.publish(step, files)

    def save_settled(self, step: int, error: str) -> None:
        self._tiers.settled(step)
        self._tell_ranks("durable", step=step, error=error)

    def hung(self, ranks: Sequence[RankProgress]) -> None:
        self._hangs.hear(ranks)

    def _tell_ranks(self, kind: str, **fields: Any) -> None:
        if self._group is not None:
            self._group.tell(kind, **fields)

    # -- what happens --------------------------------------------------------------------------------------------------

    def _on_message(self, process: RankProcess, message: Message) -> None:
        if message["kind"] == "may_commit" and self._turn is not None:
            reason = self._crew.may_commit(self._turn)
            process.link.send("commit", allowed=not reason, reason=reason)
            return
        self._carry_out(self._lifecycle.on_message(process.rank, message))
        self.recorder.message(process.rank, message)
        self._tiers.on_message(process.rank, message)
        if self._crew.alone and self._lifecycle.stop_source is not None:
            self._note_stop(self._lifecycle.stop_source)

    def _on_exit(self, process: RankProcess, exit_: RankExit) -> None:
        self.recorder.rank_exited(process.rank, process.pid, exit_, self._lifecycle.ranks[process.rank].step)
        self._carry_out(self._lifecycle.on_exit(process.rank, exit_))

    def _on_signal(self, number: int) -> None:
        source = signal_name(number)
        self._num_signals += 1  # those that reach a rank count for nothing here: Slurm sends one to everybody
        if self._crew.alone:
            self._carry_out(self._lifecycle.on_stop_request(source))
        self._note_stop(source)
        if self._num_signals > 1:
            self._crew.leave(source, at_once=True)

    def _on_standstill(self, turn: Turn, ranks: Sequence[RankProgress]) -> None:
        is_stopping = self._crew.alone and self._lifecycle.stop_source is not None  # which has a bound of its own
        if not self._lifecycle.killing and not is_stopping:
            self._crew.stand_still(turn, ranks)

    def _on_bound(self, name: str) -> None:
        self._carry_out(self._lifecycle.on_bound(name))

    def _note_stop(self, source: str) -> None:
        if self._stop_source is None:
            self._stop_source = source
            self._events.emit("notice", source=source, deadline=None)
            self._console.say(f"{source}: saving at an agreed step, then stopping (once more: stop at once)")
            self._crew.leave(source, at_once=False)

    def _carry_out(self, actions: Sequence[Action]) -> None:
        group = self._group
        assert group is not None  # messages, exits and signals are only heard while the group is there
        for action in actions:
            if isinstance(action, Tell):
                group.tell(action.kind, **action.fields)
            elif isinstance(action, Bound) and (action.name != "killed" or group.runs):
                self._loop.set_bound(action.name, action.seconds, partial(self._on_bound, action.name))
            elif isinstance(action, StopAsked):
                self._note_stop(action.source)
            elif isinstance(action, WaitsAt):
                self._crew.waits_at(action.step)
            elif isinstance(action, KillGroup) and group.kill():
                self._events.emit("group_killed", reason=action.reason)

    def _tick(self) -> None:
        self._console.flush()
        if self._group is not None:
            self._group.look_after()
            self._crew.tick()
        if self._head is not None:
            self._head.look_after()
            self._heed_final_end(self._head)

    def _heed_final_end(self, head: Head) -> None:
        """A node that this start has started and that will not come: with a fixed number of nodes there is no run
        without it. Once a generation runs, membership is told of every end by itself."""
        end = head.final_end()
        if end is None or self._has_started or self._heeded:
            return
        self._heeded = True
        node, code, words = end
        self._crew.will_not_come(ExitCode(code) if code in set(ExitCode) else ExitCode.FAILED, f"{node}: {words}")
