"""The whole plan of a start: a pure function of job.yaml, host facts and the platform."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any

from launcher.checkpoint.identity import run_identity
from launcher.config.load import LoadedJob
from launcher.config.models import JobConfig
from launcher.errors import NotInThisVersion, UserError
from launcher.host.facts import HostFacts
from launcher.plan.alternatives import Alternative, weigh_all
from launcher.plan.chosen import Chosen
from launcher.plan.decisions import (
    choose_device,
    choose_gradient_checkpointing,
    choose_lora_targets,
    choose_num_ranks,
    choose_precision,
    choose_template,
    choose_zero_stage,
    require_methods_fit,
    static_bytes,
    visible,
)
from launcher.plan.ds_config import make_ds_config, require_precision, stage_of
from launcher.plan.environment import (
    NEVER_PASSED_ON,
    OF_THE_NODE,
    Network,
    Variable,
    proposals,
    resolve_environment,
)
from launcher.plan.forecasts import NodeForecast, choose_memory_tier, forecast_node
from launcher.plan.launch_files import deepspeed_env_text, hostfile_text
from launcher.plan.meeting import Meeting, plan_meeting
from launcher.plan.memory_model import MemoryForecast, MemorySetting, forecast_memory, setting_of
from launcher.plan.model_facts import ModelFacts
from launcher.plan.network import hosts_of
from launcher.plan.spec import global_batch_of
from launcher.platforms.detect import Place


@dataclass(frozen=True)
class LaunchPlan:
    """Everything that a start will do.

    `num_nodes` and `min_nodes`: the most and the fewest nodes that train together. `num_ranks`: on each node.
    `meeting`: None where no other node takes part, and on a head that is no node itself. `global_batch_size`: samples
    of an optimizer step over all ranks, which stays the same with fewer nodes. `memory_forecast` is per rank at the
    smallest size of the job, None where the model's shape is not known; `memory_forecast_bytes` its sum, or, where only
    the number of parameters is known, that of weights, gradients and optimizer. `alternatives`: other stages on the
    smallest card. `memory_tier`: whether checkpoints are kept in memory,
    as far as this node is concerned. `memory_every`: how often, as `RankSpec` says it.
    """

    place: Place
    num_nodes: int
    min_nodes: int
    meeting: Meeting | None
    global_batch_size: int
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
    memory_forecast: MemoryForecast | None
    memory_forecast_bytes: int | None
    alternatives: tuple[Alternative, ...]
    node_forecast: NodeForecast
    memory_tier: Chosen[bool]
    memory_every: int | None
    template: Chosen[str]
    notes: tuple[str, ...] = ()  # what was asked for and is not done in this version

    @property
    def is_head_only(self) -> bool:
        """This machine is none of the nodes: it only starts ftlaunch on them."""
        return self.place.node_rank is None

    @property
    def per_device_batch_size(self) -> int:
        return int(self.identity["training.per_device_train_batch_size"])

    def accumulation(self, world_size: int) -> int:
        """Micro-batches that each of `world_size` ranks does for an optimizer step."""
        return -(-self.global_batch_size // (world_size * self.per_device_batch_size))

    @property
    def full_world_size(self) -> int:
        return self.num_nodes * self.num_ranks.value

    @property
    def smallest_world_size(self) -> int:
        return self.min_nodes * self.num_ranks.value

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
    earlier_batch_size: int | None = None,
) -> LaunchPlan:
    """Raises UserError or PreflightRefused for what cannot run; changes nothing.

    `earlier` is the identity of the run's newest checkpoint: what was chosen automatically then stays as it is;
    `earlier_batch_size` its global batch. Nothing here depends on how many nodes happen to be there.
    """
    config = job.config
    _refuse_what_comes_later(job, place)
    is_head_only = place.node_rank is None
    device = choose_device(facts)
    slots = place.num_ranks_per_node if place.platform == "hostfile" else None
    num_ranks = choose_num_ranks(config, facts, device.value, slots)
    precision: Chosen[str]
    if is_head_only:  # other machines train: what this one has decides nothing
        precision = Chosen(config.precision, "decided on each node")
    else:
        require_methods_fit(config, device.value, num_ranks.value, facts, num_nodes=place.max_nodes)
        precision = choose_precision(config, facts, device.value, earlier.get("precision"))
    fewest_ranks = place.min_nodes * num_ranks.value
    targets = choose_lora_targets(config, model)
    checkpointing = choose_gradient_checkpointing(config, device.value)

    def setting(stage: int, ds_config: Mapping[str, Any]) -> MemorySetting:
        return setting_of(
            config,
            model,
            targets.value,
            device=device.value,
            precision=precision.value,
            zero_stage=stage,
            num_ranks=fewest_ranks,
            gradient_checkpointing=checkpointing.value,
            ds_config=ds_config,
        )

    alternatives: tuple[Alternative, ...] = ()
    if device.value == "cuda":
        card_bytes = min(gpu.memory_total_bytes for gpu in visible(facts))
        two = setting(2, {"zero_optimization": {"overlap_comm": True}})
        alternatives = weigh_all(model, two, card_bytes)
    zero_stage = choose_zero_stage(
        config, facts, model, device.value, fewest_ranks, earlier.get("deepspeed.stage"), alternatives
    )
    ds_config = make_ds_config(config, zero_stage=zero_stage.value, device=device.value)
    if config.deepspeed.config is not None:
        zero_stage = Chosen(stage_of(ds_config), "your own DeepSpeed JSON", by="job.yaml")
        if not is_head_only:
            require_precision(ds_config, precision.value)
    wanted = proposals(device.value, num_ranks.value, facts.cpu.num_usable, network, has_rdma=bool(facts.rdma))
    variables = resolve_environment(wanted, config.env, environ)
    forecast = forecast_memory(model, setting(zero_stage.value, ds_config))
    states_bytes = (
        int(static_bytes(config.method, model.num_parameters, fewest_ranks, zero_stage=zero_stage.value))
        if model.num_parameters
        else None
    )
    node_forecast = forecast_node(
        config,
        model,
        targets.value,
        device=device.value,
        precision=precision.value,
        zero_stage=zero_stage.value,
        num_ranks=num_ranks.value,
        nodes=(place.min_nodes, place.max_nodes),
        card_bytes=states_bytes,
    )
    tier = Chosen(config.checkpoint.memory != "off", "decided on each node")
    if not is_head_only:
        tier = choose_memory_tier(config, facts.memory, node_forecast)
    return LaunchPlan(
        place=place,
        num_nodes=place.max_nodes,
        min_nodes=place.min_nodes,
        meeting=None if is_head_only or place.max_nodes == 1 else plan_meeting(config, place, network, environ),
        global_batch_size=earlier_batch_size or global_batch_of(config.training, place.max_nodes * num_ranks.value),
        device=device,
        num_ranks=num_ranks,
        precision=precision,
        zero_stage=zero_stage,
        gradient_checkpointing=checkpointing,
        lora_target_modules=targets,
        network=network,
        variables=variables,
        ds_config=ds_config,
        hostfile=hostfile_text(
            [(node, num_ranks.value) for node in network.nodes or (network.node_ip,)], hosts_of(place)
        ),
        deepspeed_env=deepspeed_env_text(variables if place.max_nodes == 1 else _for_every_node(variables)),
        identity=run_identity(config, zero_stage=zero_stage.value, precision=precision.value),
        model=model,
        memory_forecast=forecast,
        memory_forecast_bytes=forecast.total_bytes if forecast else states_bytes,
        alternatives=alternatives,
        node_forecast=node_forecast,
        memory_tier=tier,
        memory_every=(config.checkpoint.memory_steps or 0) if tier.value else None,
        template=choose_template(config, device.value, precision.value, facts.memory, model),
        notes=(
            *_asked_but_not_done(config),
            *_left_out(environ),
            *_slow(facts, device.value, precision.value),
            *_about_nodes(config, place, network, num_ranks.value, len(facts.visible_gpus)),
        ),
    )


def _for_every_node(variables: Sequence[Variable]) -> list[Variable]:
    """Without what ftlaunch has found on this node and another node has to find for itself: its interface, no RDMA."""
    return [variable for variable in variables if variable.origin != "ftlaunch" or variable.name not in OF_THE_NODE]


def _about_nodes(
    config: JobConfig, place: Place, network: Network, num_ranks: int, num_visible_gpus: int
) -> tuple[str, ...]:
    notes = []
    if place.node_rank is None:
        notes.append(
            "this machine is none of the nodes and only starts ftlaunch on them: device, ranks, precision and memory "
            "are decided on each node; what is shown here is this machine's"
        )
    elif place.platform == "hostfile" and num_ranks < num_visible_gpus and config.cluster.nproc_per_node == "auto":
        notes.append(f"the hostfile gives {num_ranks} slot(s), of {num_visible_gpus} visible GPUs the others stay idle")
    if place.max_nodes == 1:
        return tuple(notes)
    if network.unresolved:
        shown = ", ".join(network.unresolved[:3]) + (", ..." if len(network.unresolved) > 3 else "")
        notes.append(
            f"no address is known yet for {shown}; a start waits for it up to cluster.wait_seconds "
            f"({config.cluster.wait_seconds:g} s)"
        )
    if not network.nodes:
        notes.append(f"the hostfile has this node only: {place.platform} does not tell the other nodes' addresses")
    if len(place.hosts) > place.max_nodes:
        notes.append(
            f"{len(place.hosts)} hosts are named and at most {place.max_nodes} train at a time: the others wait in "
            f"reserve, each up to cluster.wait_seconds"
        )
    gather_s, wait_s = config.cluster.gather_seconds, config.cluster.wait_seconds
    if "gather_seconds" in config.cluster.model_fields_set and gather_s > wait_s / 2:
        notes.append(f"cluster.gather_seconds: {wait_s / 2:g} s, half of cluster.wait_seconds, not {gather_s:g}")
    return tuple(notes)


def _asked_but_not_done(config: JobConfig) -> tuple[str, ...]:
    """Harmless to leave undone, but it was written down, so it is said."""
    notes = []
    if "adjust" in config.restart.model_fields_set and config.restart.adjust:
        notes.append("restart.adjust: nothing is adjusted after an out-of-memory error; the run stops with the remedy")
    if "notice" in config.spot.model_fields_set and config.spot.notice == "auto":
        notes.append("spot.notice: SIGTERM is the only notice of a preemption that this version listens to")
    if "budget" in config.checkpoint.model_fields_set and config.checkpoint.memory != "auto":
        notes.append(
            f"checkpoint.budget has no effect with checkpoint.memory: {config.checkpoint.memory}; it is for auto"
        )
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
    if place.node_rank is None and (config.cluster.launcher == "none" or not place.hosts):
        why, remedy = "their names are not known here", "write cluster.launcher: ssh and cluster.hosts"
        if place.hosts:
            why = "cluster.launcher: none leaves it to you"
            remedy = "remove cluster.launcher: then this machine starts it over ssh"
        raise UserError(
            f"{place.platform}: this machine is none of the nodes ({place.shown_evidence}) and could only start "
            f"ftlaunch on them, but {why}. Run the same command on each node itself, or {remedy}."
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
