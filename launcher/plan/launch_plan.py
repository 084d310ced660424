"""The whole plan of a start: a pure function of job.yaml, host facts and the platform."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any

from launcher.checkpoint.identity import run_identity
from launcher.config.load import LoadedJob
from launcher.config.models import JobConfig
from launcher.errors import NotInThisVersion, UserError
from launcher.host.facts import HostFacts
from launcher.plan.decisions import (
    Chosen,
    choose_device,
    choose_gradient_checkpointing,
    choose_lora_targets,
    choose_num_ranks,
    choose_precision,
    choose_zero_stage,
    require_methods_fit,
    static_bytes,
)
from launcher.plan.ds_config import make_ds_config, require_precision, stage_of
from launcher.plan.environment import NEVER_PASSED_ON, Network, Variable, proposals, resolve_environment
from launcher.plan.launch_files import deepspeed_env_text, hostfile_text
from launcher.plan.model_facts import ModelFacts
from launcher.platforms.detect import Place


@dataclass(frozen=True)
class LaunchPlan:
    """Everything that a start will do. `memory_forecast_bytes` is per card, without activations; None where unknown."""

    place: Place
    device: Chosen[str]
    num_ranks: Chosen[int]
    precision: Chosen[str]
    zero_stage: Chosen[int]
    gradient_checkpointing: Chosen[bool]
    lora_target_modules: Chosen[str | tuple[str, ...] | None]
    network: Network
    variables: tuple[Variable, ...]
    ds_config: Mapping[str, Any]
    hostfile: str
    deepspeed_env: str
    identity: Mapping[str, Any]
    model: ModelFacts
    memory_forecast_bytes: int | None
    notes: tuple[str, ...] = ()  # what was asked for and is not done in this version

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def make_plan(
    job: LoadedJob,
    facts: HostFacts,
    model: ModelFacts,
    place: Place,
    network: Network,
    environ: Mapping[str, str],
    earlier: Mapping[str, Any] = MappingProxyType({}),
) -> LaunchPlan:
    """Raises UserError or PreflightRefused for what cannot run; changes nothing.

    `earlier` is the identity of the run's newest checkpoint: what was chosen automatically then stays as it is.
    """
    config = job.config
    _refuse_what_comes_later(job, place)
    device = choose_device(facts)
    num_ranks = choose_num_ranks(config, facts, device.value)
    require_methods_fit(config, device.value, num_ranks.value, facts)
    precision = choose_precision(config, facts, device.value, earlier.get("precision"))
    zero_stage = choose_zero_stage(config, facts, model, device.value, num_ranks.value, earlier.get("deepspeed.stage"))
    ds_config = make_ds_config(config, zero_stage=zero_stage.value, device=device.value)
    if config.deepspeed.config is not None:
        zero_stage = Chosen(stage_of(ds_config), "your own DeepSpeed JSON", by="job.yaml")
        require_precision(ds_config, precision.value)
    wanted = proposals(device.value, num_ranks.value, facts.cpu.num_usable, network, has_rdma=bool(facts.rdma))
    variables = resolve_environment(wanted, config.env, environ)
    forecast = (
        int(static_bytes(config.method, model.num_parameters, num_ranks.value, zero_stage=zero_stage.value))
        if model.num_parameters
        else None
    )
    return LaunchPlan(
        place=place,
        device=device,
        num_ranks=num_ranks,
        precision=precision,
        zero_stage=zero_stage,
        gradient_checkpointing=choose_gradient_checkpointing(config, device.value),
        lora_target_modules=choose_lora_targets(config, model),
        network=network,
        variables=variables,
        ds_config=ds_config,
        hostfile=hostfile_text([(network.node_ip, num_ranks.value)]),
        deepspeed_env=deepspeed_env_text(variables),
        identity=run_identity(config, zero_stage=zero_stage.value, precision=precision.value),
        model=model,
        memory_forecast_bytes=forecast,
        notes=(*_asked_but_not_done(config), *_left_out(environ), *_slow(facts, device.value, precision.value)),
    )


def _asked_but_not_done(config: JobConfig) -> tuple[str, ...]:
    """Harmless to leave undone, but it was written down, so it is said."""
    notes = []
    if "adjust" in config.restart.model_fields_set and config.restart.adjust:
        notes.append("restart.adjust: nothing is adjusted after an out-of-memory error; the run stops with the remedy")
    if "notice" in config.spot.model_fields_set and config.spot.notice == "auto":
        notes.append("spot.notice: SIGTERM is the only notice of a preemption that this version listens to")
    if "memory" in config.checkpoint.model_fields_set and config.checkpoint.memory == "auto":
        notes.append("checkpoint.memory: checkpoints are on disk only in this version")
    return tuple(notes)


def _slow(facts: HostFacts, device: str, precision: str) -> tuple[str, ...]:
    if device == "cpu" and precision == "bf16" and not facts.cpu.flags_bf16:
        return ("precision: bf16 is emulated on this CPU (no AVX512-BF16, no AMX): many times slower than fp32",)
    return ()


def _left_out(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Variables of the environment that would break DeepSpeed's engine and are not passed on, with the reason."""
    found = [name for name in environ if name in NEVER_PASSED_ON and name.startswith("ACCELERATE_")]
    return tuple(f"{name} of the environment is not passed on: it would drop DeepSpeed" for name in sorted(found))


def _refuse_what_comes_later(job: LoadedJob, place: Place) -> None:
    """Nothing that was asked for is silently left undone."""
    config = job.config
    if config.command is not None:
        raise NotInThisVersion(
            f"{job.path}: command: wrapping a trainer of yours is not in this version; use model, data, training"
        )
    if config.cluster.max_nodes > 1 or len(config.cluster.hosts) > 1:
        raise NotInThisVersion(f"{job.path}: cluster: more than one node is not in this version")
    if place.node_rank is None:
        raise NotInThisVersion(
            f"{place.platform}: this process only starts the others ({place.shown_evidence}), which is not in "
            f"this version. "
            "Run ftlaunch in the worker itself."
        )
    if place.max_nodes > 1:
        raise NotInThisVersion(
            f"{place.platform} has started {place.shown_nodes} nodes ({place.shown_evidence}); more than one node is "
            "not in this version. Submit the job with one node."
        )
    for name in config.env:
        if name in NEVER_PASSED_ON or name.startswith("FTLAUNCH_"):
            raise UserError(
                f"{job.place('env.' + name)}: env.{name}: ftlaunch sets this for each rank and attempt; remove it"
                + (" (a port: cluster.master_port)" if name == "MASTER_PORT" else "")
            )
    if config.monitor.tensorboard and importlib.util.find_spec("tensorboard") is None:
        raise UserError(
            f"{job.place('monitor.tensorboard')}: monitor.tensorboard: the package is not installed: pip "
            f"install tensorboard"
        )
    if config.monitor.prometheus_port:
        raise NotInThisVersion(f"{job.path}: monitor.prometheus_port is not in this version; set it to 0")
    if config.checkpoint.memory == "on":
        raise NotInThisVersion(
            f"{job.path}: checkpoint.memory: on (checkpoints in memory) is not in this version; use auto or off"
        )
    if config.restart.hang_seconds != "auto":
        raise NotInThisVersion(
            f"{job.path}: restart.hang_seconds (finding hangs) is not in this version; leave it auto"
        )
