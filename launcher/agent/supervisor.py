"""The supervisor: runs generation after generation until the run has ended, and tells the truth in its exit code.

One thread, one selector. What to do is decided elsewhere (`lifecycle.py` inside a generation, `policy/restart.py` between
generations, `diagnose/` for causes); here it is carried out and recorded.
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from launcher import link as channel
from launcher.agent.completion import proof_of_completion
from launcher.agent.console import Console
from launcher.agent.events import AppendedLines, EventLog
from launcher.agent.forkserver_client import ForkServer, ForkServerFailed
from launcher.agent.generation import RankProcess, contract, free_port
from launcher.agent.incident import Incident, IncidentRecorder
from launcher.agent.ledger import Progress
from launcher.agent.lifecycle import Action, Bound, Ending, KillGroup, Lifecycle, Tell, signal_name
from launcher.agent.resume import Resume, newest_step, prepare_resume
from launcher.agent.warden import Warden
from launcher.errors import ExitCode
from launcher.link import Link
from launcher.plan.spec import Drill, RankSpec
from launcher.policy.restart import Action as PolicyAction
from launcher.policy.restart import Decision, FailedAttempt, decide
from launcher.process import descendants, kill_all

_TICK_S = 1.0  # mirroring of logs and supervision of the warden; nothing else waits for it
_IMPORT_BOUND_S = 600.0  # a cold network file system needs minutes for torch; then it is said and counted as a fault
_KILL_BOUND_S = 10.0
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


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
    fork: bool = True


@dataclass
class Supervisor:
    settings: RunSettings
    events: EventLog
    samples: AppendedLines
    console: Console
    progress: Progress
    recorder: IncidentRecorder
    drills: list[Drill] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._signals, signal_writer = socket.socketpair()
        for end in (self._signals, signal_writer):
            end.setblocking(False)
        self._signal_writer = signal_writer
        self._bounds: dict[str, float] = {}
        self._server: ForkServer | None = None
        self._fork = self.settings.fork
        self._ranks: list[RankProcess] = []
        self._lifecycle = Lifecycle(self.settings.num_ranks, grace_s=self.settings.grace_s)
        self._stop_source: str | None = None
        self._input_error: tuple[int, str] | None = None
        self._history: list[FailedAttempt] = []
        self.started_at_step = 0
        self._handlers: Mapping[str, Callable[[RankProcess, channel.Message], None]] = {
            "step": self._on_step,
            "phase": self._on_phase,
            "log": self._on_log,
            "evaluated": self._on_evaluated,
            "answered": self._on_answered,
            "resumed": self._on_resumed,
            "checkpoint_saved": self._on_checkpoint_saved,
            "drill": self._on_drill,
            "user_error": self._on_user_error,
        }

    # -- the run -------------------------------------------------------------------------------------------------------

    def run(self) -> ExitCode:
        """Until the run has ended. Whatever happens, nothing that was started is left behind."""
        self._catch_signals()
        self._warden = Warden(self.settings.token)
        try:
            exit_code, reason = self._generations()
        finally:
            self._end_everything()
        self.events.emit(
            "run_ended",
            exit_code=int(exit_code),
            reason=reason,
            steps=self.progress.best_step,
            goodput=self.progress.goodput(time.monotonic()),
        )
        self.console.say(f"{reason} (exit code {int(exit_code)})")
        return exit_code

    def _generations(self) -> tuple[ExitCode, str]:
        generation = self.settings.first_generation
        reason = "start"
        self._server = self._new_server()
        while True:
            self.events.generation = generation
            resume = prepare_resume(self.settings.output_dir, self.settings.spec.identity, self.settings.num_ranks, self.events, self.console.say)
            if generation == self.settings.first_generation:
                self.started_at_step = self.progress.best_step = resume.step
            incident = self._generation(generation, resume, reason)
            if incident is None:
                ended = self._ended_as_asked()
                if ended is not None:
                    return ended
                incident = self.recorder.unfinished(generation)
            decision = self._decide(generation, incident)
            if decision.action is PolicyAction.STOP:
                assert decision.exit_code is not None  # decide() gives one with every STOP
                code = self.settings.stop_exit_code if decision.exit_code is ExitCode.STOPPED else decision.exit_code
                return code, decision.reason
            if not self._pause(decision.delay_s):
                return self._stopped("nothing was running")
            generation += 1
            reason = incident.fault_class

    def _generation(self, generation: int, resume: Resume, reason: str) -> Incident | None:
        """One attempt. None when it ended as asked; else what went wrong, already recorded."""
        decided_at = time.monotonic()
        self._lifecycle = Lifecycle(self.settings.num_ranks, grace_s=self.settings.grace_s)
        self._input_error = None
        self.progress.attempt_begins()
        self.recorder.attempt_begins(generation)
        self._first_step_seen = False
        self._decided_at = decided_at
        try:
            started = self._start_ranks(generation, resume, reason)
        except ForkServerFailed as failure:
            self._abandon_ranks("the fork server failed")
            return self.recorder.fork_server_failed(generation, failure)
        if not started:
            self._abandon_ranks("asked to stop while the ranks were being started")
            return None
        while not self._lifecycle.over:
            self._wait_and_handle()
        self._kill_leftovers()
        ending = self._lifecycle.ending()
        self.console.forget_mirrors()
        incident = None
        if ending is Ending.FAILED:
            incident = self.recorder.ranks_failed(generation, self._lifecycle, self._ranks, self._input_error)
        self._close_ranks()
        return incident

    def _ended_as_asked(self) -> tuple[ExitCode, str] | None:
        """Exit code and reason of a generation without an incident; None when its success could not be proven."""
        ending = self._lifecycle.ending() if self._lifecycle.over else Ending.ABANDONED
        if ending is Ending.FINISHED:
            missing = proof_of_completion(self.settings.output_dir)
            if missing is None:
                return ExitCode.FINISHED, f"training is complete at step {self.progress.best_step}"
            self.console.say(f"the ranks say that they finished, but {missing}")
            return None
        if ending is Ending.STOPPED:
            return self._stopped(f"all ranks saved at step {self._lifecycle.save_at}")
        return self._stopped(f"no save at an agreed step; the latest checkpoint is of step {newest_step(self.settings.output_dir)}")

    def _stopped(self, what: str) -> tuple[ExitCode, str]:
        return self.settings.stop_exit_code, f"stopped by {self._stop_source}: {what}; the same command continues the run"

    def _decide(self, generation: int, incident: Incident) -> Decision:
        self._history.append(
            FailedAttempt(
                generation,
                incident.fault_class,
                incident.retryable,
                max(self._lifecycle.reached_step, self.started_at_step),
                incident.input_error_code,
            )
        )
        self.progress.faults.append(incident.label or incident.fault_class)
        decision = decide(
            self._history,
            max_without_progress=self.settings.max_without_progress,
            backoff_s=self.settings.backoff_s,
            started_at_step=self.started_at_step,
        )
        self.events.emit(
            "decision",
            action=decision.action.value,
            reason=decision.reason,
            inputs={
                "class": incident.fault_class,
                "retryable": incident.retryable,
                "reached_step": self._history[-1].reached_step,
                "failed_attempts": len(self._history),
            },
        )
        self.recorder.show(incident, decision, self.console)
        return decision

    # -- starting ------------------------------------------------------------------------------------------------------

    def _new_server(self) -> ForkServer:
        log = self.settings.output_dir / "ftlaunch" / "logs" / "fork-server.log"
        return ForkServer(self.settings.environ, self.settings.token, log, once=not self._fork)

    def _start_ranks(self, generation: int, resume: Resume, reason: str) -> bool:
        """False when a stop was asked for before the ranks could be started. Raises ForkServerFailed."""
        port = free_port(self.settings.master_addr, self.settings.master_port if not self._history else None)
        spec_path = self.settings.output_dir / "ftlaunch" / "launch" / "spec.json"
        spec = replace(self.settings.spec, generation=generation, resume_from=resume.path, drills=tuple(self.drills))
        spec_path.parent.mkdir(parents=True, exist_ok=True)
        spec_path.write_text(spec.to_json(), "utf-8")
        self.events.emit(
            "generation_started",
            world_size=self.settings.num_ranks,
            nodes=[self.events.node],
            master=f"{self.settings.master_addr}:{port}",
            reason=reason,
        )
        self.console.say(
            f"attempt {generation}: {self.settings.num_ranks} rank(s), "
            + (f"from step {resume.step} ({resume.path})" if resume.path else "from the beginning")
        )
        log_dir = self.settings.output_dir / "ftlaunch" / "logs" / f"gen-{generation}"
        for rank in range(self.settings.num_ranks):
            server = self._ready_server()
            if server is None:
                return False
            ours, theirs = channel.pair()
            log_path = log_dir / f"rank-{rank}.log"
            pid = server.start_rank(
                spec_path, contract(rank, self.settings.num_ranks, self.settings.master_addr, port), theirs, log_path
            )
            theirs.close()
            if not self._fork:
                server.hand_over()
                self._server = None
            process = RankProcess(rank, pid, os.pidfd_open(pid), Link(ours), log_path)
            self._ranks.append(process)
            self._selector.register(process.link, selectors.EVENT_READ, self._on_link(process))
            self._selector.register(process.pidfd, selectors.EVENT_READ, self._on_pidfd(process))
        return True

    def _ready_server(self) -> ForkServer | None:
        """A fork server that has imported everything; a new one when the last has died. None when asked to stop meanwhile."""
        if self._server is None or not self._server.alive():
            self._server = self._new_server()
        if self._server.readiness is None:
            self._wait_for_imports(self._server)
            if self._stop_source is not None:
                return None
            if self._fork and self._server.readiness is not None and self._server.readiness.cuda_touched:
                self.console.say("CUDA was touched while importing, so ranks cannot be forked; each imports by itself")
                self._fork = False
                self._server.stop()
                return self._ready_server()
        return self._server

    def _wait_for_imports(self, server: ForkServer) -> None:
        deadline = time.monotonic() + _IMPORT_BOUND_S
        self._selector.register(server, selectors.EVENT_READ, None)
        try:
            while self._stop_source is None:
                if any(key.fileobj is server for key, _ in self._wait_and_handle()):
                    server.read_readiness()
                    return
                if time.monotonic() > deadline:
                    raise ForkServerFailed(f"imports took longer than {_IMPORT_BOUND_S:.0f} s", server.log_path, None)
        finally:
            self._selector.unregister(server)

    # -- the loop ------------------------------------------------------------------------------------------------------

    def _wait_and_handle(self) -> Sequence[tuple[selectors.SelectorKey, int]]:
        """Wait for the next thing to happen, at most until the nearest bound or tick, and handle it."""
        now = time.monotonic()
        timeout_s = min([_TICK_S, *(max(0.0, at - now) for at in self._bounds.values())])
        ready = self._selector.select(timeout_s)
        for key, _ in ready:
            handler: Callable[[], None] | None = key.data
            if handler is not None:
                handler()
        now = time.monotonic()
        for name in [name for name, at in self._bounds.items() if at <= now]:
            del self._bounds[name]
            self._carry_out(self._lifecycle.on_bound(name))
        self._look_after_helpers()
        return ready

    def _look_after_helpers(self) -> None:
        if self._ranks:
            self.console.mirror(self._ranks[0].log_path, "rank 0")
        if self._warden.ensure_running():
            self.console.say("the warden process was killed; a new one watches")
        if self._fork and self._ranks and self._server is not None and not self._server.alive():
            self.console.say("the fork server was killed; the ranks run on, a new one imports for the next attempt")
            self._server = self._new_server()
        self._reap_adopted()

    def _carry_out(self, actions: Sequence[Action]) -> None:
        for action in actions:
            if isinstance(action, Tell):
                for rank in self._ranks:
                    if rank.exit is None:
                        rank.link.send(action.kind, **action.fields)
            elif isinstance(action, Bound):
                self._bounds[action.name] = time.monotonic() + action.seconds
            elif isinstance(action, KillGroup):
                self._kill_group(action.reason)

    def _on_link(self, process: RankProcess) -> Callable[[], None]:
        def read() -> None:
            for message in process.link.poll():
                self._on_message(process, message)
            if process.link.closed:
                self._unregister(process.link)

        return read

    def _on_pidfd(self, process: RankProcess) -> Callable[[], None]:
        def ended() -> None:
            for message in process.link.poll():  # what the rank said before it died comes first
                self._on_message(process, message)
            exit_ = process.reap()
            if exit_ is None:
                return
            self._unregister(process.pidfd)
            self._unregister(process.link)
            self.events.emit(
                "worker_exited",
                rank=process.rank,
                pid=process.pid,
                exit_code=exit_.code,
                signal=signal_name(exit_.signal) if exit_.signal else None,
                killed_by_us=exit_.killed_by_us,
            )
            self._carry_out(self._lifecycle.on_exit(process.rank, exit_))

        return ended

    def _unregister(self, fileobj: Any) -> None:
        try:
            self._selector.unregister(fileobj)
        except KeyError:
            return

    def _on_message(self, process: RankProcess, message: channel.Message) -> None:
        self._carry_out(self._lifecycle.on_message(process.rank, message))
        handler = self._handlers.get(message["kind"])
        if handler is not None:
            handler(process, message)
        if self._lifecycle.stop_source is not None and self._stop_source is None:
            self._note_stop(self._lifecycle.stop_source)

    def _on_step(self, process: RankProcess, message: channel.Message) -> None:
        step = int(message["step"])
        self.samples.append({"gen": self.events.generation, "rank": process.rank, "step": step, "ids": message["samples"]})
        if process.rank != 0:
            return
        now = time.monotonic()
        if not self._first_step_seen:
            self._first_step_seen = True
            self.events.emit("first_step", step=step, seconds=round(now - self._decided_at, 3))
        self.progress.step(step, now)
        self.console.progress(step, self.progress.max_steps, self.progress.last_loss, self.progress.seconds_per_step())

    def _on_phase(self, process: RankProcess, message: channel.Message) -> None:
        if process.rank != 0:
            return
        if "max_steps" in message:
            self.progress.max_steps, self.progress.num_samples = int(message["max_steps"]), int(message["num_samples"])
        if message["name"] not in ("training", "saving"):
            self.console.say(f"{message['name']} ...")

    def _on_log(self, process: RankProcess, message: channel.Message) -> None:
        self.progress.log(float(message["loss"]))

    def _on_evaluated(self, process: RankProcess, message: channel.Message) -> None:
        self.progress.evaluations[int(message["step"])] = float(message["loss"])
        self.events.emit("evaluated", step=message["step"], loss=message["loss"])
        self.console.say(f"evaluation loss at step {message['step']}: {message['loss']:.4f}")

    def _on_answered(self, process: RankProcess, message: channel.Message) -> None:
        self.progress.answers.setdefault(message["model"], []).append((message["question"], message["answer"]))
        self.events.emit("answered", model=message["model"], question=message["question"], answer=message["answer"])

    def _on_resumed(self, process: RankProcess, message: channel.Message) -> None:
        if process.rank == 0:
            self.events.emit("resumed", **{key: value for key, value in message.items() if key != "kind"})

    def _on_checkpoint_saved(self, process: RankProcess, message: channel.Message) -> None:
        self.events.emit("checkpoint_saved", **{key: value for key, value in message.items() if key != "kind"})
        self.console.say(f"checkpoint of step {message['step']} saved in {message['stall_seconds']:.1f} s")

    def _on_drill(self, process: RankProcess, message: channel.Message) -> None:
        self.drills = [drill for drill in self.drills if drill.number != message["number"]]
        self.events.emit("drill", number=message["number"], rank=process.rank, signal=message["signal"], step=message["step"])
        self.console.say(f"drill: rank {process.rank} gets {message['signal']} after step {message['step']}")

    def _on_user_error(self, process: RankProcess, message: channel.Message) -> None:
        if self._input_error is None:
            self._input_error = (process.rank, str(message["message"]))

    # -- stopping ------------------------------------------------------------------------------------------------------

    def _catch_signals(self) -> None:
        for number in _STOP_SIGNALS:
            signal.signal(number, lambda *_: None)
        signal.set_wakeup_fd(self._signal_writer.fileno(), warn_on_full_buffer=False)
        self._selector.register(self._signals, selectors.EVENT_READ, self._on_signals)

    def _on_signals(self) -> None:
        for number in self._signals.recv(4096):
            if number not in _STOP_SIGNALS:
                continue
            source = signal_name(number)
            self._note_stop(source)
            self._carry_out(self._lifecycle.on_stop_request(source))

    def _note_stop(self, source: str) -> None:
        if self._stop_source is None:
            self._stop_source = source
            self.events.emit("notice", source=source, deadline=None)
            self.console.say(f"{source}: saving at an agreed step, then stopping (once more: stop at once)")

    def _pause(self, delay_s: float) -> bool:
        """Wait before a restart; False when asked to stop meanwhile."""
        until = time.monotonic() + delay_s
        while self._stop_source is None and time.monotonic() < until:
            self._bounds["pause"] = until
            self._wait_and_handle()
        self._bounds.pop("pause", None)
        return self._stop_source is None

    def _kill_group(self, reason: str) -> None:
        for rank in self._ranks:
            rank.kill()
        if any(rank.exit is None for rank in self._ranks):
            self.events.emit("group_killed", reason=reason)

    def _abandon_ranks(self, reason: str) -> None:
        """End ranks of a generation that never got going, and wait for them."""
        self._kill_group(reason)
        deadline = time.monotonic() + _KILL_BOUND_S
        while any(rank.exit is None for rank in self._ranks) and time.monotonic() < deadline:
            self._wait_and_handle()
        self._kill_leftovers()
        self._close_ranks()

    def _close_ranks(self) -> None:
        for rank in self._ranks:
            rank.close()
        self._ranks = []

    def _helper_pids(self) -> list[int]:
        helpers = [self._warden.process.pid]
        if self._server is not None:
            helpers.append(self._server.pid)
        return helpers

    def _kill_leftovers(self) -> None:
        """Children of ranks (DataLoader workers, compilers) that outlived them: adopted by this process, the subreaper."""
        self._bounds.clear()
        deadline = time.monotonic() + _KILL_BOUND_S
        while left := descendants(os.getpid(), without=self._helper_pids()):
            kill_all(left)
            self._reap_adopted()
            if time.monotonic() > deadline:
                self.console.say(f"processes that do not die of SIGKILL (stuck in the kernel): {left}")
                return
            time.sleep(0.005)

    def _reap_adopted(self) -> None:
        """Collect ended orphans that this process has inherited (as PID 1 or subreaper); ranks and helpers are collected
        where they are watched."""
        watched = {*self._helper_pids(), *(rank.pid for rank in self._ranks if rank.exit is None)}
        while True:
            try:
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if ended is None or ended.si_pid in watched:
                return
            os.waitpid(ended.si_pid, os.WNOHANG)

    def _end_everything(self) -> None:
        for rank in self._ranks:
            rank.kill()
        if self._server is not None:
            self._server.stop()
        self._kill_leftovers()
        self._warden.release()
        signal.set_wakeup_fd(-1)
        self.samples.close()
