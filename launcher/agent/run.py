"""One start of the job on this node, from job.yaml to the exit code."""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from launcher.agent.cluster_folder import ClusterFolder
from launcher.agent.completion import finished_already
from launcher.agent.console import Console
from launcher.agent.crew import Alone, Crew, Seat
from launcher.agent.early_imports import EarlyImports, imports_begun
from launcher.agent.events import EventLog, lines_at
from launcher.agent.incident import IncidentRecorder
from launcher.agent.join import join_cluster
from launcher.agent.ledger import Progress, samples_path
from launcher.agent.object_lock import ObjectRunLock
from launcher.agent.past import Past, read_past
from launcher.agent.prepare import Prepared, judge, prepare
from launcher.agent.recorder import RunRecorder
from launcher.agent.resume import newest_step
from launcher.agent.run_lock import RunLock
from launcher.agent.run_settings import RunSettings
from launcher.agent.sample_hunt import SampleHunt
from launcher.agent.summary import RunSummary, render_summary, summarise
from launcher.agent.supervisor import Supervisor
from launcher.agent.work_folder import WorkFolder
from launcher.config.load import LoadedJob
from launcher.config.models import JobConfig
from launcher.diagnose.redact import HIDDEN, redact_environ
from launcher.errors import ExitCode, PreflightRefused, UserError, may_pass, unusable_folder
from launcher.event_loop import EventLoop, StopSignals
from launcher.fanout.head import Head
from launcher.fanout.plan import plan_fan_out
from launcher.host.local_folder import SCRATCH_VARIABLE, Scratch
from launcher.host.storage import StorageKind, why_locks_stay_here
from launcher.plan.environment import base_environ
from launcher.plan.spec import Drill, RankSpec
from launcher.preflight.finding import Severity, count_by_severity
from launcher.preflight.table import render_table
from launcher.process import become_subreaper

NODE = "n0"


@dataclass(frozen=True)
class RunResult:
    exit_code: ExitCode
    summary: RunSummary | None = None

    def to_json(self) -> dict[str, Any]:
        return {"v": 1, "exit_code": int(self.exit_code), "summary": asdict(self.summary) if self.summary else None}


def run_job(
    config: Path | None, overrides: Sequence[str], environ: Mapping[str, str], *, job: LoadedJob | None = None
) -> RunResult:
    """Raises UserError or PreflightRefused before anything is started; afterwards the exit code tells.

    `job`: loaded already, by the head that has started this agent.
    """
    with StopSignals() as signals, closing(Console()) as console:
        become_subreaper()
        prepared = prepare(config, overrides, environ, write=True, job=job, checks=False)
        stop_exit_code = ExitCode(prepared.job.config.spot.exit_code)
        try:
            fan_out = plan_fan_out(prepared.job, prepared.plan.place, environ)
            if fan_out is None:
                return _run_prepared(prepared, environ, signals, console, None)
            with Head(fan_out, console.say, signals.pending) as head:
                if not head.runs_agent:
                    result = RunResult(head.follow())
                else:
                    result = _run_prepared(prepared, environ, signals, console, head)
                head.ended(result.exit_code)
                return result
        except OSError as error:
            if not may_pass(error):
                raise unusable_folder(error) from error
            console.say(f"the output folder or this machine fails: {error}; run it again, best elsewhere")
            return RunResult(stop_exit_code)


def _run_prepared(
    prepared: Prepared, environ: Mapping[str, str], signals: StopSignals, console: Console, head: Head | None
) -> RunResult:
    output_dir = prepared.output_dir
    stop_exit_code = ExitCode(prepared.job.config.spot.exit_code)
    if prepared.plan.meeting is None:
        run_lock = ObjectRunLock if prepared.facts.storage_kind is StorageKind.OBJECT else RunLock
        with run_lock(output_dir, say=console.say, stopped=signals.pending, stop_exit_code=stop_exit_code):
            return _run_held(prepared, environ, signals, console, head, folder=None)
    folder = ClusterFolder(
        output_dir,
        prepared.plan.meeting.name,
        first_voted=lambda: read_past(output_dir).last_generation,
        locks_stay_here=why_locks_stay_here(prepared.facts.mount),
        say=console.say,
        stopped=signals.pending,
        stop_exit_code=stop_exit_code,
    )
    with folder:
        return _run_held(prepared, environ, signals, console, head, folder)


def _run_held(
    prepared: Prepared,
    environ: Mapping[str, str],
    signals: StopSignals,
    console: Console,
    head: Head | None,
    folder: ClusterFolder | None,
) -> RunResult:
    """While the output folder is held: for this node alone, or together with the others of the run (`folder`)."""
    output_dir, plan, config = prepared.output_dir, prepared.plan, prepared.job.config
    past = read_past(output_dir)
    node = NODE if plan.meeting is None else plan.meeting.name
    events = EventLog(output_dir, node, kind=prepared.facts.storage_kind)
    events.generation = past.last_generation + (folder is None)
    done = finished_already(output_dir, plan.identity, config.training)
    if done is not None:
        console.say(
            f"nothing left to do: this run has reached its planned end at step {done.step}; the result is in "
            f"{output_dir / 'final'}. To train longer raise training.max_steps or num_train_epochs; to begin anew "
            "choose another output_dir."
        )
        return RunResult(ExitCode.FINISHED)
    run_id = past.run_id or (folder.folder_id if folder is not None else secrets.token_hex(8))
    run = _Run(prepared, past, run_id, events, console, environ, signals, head)
    settings = run.settings(folder)
    with imports_begun(settings) as imports:
        _preflight(judge(prepared, environ), events, console, environ)
        if head is not None:
            head.start()
        write_launch_files(prepared, environ)
        console.say(
            f"{plan.num_ranks.value} rank(s) on {plan.device.value}, {plan.precision.value}, "
            f"ZeRO-{plan.zero_stage.value}, {config.method}; output in {output_dir}"
        )
        for note in plan.notes:
            console.say(f"note: {note}")
        supervisor = run.supervisor(folder, settings, imports)
        exit_code = supervisor.run()
    summary = summarise(
        output_dir,
        supervisor.progress,
        started_at_step=supervisor.started_at_step,
        node=events.node,
        after_generation=past.last_generation if folder is not None else None,
    )
    # A wrong input leaves one thing to read: the error. Of several nodes the leader speaks for all, once the run is
    # over; where a node has only left, it is not.
    quiet = (ExitCode.WRONG_INPUT, ExitCode.REFUSED, *((ExitCode.STOPPED, ExitCode.STOPPED_143) if folder else ()))
    if exit_code not in quiet and supervisor.led:
        console.block(render_summary(summary, exit_code, output_dir))
    return RunResult(exit_code, summary)


_OF_THE_INPUT = ("data.", "model.")  # ids of checks


def _preflight(prepared: Prepared, events: EventLog, console: Console, environ: Mapping[str, str]) -> None:
    findings = prepared.findings
    serious = [finding for finding in findings if finding.severity is not Severity.OK]
    errors = [finding for finding in serious if finding.severity is Severity.ERROR]
    if errors:
        events.emit("preflight", findings=count_by_severity(findings), ids=[f.id for f in serious])
        # Another node would meet a wrong input again.
        input_only = all(finding.id.startswith(_OF_THE_INPUT) for finding in errors)
        refused = UserError if input_only else PreflightRefused
        what = "the job's input" if input_only else "this node"
        events.emit(
            "run_ended", exit_code=int(refused.exit_code), reason=f"preflight refused {what}", steps=0, goodput=0.0
        )
        raise refused(f"preflight refuses {what}; nothing was started\n" + render_table(serious, environ))
    if serious:
        console.block(render_table(serious, environ))
    events.emit("preflight", findings=count_by_severity(findings), ids=[f.id for f in serious])


def write_launch_files(prepared: Prepared, environ: Mapping[str, str]) -> None:
    """`ftlaunch/job.yaml` and `ftlaunch/launch/`: what this start does, for people and for `deepspeed --hostfile`."""
    plan = prepared.plan
    root = prepared.output_dir / "ftlaunch"
    launch = root / "launch"
    launch.mkdir(parents=True, exist_ok=True)
    resolved = prepared.job.config.model_dump(mode="json")
    resolved["env"] = redact_environ(resolved["env"])
    if resolved["cluster"]["token"] is not None:
        resolved["cluster"]["token"] = HIDDEN
    # JSON is YAML; the resolved configuration is written so that it can be read back without a YAML library.
    (root / "job.yaml").write_text(json.dumps(resolved, indent=1, ensure_ascii=False) + "\n", "utf-8")
    (launch / "hostfile").write_text(plan.hostfile, "utf-8")
    (launch / ".deepspeed_env").write_text(plan.deepspeed_env, "utf-8", "backslashreplace")
    with suppress(OSError):  # object mounts have no modes; secrets are not in it
        (launch / ".deepspeed_env").chmod(0o600)
    (launch / "ds_config.json").write_text(json.dumps(dict(plan.ds_config), indent=2) + "\n", "utf-8")
    redacted = redact_environ(base_environ(plan.variables, environ))
    lines = "".join(f"{name}={value}\n" for name, value in sorted(redacted.items()))
    (launch / "environment").write_text(lines, "utf-8", "backslashreplace")


@dataclass(frozen=True)
class _Run:
    """What a supervisor is made of."""

    prepared: Prepared
    past: Past
    run_id: str
    events: EventLog
    console: Console
    environ: Mapping[str, str]
    signals: StopSignals
    head: Head | None

    def settings(self, folder: ClusterFolder | None) -> RunSettings:
        config, plan, output_dir = self.prepared.job.config, self.prepared.plan, self.prepared.output_dir
        node = self.events.node
        template = "spec-template.json" if folder is None else f"spec-template-{node}.json"
        scratch = Scratch(output_dir, node)
        return RunSettings(
            output_dir=output_dir,
            work_folder=WorkFolder(output_dir, self.prepared.facts.storage_kind),
            spec=self._spec(),
            environ={**base_environ(plan.variables, self.environ), SCRATCH_VARIABLE: str(scratch.path)},
            scratch=scratch,
            max_without_progress=config.restart.max_without_progress,
            backoff_s=config.restart.backoff_seconds,
            grace_s=config.spot.grace_seconds,
            stop_exit_code=ExitCode(config.spot.exit_code),
            token=secrets.token_hex(16),
            drills=drills_of(config),
            fork=self.environ.get("FTLAUNCH_FORK_SERVER", "on") != "off",
            template=None if plan.template.value == "nothing" else template,
            every_steps=config.checkpoint.every_steps,
            keep=config.checkpoint.keep,
            hang_seconds=config.restart.hang_seconds,
        )

    def supervisor(self, folder: ClusterFolder | None, settings: RunSettings, imports: EarlyImports) -> Supervisor:
        config, plan, output_dir = self.prepared.job.config, self.prepared.plan, self.prepared.output_dir
        node = self.events.node
        self.events.emit(
            "run_started",
            run_id=self.run_id,
            config_sha=self.prepared.job.sha,
            nodes=[node],
            world_size=plan.num_ranks.value,
            resumed_from=newest_step(output_dir) or None,
            agent_pid=os.getpid(),
        )
        recorder = RunRecorder(
            self.events,
            lines_at(samples_path(output_dir, node), self.prepared.facts.storage_kind),
            self.console,
            Progress(started_at_s=time.monotonic()),
        )
        recorder.fired_drills.update(self.past.fired_drills)
        incidents = IncidentRecorder(
            output_dir,
            self.events,
            settings.environ,
            asdict(self.prepared.facts),
            shown=settings.work_folder.shown,
            alone=folder is None,
            hunt=SampleHunt(config, plan.global_batch_size, settings.environ),
        )
        loop = EventLoop()
        crew: Crew
        if folder is None:
            seat = Seat(node, plan.network.master_addr, plan.num_ranks.value)
            first, port = self.past.last_generation + 1, config.cluster.master_port
            crew = Alone(seat, first=first, master_port=port, stop_exit_code=settings.stop_exit_code)
            supervisor = Supervisor(settings, imports, recorder, incidents, self.signals, loop, crew, self.head)
            crew.start(supervisor)
            return supervisor
        try:
            crew = join_cluster(self.prepared, folder, loop, self.console.say, self.signals.pending, self.environ)
        except UserError as error:
            self.events.emit("run_ended", exit_code=int(error.exit_code), reason=str(error), steps=0, goodput=0.0)
            raise
        supervisor = Supervisor(settings, imports, recorder, incidents, self.signals, loop, crew, self.head)
        crew.start(supervisor)
        return supervisor

    def _spec(self) -> RankSpec:
        """Of the first attempt; the leader of each fills in what changes."""
        job, plan = self.prepared.job, self.prepared.plan
        return RankSpec(
            output_dir=str(self.prepared.output_dir),
            run_id=self.run_id,
            generation=self.past.last_generation + 1,
            # Ranks have `env` as their environment; values that may be secrets stay out of the file.
            config=job.config.model_dump(mode="json", exclude_unset=True, exclude={"env": True, "cluster": {"token"}}),
            config_sha=job.sha,
            device=plan.device.value,
            precision=plan.precision.value,
            zero_stage=plan.zero_stage.value,
            gradient_checkpointing=plan.gradient_checkpointing.value,
            lora_target_modules=plan.lora_target_modules.value,
            ds_config=plan.ds_config,
            identity=plan.identity,
            global_batch_size=plan.global_batch_size,
            memory_every=plan.memory_every,
            shares_model=plan.template.value == "inputs",
            storage_kind=self.prepared.facts.storage_kind,
        )


def drills_of(config: JobConfig) -> tuple[Drill, ...]:
    kills = config.drill.kill if config.drill else []
    return tuple(Drill(number, k.rank, k.step, k.signal, k.at, k.batch, k.hang) for number, k in enumerate(kills))
