"""The supervisor: runs generation after generation until the run has ended, and tells the truth in its exit code.

What to do is decided elsewhere (`lifecycle.py` inside a generation, `policy/restart.py` between generations,
`diagnose/` for causes); here it is carried out and recorded.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from launcher.agent.completion import proof_of_completion
from launcher.agent.console import Console
from launcher.agent.events import EventLog
from launcher.agent.forkserver_client import ForkServerError
from launcher.agent.generation import RankProcess, free_port
from launcher.agent.incident import Incident, IncidentRecorder
from launcher.agent.lifecycle import Action, Bound, Ending, KillGroup, Lifecycle, RankExit, Tell, signal_name
from launcher.agent.rank_group import RankGroup
from launcher.agent.recorder import RunRecorder
from launcher.agent.resume import Resume, newest_step, prepare_resume
from launcher.checkpoint.identity import FROZEN_BY_STATE
from launcher.errors import ExitCode, UserError, may_pass
from launcher.event_loop import EventLoop, StopSignals
from launcher.link import Message
from launcher.plan.spec import Drill, RankSpec
from launcher.policy.restart import Action as PolicyAction
from launcher.policy.restart import Decision, FailedAttempt, decide


@dataclass(frozen=True)
class RunSettings:
    """Everything that stays the same over the generations of this start."""

    output_dir: Path
    spec: RankSpec
    num_ranks: int
    environ: Mapping[str, str]
    master_addr: str
    master_port: int | None
    max_without_progress: int
    backoff_s: float
    grace_s: float
    stop_exit_code: ExitCode
    token: str
    first_generation: int
    drills: tuple[Drill, ...] = ()
    fork: bool = True


class Supervisor:
    """One start of the run on this node."""

    def __init__(
        self, settings: RunSettings, recorder: RunRecorder, incidents: IncidentRecorder, signals: StopSignals
    ) -> None:
        self.settings = settings
        self.recorder = recorder
        self.progress = recorder.progress
        self.started_at_step = 0
        self._events: EventLog = recorder.events
        self._console: Console = recorder.console
        self._incidents = incidents
        self._lifecycle = Lifecycle(settings.num_ranks, grace_s=settings.grace_s)
        self._stop_source: str | None = None
        self._history: list[FailedAttempt] = []
        self._loop = EventLoop(on_tick=self._tick)
        self._signals = signals
        self._group: RankGroup | None = None

    # -- the run -------------------------------------------------------------------------------------------------------

    def run(self) -> ExitCode:
        """Until the run has ended. Whatever happens, nothing that was started is left behind."""
        settings = self.settings
        self._loop.deliver(self._signals, self._on_signal)
        group = self._group = RankGroup(
            self._loop,
            self._console,
            settings.environ,
            settings.token,
            settings.output_dir / "ftlaunch" / "logs",
            fork=settings.fork,
        )
        try:
            exit_code, reason = self._generations(group)
        except UserError as error:
            self._events.emit("run_ended", exit_code=error.exit_code, reason=str(error), steps=0, goodput=0.0)
            raise
        except OSError as error:
            code = settings.stop_exit_code if may_pass(error) else ExitCode.WRONG_INPUT
            steps = self.progress.best_step
            self._events.emit("run_ended", exit_code=int(code), reason=str(error), steps=steps, goodput=0.0)
            raise
        finally:
            group.end()
            self._group = None
            self._loop.close()
            self.recorder.close()
        self._events.emit(
            "run_ended",
            exit_code=int(exit_code),
            reason=reason,
            steps=self.progress.best_step,
            goodput=self.progress.goodput(time.monotonic()),
        )
        self._console.say(f"{reason} (exit code {int(exit_code)})")
        return exit_code

    def _generations(self, group: RankGroup) -> tuple[ExitCode, str]:
        settings = self.settings
        generation, reason = settings.first_generation, "start"
        while True:
            self._events.generation = generation
            resume = prepare_resume(
                settings.output_dir,
                settings.spec.identity,
                settings.num_ranks,
                self._events,
                self._console.say,
                frozen={key: settings.spec.config.get("training", {}).get(key) for key in FROZEN_BY_STATE},
            )
            if generation == settings.first_generation:
                self.started_at_step = self.progress.best_step = resume.step
            incident = self._generation(group, generation, resume, reason)
            if incident is None:
                ended = self._ended_as_asked()
                if ended is not None:
                    return ended
                incident = self._incidents.unfinished(generation)
            decision = self._decide(generation, incident)
            if decision.action is PolicyAction.STOP:
                assert decision.exit_code is not None  # decide() gives one with every STOP
                stopped = decision.exit_code is ExitCode.STOPPED
                return settings.stop_exit_code if stopped else decision.exit_code, decision.reason
            if self._lifecycle.undead:
                return self._stuck()
            if not self._pause(decision.delay_s):
                return self._stopped("nothing was running")
            generation, reason = generation + 1, incident.fault_class

    def _generation(self, group: RankGroup, generation: int, resume: Resume, reason: str) -> Incident | None:
        """One attempt. None when it ended as asked; else what went wrong, already recorded."""
        self._lifecycle = Lifecycle(self.settings.num_ranks, grace_s=self.settings.grace_s)
        self.recorder.attempt_begins(time.monotonic())
        self._incidents.attempt_begins(generation)
        try:
            started = self._start_ranks(group, generation, resume, reason)
        except ForkServerError as failure:
            group.kill()
            group.wait_for_the_killed()
            group.close()
            return self._incidents.fork_server_failed(generation, failure)
        if started:
            while not self._lifecycle.over and not self._lifecycle.undead:
                self._loop.wait()
        else:
            group.kill()
            group.wait_for_the_killed()
        self._loop.clear_bounds()
        incident = None
        if self._lifecycle.first_failure is not None and self._lifecycle.ending() is Ending.FAILED:
            incident = self._incidents.ranks_failed(
                generation, self._lifecycle, group.processes, self.recorder.input_error
            )
        group.close()
        return incident

    def _start_ranks(self, group: RankGroup, generation: int, resume: Resume, reason: str) -> bool:
        """False when a stop was asked for before the ranks could be started. Raises ForkServerError."""
        settings = self.settings
        # A port of the user's choice serves the first attempt only: a store must never be met again by a later one.
        port = free_port(settings.master_addr, settings.master_port if not self._history else None)
        spec = replace(
            settings.spec,
            generation=generation,
            resume_from=resume.path,
            drills=tuple(drill for drill in settings.drills if drill.number not in self.recorder.fired_drills),
        )
        spec_path = settings.output_dir / "ftlaunch" / "launch" / "spec.json"
        spec_path.write_text(spec.to_json(), "utf-8")
        self._events.emit(
            "generation_started",
            world_size=settings.num_ranks,
            nodes=[self._events.node],
            master=f"{settings.master_addr}:{port}",
            reason=reason,
        )
        origin = f"from step {resume.step} ({resume.path})" if resume.path else "from the beginning"
        self._console.say(f"attempt {generation}: {settings.num_ranks} rank(s), {origin}")
        return group.start(
            settings.num_ranks,
            spec_path,
            generation,
            (settings.master_addr, port),
            abandoned=lambda: self._stop_source is not None or self._lifecycle.killing,
            on_message=self._on_message,
            on_exit=self._on_exit,
        )

    # -- between generations -------------------------------------------------------------------------------------------

    def _ended_as_asked(self) -> tuple[ExitCode, str] | None:
        """Exit code and reason of a generation without an incident; None when its success could not be proven."""
        if self._lifecycle.undead:
            return self._stuck()
        ending = self._lifecycle.ending() if self._lifecycle.over else Ending.ABANDONED
        if ending is Ending.FINISHED:
            missing = proof_of_completion(self.settings.output_dir)
            if missing is None:
                return ExitCode.FINISHED, f"training is complete at step {self.progress.best_step}"
            self._console.say(f"the ranks say that they finished, but {missing}")
            return None
        if ending is Ending.STOPPED:
            return self._stopped(f"all ranks saved at step {self._lifecycle.save_at}")
        latest = newest_step(self.settings.output_dir)
        kept = f"the latest checkpoint is of step {latest}" if latest else "there is no checkpoint yet"
        return self._stopped(f"no save at an agreed step; {kept}")

    def _stuck(self) -> tuple[ExitCode, str]:
        ranks = ", ".join(map(str, self._lifecycle.undead))
        what = f"rank {ranks} does not die of SIGKILL (stuck in a driver or on a dead file system)"
        return self.settings.stop_exit_code, f"{what}: nothing more is started on this node; run it again on another"

    def _stopped(self, what: str) -> tuple[ExitCode, str]:
        reason = f"stopped by {self._stop_source}: {what}; the same command continues the run"
        return self.settings.stop_exit_code, reason

    def _decide(self, generation: int, incident: Incident) -> Decision:
        reached_step = max(self._lifecycle.reached_step, self.started_at_step)
        self._history.append(
            FailedAttempt(generation, incident.fault_class, incident.retryable, reached_step, incident.input_error_code)
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
                "failed_attempts": len(self._history),
            },
        )
        self._incidents.show(incident, decision, self._console)
        return decision

    def _pause(self, delay_s: float) -> bool:
        """Wait before a restart; False when asked to stop meanwhile."""
        over: list[bool] = []
        self._loop.set_bound("pause", delay_s, lambda: over.append(True))
        while self._stop_source is None and not over:
            self._loop.wait()
        self._loop.clear_bounds()
        return self._stop_source is None

    # -- what happens --------------------------------------------------------------------------------------------------

    def _on_message(self, process: RankProcess, message: Message) -> None:
        self._carry_out(self._lifecycle.on_message(process.rank, message))
        self.recorder.message(process.rank, message)
        if self._lifecycle.stop_source is not None:
            self._note_stop(self._lifecycle.stop_source)

    def _on_exit(self, process: RankProcess, exit_: RankExit) -> None:
        self.recorder.rank_exited(process.rank, process.pid, exit_, self._lifecycle.ranks[process.rank].step)
        self._carry_out(self._lifecycle.on_exit(process.rank, exit_))

    def _on_signal(self, number: int) -> None:
        source = signal_name(number)
        self._carry_out(self._lifecycle.on_stop_request(source))
        self._note_stop(source)

    def _on_bound(self, name: str) -> None:
        self._carry_out(self._lifecycle.on_bound(name))

    def _note_stop(self, source: str) -> None:
        if self._stop_source is None:
            self._stop_source = source
            self._events.emit("notice", source=source, deadline=None)
            self._console.say(f"{source}: saving at an agreed step, then stopping (once more: stop at once)")

    def _carry_out(self, actions: Sequence[Action]) -> None:
        group = self._group
        assert group is not None  # messages, exits and signals are only heard while the group is there
        for action in actions:
            if isinstance(action, Tell):
                group.tell(action.kind, **action.fields)
            elif isinstance(action, Bound):
                self._loop.set_bound(action.name, action.seconds, partial(self._on_bound, action.name))
            elif isinstance(action, KillGroup) and group.kill():
                self._events.emit("group_killed", reason=action.reason)

    def _tick(self) -> None:
        if self._group is not None:
            self._group.look_after()
