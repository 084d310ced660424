"""One start of the job on this node, from job.yaml to the exit code."""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from launcher.agent.completion import finished_already
from launcher.agent.console import Console
from launcher.agent.events import AppendedLines, EventLog, read_json_lines
from launcher.agent.incident import IncidentRecorder
from launcher.agent.ledger import Progress, samples_path
from launcher.agent.prepare import Prepared, prepare
from launcher.agent.recorder import RunRecorder
from launcher.agent.resume import newest_step
from launcher.agent.run_lock import RunLock
from launcher.agent.summary import RunSummary, render_summary, summarise
from launcher.agent.supervisor import RunSettings, Supervisor
from launcher.config.models import JobConfig
from launcher.diagnose.redact import redact_environ
from launcher.errors import ExitCode, PreflightRefused, UserError, may_pass
from launcher.event_loop import StopSignals
from launcher.plan.environment import base_environ
from launcher.plan.spec import Drill, RankSpec
from launcher.preflight.finding import Severity, count_by_severity, worst
from launcher.preflight.table import render_table
from launcher.process import become_subreaper

NODE = "n0"


@dataclass(frozen=True)
class RunResult:
    exit_code: ExitCode
    summary: RunSummary | None = None

    def to_json(self) -> dict[str, Any]:
        return {"v": 1, "exit_code": int(self.exit_code), "summary": asdict(self.summary) if self.summary else None}


@dataclass(frozen=True)
class Past:
    """What earlier starts of this run have left in the event stream."""

    run_id: str
    last_generation: int
    fired_drills: frozenset[int]


def run_job(config: Path | None, overrides: Sequence[str], environ: Mapping[str, str]) -> RunResult:
    """Raises UserError or PreflightRefused before anything is started; afterwards the exit code tells."""
    with StopSignals() as signals:
        console = Console()
        become_subreaper()
        prepared = prepare(config, overrides, environ, write=True)
        stop_exit_code = ExitCode(prepared.job.config.spot.exit_code)
        try:
            return _run_prepared(prepared, environ, signals, console)
        except OSError as error:
            if not may_pass(error):
                raise UserError(f"the output folder cannot be used: {error}") from error
            console.say(f"the output folder or this machine fails: {error}; run it again, best elsewhere")
            return RunResult(stop_exit_code)


def _run_prepared(prepared: Prepared, environ: Mapping[str, str], signals: StopSignals, console: Console) -> RunResult:
    output_dir = prepared.output_dir
    stop_exit_code = ExitCode(prepared.job.config.spot.exit_code)
    with RunLock(output_dir, say=console.say, stopped=signals.pending, stop_exit_code=stop_exit_code):
        past = read_past(output_dir)
        events = EventLog(output_dir, NODE)
        events.generation = past.last_generation + 1
        job_config = prepared.job.config
        done = finished_already(output_dir, prepared.plan.identity, job_config.training)
        if done is not None:
            console.say(
                f"nothing left to do: this run has reached its planned end at step {done.step}; the result is in "
                f"{output_dir / 'final'}. To train longer raise training.max_steps or num_train_epochs; to begin anew "
                "choose another output_dir."
            )
            return RunResult(ExitCode.FINISHED)
        _preflight(prepared, events, console, environ)
        write_launch_files(prepared, environ)
        plan = prepared.plan
        console.say(
            f"{plan.num_ranks.value} rank(s) on {plan.device.value}, {plan.precision.value}, "
            f"ZeRO-{plan.zero_stage.value}, {job_config.method}; output in {output_dir}"
        )
        for note in plan.notes:
            console.say(f"note: {note}")
        supervisor = _supervisor(prepared, past, events, console, environ, signals)
        exit_code = supervisor.run()
        summary = summarise(output_dir, supervisor.progress, started_at_step=supervisor.started_at_step)
        if exit_code not in (ExitCode.WRONG_INPUT, ExitCode.REFUSED):  # then there is one thing to read: the error
            console.block(render_summary(summary, exit_code, output_dir))
        return RunResult(exit_code, summary)


def read_past(output_dir: Path) -> Past:
    run_id, generation, fired = "", 0, set()
    for path in sorted((output_dir / "ftlaunch" / "events").glob("*.jsonl")):
        for event in read_json_lines(path):
            if event.get("event") == "generation_started":
                generation = max(generation, int(event.get("gen", 0)))
            if event.get("event") == "run_started":
                run_id = run_id or str(event["run_id"])
            if event.get("event") == "drill":
                fired.add(int(event["number"]))
    return Past(run_id or secrets.token_hex(8), generation, frozenset(fired))


def _preflight(prepared: Prepared, events: EventLog, console: Console, environ: Mapping[str, str]) -> None:
    findings = prepared.findings
    serious = [finding for finding in findings if finding.severity is not Severity.OK]
    if worst(findings) is Severity.ERROR:
        events.emit("preflight", findings=count_by_severity(findings), ids=[f.id for f in serious])
        events.emit(
            "run_ended", exit_code=int(ExitCode.REFUSED), reason="preflight refused this node", steps=0, goodput=0.0
        )
        raise PreflightRefused("preflight refuses this node; nothing was started\n" + render_table(serious, environ))
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
    # JSON is YAML; the resolved configuration is written so that it can be read back without a YAML library.
    (root / "job.yaml").write_text(json.dumps(resolved, indent=1, ensure_ascii=False) + "\n", "utf-8")
    (launch / "hostfile").write_text(plan.hostfile, "utf-8")
    (launch / ".deepspeed_env").write_text(plan.deepspeed_env, "utf-8", "backslashreplace")
    (launch / ".deepspeed_env").chmod(0o600)
    (launch / "ds_config.json").write_text(json.dumps(dict(plan.ds_config), indent=2) + "\n", "utf-8")
    redacted = redact_environ(base_environ(plan.variables, environ))
    lines = "".join(f"{name}={value}\n" for name, value in sorted(redacted.items()))
    (launch / "environment").write_text(lines, "utf-8", "backslashreplace")


def _supervisor(
    prepared: Prepared,
    past: Past,
    events: EventLog,
    console: Console,
    environ: Mapping[str, str],
    signals: StopSignals,
) -> Supervisor:
    job, plan, output_dir = prepared.job, prepared.plan, prepared.output_dir
    config = job.config
    spec = RankSpec(
        output_dir=str(output_dir),
        run_id=past.run_id,
        generation=past.last_generation + 1,
        # Ranks have `env` as their environment; values that may be secrets stay out of the file.
        config=config.model_dump(mode="json", exclude_unset=True, exclude={"env"}),
        config_sha=job.sha,
        device=plan.device.value,
        precision=plan.precision.value,
        zero_stage=plan.zero_stage.value,
        gradient_checkpointing=plan.gradient_checkpointing.value,
        lora_target_modules=plan.lora_target_modules.value,
        ds_config=plan.ds_config,
        identity=plan.identity,
    )
    settings = RunSettings(
        output_dir=output_dir,
        spec=spec,
        num_ranks=plan.num_ranks.value,
        environ=base_environ(plan.variables, environ),
        master_addr=plan.network.master_addr,
        master_port=config.cluster.master_port,
        max_without_progress=config.restart.max_without_progress,
        backoff_s=config.restart.backoff_seconds,
        grace_s=config.spot.grace_seconds,
        stop_exit_code=ExitCode(config.spot.exit_code),
        token=secrets.token_hex(16),
        first_generation=past.last_generation + 1,
        drills=drills_of(config),
        fork=environ.get("FTLAUNCH_FORK_SERVER", "on") != "off",
    )
    events.emit(
        "run_started",
        run_id=past.run_id,
        config_sha=job.sha,
        nodes=[NODE],
        world_size=settings.num_ranks,
        resumed_from=newest_step(output_dir) or None,
        agent_pid=os.getpid(),
    )
    recorder = RunRecorder(
        events, AppendedLines(samples_path(output_dir, NODE)), console, Progress(started_at_s=time.monotonic())
    )
    recorder.fired_drills.update(past.fired_drills)
    incidents = IncidentRecorder(output_dir, events, settings.environ, asdict(prepared.facts))
    return Supervisor(settings, recorder, incidents, signals)


def drills_of(config: JobConfig) -> tuple[Drill, ...]:
    kills = config.drill.kill if config.drill else []
    return tuple(Drill(number, kill.rank, kill.step, kill.signal) for number, kill in enumerate(kills))
