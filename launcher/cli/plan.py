"""`ftlaunch plan`: what a start would do here and now. Writes nothing anywhere."""

from __future__ import annotations

import argparse
import json
import os
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from launcher.agent.prepare import Prepared, prepare
from launcher.config.models import JobConfig
from launcher.diagnose.redact import redact_environ
from launcher.plan.decisions import Chosen
from launcher.preflight.finding import show_bytes


def main(options: argparse.Namespace) -> int:
    prepared = prepare(options.config, options.set, os.environ, write=False)
    if options.json:
        print(json.dumps(to_json(prepared), ensure_ascii=False, indent=2, default=str))
    else:
        print("\n".join(render(prepared)))
    return 0


def to_json(prepared: Prepared) -> dict[str, Any]:
    job, plan = prepared.job, prepared.plan
    document = plan.to_json()
    return {
        "v": 1,
        "config": shown_config(job.config),
        "config_sha": job.sha,
        "origin": {key: vars(origin) for key, origin in job.origin.items()},
        **{key: document[key] for key in ("place", "device", "num_ranks", "precision", "zero_stage")},
        **{key: document[key] for key in ("gradient_checkpointing", "lora_target_modules", "network", "model")},
        "environment": [{**variable, "value": shown(variable)} for variable in document["variables"]],
        "hostfile": plan.hostfile,
        "deepspeed_env": plan.deepspeed_env,
        "ds_config": document["ds_config"],
        "commands": [command(prepared)],
        "memory_forecast_bytes": plan.memory_forecast_bytes,
        "notes": plan.notes,
        "resume": prepared.resume_preview(),
    }


def shown_config(config: JobConfig) -> dict[str, Any]:
    """The resolved configuration without secrets."""
    settings = config.model_dump(mode="json")
    settings["env"] = redact_environ(settings["env"])
    return settings


def shown(variable: Mapping[str, str]) -> str:
    return redact_environ({variable["name"]: variable["value"]})[variable["name"]]


def command(prepared: Prepared) -> str:
    """What to run on each node, ready to be pasted."""
    overrides = [part for override in prepared.overrides for part in ("--set", override)]
    return shlex.join(["ftlaunch", "--config", str(prepared.job.path), *overrides])


def render(prepared: Prepared) -> Iterator[str]:
    job, plan = prepared.job, prepared.plan
    yield f"{job.path} (configuration {job.sha})"
    evidence = plan.place.shown_evidence
    yield f"platform: {plan.place.platform}" + (f" ({evidence})" if evidence else "")
    yield ""
    yield "decided"
    chosen: dict[str, Chosen[Any]] = {
        "device": plan.device,
        "ranks": plan.num_ranks,
        "precision": plan.precision,
        "ZeRO stage": plan.zero_stage,
        "gradient checkpointing": plan.gradient_checkpointing,
        "LoRA target modules": plan.lora_target_modules,
    }
    for name, choice in chosen.items():
        value = ", ".join(choice.value) if isinstance(choice.value, tuple) else choice.value
        yield f"  {name + ':':24}{value}  <- {choice.by}: {choice.reason}"
    yield f"  {'network:':24}{plan.network.interface}, master {plan.network.master_addr}  <- {plan.network.reason}"
    forecast = "unknown: the model's shape is not known before it is loaded"
    if plan.memory_forecast_bytes is not None:
        size = show_bytes(plan.memory_forecast_bytes)
        forecast = f"{size} of weights, gradients and optimizer; activations come on top"
    yield f"  {'memory of each rank:':24}{forecast}"
    yield f"  {'resume:':24}{prepared.resume_preview()}"
    for note in plan.notes:
        yield f"  note: {note}"
    yield ""
    yield "settings and their origin"
    settings = shown_config(job.config)
    for key, origin in job.origin.items():
        yield f"  {key}: {_value(settings, key)}  <- {_origin(origin)}"
    yield ""
    yield "environment of the ranks"
    for variable in plan.variables:
        why = f": {variable.reason}" if variable.reason else ""
        yield f"  {variable.name}={shown(vars(variable))}  <- {variable.origin}{why}"
    for title, text in (("hostfile", plan.hostfile), (".deepspeed_env", plan.deepspeed_env)):
        yield ""
        yield title
        yield from (f"  {line}" for line in text.splitlines())
    yield ""
    yield "DeepSpeed JSON"
    yield from (f"  {line}" for line in json.dumps(dict(plan.ds_config), indent=2).splitlines())
    yield ""
    yield "command on each node"
    yield f"  {command(prepared)}"


def _origin(origin: Any) -> str:
    return f"{origin.kind}, line {origin.line}" if origin.line else str(origin.kind)


def _value(settings: Any, dotted: str) -> str:
    value = settings
    for part in dotted.split("."):
        value = value[int(part)] if isinstance(value, list) else value.get(part) if isinstance(value, dict) else value
    return json.dumps(value, ensure_ascii=False)
