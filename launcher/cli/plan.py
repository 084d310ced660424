"""`ftlaunch plan`: what a start would do here and now. Writes nothing anywhere."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shlex
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from launcher.agent.prepare import Prepared, prepare
from launcher.cli import what_if, what_if_options
from launcher.config.models import JobConfig
from launcher.diagnose.redact import HIDDEN, redact_environ, redact_text
from launcher.fanout.plan import plan_fan_out
from launcher.plan.chosen import Chosen
from launcher.plan.launch_plan import LaunchPlan
from launcher.plan.meeting import Meeting, node_name, plan_meeting
from launcher.platforms.table import BY_HAND, PLATFORMS
from launcher.preflight.finding import show_bytes


def main(options: argparse.Namespace) -> int:
    if what_if_options.is_asked(options):
        return what_if.main(options)
    prepared = prepare(options.config, options.set, os.environ, write=False, checks=False)
    if options.json:
        print(json.dumps(to_json(prepared), ensure_ascii=False, indent=2, default=str))
    else:
        print("\n".join(render(prepared)))
    return 0


def to_json(prepared: Prepared) -> dict[str, Any]:
    job, plan = prepared.job, prepared.plan
    memory = plan.memory_forecast
    document = plan.to_json()
    meeting = _meeting(prepared)
    return {
        "v": 1,
        "config": shown_config(job.config),
        "config_sha": job.sha,
        "origin": {key: vars(origin) for key, origin in job.origin.items()},
        **{key: document[key] for key in ("place", "device", "num_ranks", "precision", "zero_stage")},
        **{key: document[key] for key in ("gradient_checkpointing", "lora_target_modules", "network", "model")},
        "nodes": {
            "most": plan.num_nodes,
            "fewest": plan.min_nodes,
            "this": node_name(plan.place),
            "origin": _nodes_origin(prepared),
        },
        "meeting": dataclasses.asdict(meeting) if meeting else None,
        "batch": [size._asdict() for size in batch_sizes(plan)],
        "environment": [{**variable, "value": shown(variable)} for variable in document["variables"]],
        "hostfile": plan.hostfile,
        "deepspeed_env": plan.deepspeed_env,
        "ds_config": document["ds_config"],
        "commands": [command(prepared)],
        "hosts": list(plan.place.hosts),
        "memory_tier": document["memory_tier"],
        "template": document["template"],
        "memory_forecast_bytes": plan.memory_forecast_bytes,
        "memory_forecast": {"peak": memory.peak, **memory.parts()} if memory else None,
        "alternatives": [what_if.alternative_json(one) for one in plan.alternatives],
        "node_forecast": document["node_forecast"],
        "notes": plan.notes,
        "resume": prepared.resume_preview(),
    }


def shown_config(config: JobConfig) -> dict[str, Any]:
    """The resolved configuration without secrets."""
    settings = config.model_dump(mode="json")
    settings["env"] = redact_environ(settings["env"])
    if settings["cluster"]["token"] is not None:
        settings["cluster"]["token"] = HIDDEN
    return settings


def shown(variable: Mapping[str, str]) -> str:
    return redact_environ({variable["name"]: variable["value"]})[variable["name"]]


def command(prepared: Prepared) -> str:
    """What to run on each node, ready to be pasted, secrets aside."""
    overrides = [part for override in prepared.overrides for part in ("--set", redact_text(override))]
    return shlex.join(["ftlaunch", "--config", str(prepared.job.path), *overrides])


class BatchSize(NamedTuple):
    """One size of the job: each rank does `accumulation` micro-batches for an optimizer step of `global_batch`."""

    nodes: int
    ranks: int
    global_batch: int
    accumulation: int


def batch_sizes(plan: LaunchPlan) -> list[BatchSize]:
    """At full size and, where it differs, at the smallest."""
    sizes = dict.fromkeys(((plan.num_nodes, plan.full_world_size), (plan.min_nodes, plan.smallest_world_size)))
    return [BatchSize(nodes, ranks, plan.global_batch_size, plan.accumulation(ranks)) for nodes, ranks in sizes]


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
        "checkpoints in memory": plan.memory_tier,
        "made once for all ranks": plan.template,
        "LoRA target modules": plan.lora_target_modules,
    }
    for name, choice in chosen.items():
        value = ", ".join(choice.value) if isinstance(choice.value, tuple) else choice.value
        if choice is plan.memory_tier:
            value = _how_often(plan.memory_every)
        yield f"  {name + ':':24}{value}  <- {choice.by}: {choice.reason}"
    yield from _network(prepared)
    yield from (f"  {_batch_title(plan, batch) + ':':24}{_batch(plan, batch)}" for batch in batch_sizes(plan))
    yield f"  {'memory of each rank:':24}{_memory(plan)}"
    if plan.alternatives:
        yield "  other ways on this card:"
        yield from (f"    {line}" for line in what_if.table(plan.alternatives))
    if plan.node_forecast.checkpoint_bytes is not None:
        yield f"  {'a checkpoint:':24}{show_bytes(plan.node_forecast.checkpoint_bytes)}"
    yield f"  {'resume:':24}{prepared.resume_preview()}"
    for note in plan.notes:
        yield f"  note: {note}"
    yield ""
    yield "settings and their origin"
    settings = shown_config(job.config)
    for key, origin in job.origin.items():
        if key == "cluster.nodes" and origin.kind == "default" and plan.num_nodes > 1:
            yield f"  {key}: {plan.place.shown_nodes}  <- {_nodes_origin(prepared)}"
            continue
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
    yield from _commands(prepared)


def _memory(plan: LaunchPlan) -> str:
    if plan.memory_forecast_bytes is None:
        return "unknown: the model's shape is not known before it is loaded"
    size = show_bytes(plan.memory_forecast_bytes)
    if plan.memory_forecast is None:
        return f"{size} of weights, gradients and optimizer; activations come on top"
    return f"{size} at its peak: {what_if.parts_line(plan.memory_forecast)}"


def _how_often(memory_every: int | None) -> str:
    if memory_every is None:
        return "off"
    if memory_every == 0:
        return "as often as checkpoint.budget allows"
    return "after every step" if memory_every == 1 else f"every {memory_every} steps"


def _meeting(prepared: Prepared) -> Meeting | None:
    """Of a head that is none of the nodes: what it takes for granted of theirs."""
    plan = prepared.plan
    if plan.meeting is None and plan.is_head_only and plan.num_nodes > 1:
        return plan_meeting(prepared.job.config, plan.place, plan.network, os.environ)
    return plan.meeting


def _nodes_origin(prepared: Prepared) -> str:
    """Who says how many nodes there are."""
    place, given = prepared.plan.place, prepared.job.origin.get("cluster.nodes")
    if given is not None and given.kind != "default":  # one that follows from cluster.hosts is no wish of its own
        return f"cluster.nodes ({_origin(given)})"
    if place.platform == "hostfile":
        return f"the hosts of {place.shown_evidence.removeprefix('hostfile=')}"
    counts = {name for row in (*PLATFORMS, BY_HAND) if row.name == place.platform for name in row.num_nodes}
    said = ", ".join(f"{name}={value}" for name, value in place.evidence if name in counts)
    return said or (place.shown_evidence if place.platform == "cluster.hosts" else place.platform)


def _network(prepared: Prepared) -> Iterator[str]:
    plan, network, meeting = prepared.plan, prepared.plan.network, _meeting(prepared)
    if plan.num_nodes == 1 or meeting is None:
        yield f"  {'network:':24}{network.interface}, master {network.master_addr}  <- {network.reason}"
        return
    fewer = f", goes on with {plan.min_nodes} or more" if plan.min_nodes < plan.num_nodes else ""
    yield f"  {'nodes:':24}{plan.num_nodes}{fewer}  <- {_nodes_origin(prepared)}"
    here = "none of them; it only starts ftlaunch on them"
    yield f"  {'this node:':24}{here if plan.is_head_only else f'{meeting.name} at {meeting.address}'}"
    yield f"  {'network:':24}{network.interface}, {network.node_ip}  <- {network.reason}"
    seeds = [host for host, _ in meeting.seeds]
    shown = ", ".join(seeds[:8]) + (f" and {len(seeds) - 8} more" if len(seeds) > 8 else "")
    yield f"  {'agents meet:':24}at port {meeting.agent_port} of {shown}  <- {meeting.port_reason}"
    waits = f"{meeting.timing.bound_s:g} s for missing nodes (cluster.wait_seconds)"
    if plan.min_nodes < plan.num_nodes:
        waits += f", the first start {meeting.timing.gather_s:g} s for more than {plan.min_nodes}"
    yield f"  {'waits:':24}{waits}"
    yield f"  {'token:':24}from {_TOKEN[meeting.token_source]}"


_TOKEN = {
    "job.yaml": "job.yaml (cluster.token)",
    "FTLAUNCH_TOKEN": "the environment (FTLAUNCH_TOKEN)",
    "output folder": "the output folder, drawn there by the first node",
}


def _batch_title(plan: LaunchPlan, size: BatchSize) -> str:
    if plan.min_nodes == plan.num_nodes:
        return "optimizer step"
    return f"step with {size.nodes} node{'s' if size.nodes > 1 else ''}"


def _batch(plan: LaunchPlan, size: BatchSize) -> str:
    done = size.ranks * plan.per_device_batch_size * size.accumulation
    partly = f", the last micro-batch only in part ({done} places)" if done > size.global_batch else ""
    return (
        f"{size.global_batch} samples = {size.ranks} rank(s) x {plan.per_device_batch_size} x {size.accumulation} "
        f"micro-batch(es){partly}"
    )


def _commands(prepared: Prepared) -> Iterator[str]:
    """One command on each node, or here, where ftlaunch then starts itself on the others."""
    fan_out = plan_fan_out(prepared.job, prepared.plan.place, os.environ)
    if fan_out is None:
        yield "command on each node" if prepared.plan.num_nodes > 1 else "command"
        yield f"  {command(prepared)}"
        return
    how = "DeepSpeed's runner" if fan_out.launcher == "deepspeed" else "ssh"
    yield f"command on this machine; it starts ftlaunch over {how}"
    yield f"  {command(prepared)}"
    for node, line in fan_out.shown():
        yield f"  {node}: {line}"


def _origin(origin: Any) -> str:
    return f"{origin.kind}, line {origin.line}" if origin.line else str(origin.kind)


def _value(settings: Any, dotted: str) -> str:
    value = settings
    for part in dotted.split("."):
        value = value[int(part)] if isinstance(value, list) else value.get(part) if isinstance(value, dict) else value
    return json.dumps(value, ensure_ascii=False)
