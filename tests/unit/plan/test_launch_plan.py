"""The whole plan of a start, as data."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from launcher.errors import NotInThisVersion, PreflightRefused, UserError
from launcher.host.compute import Memory
from launcher.host.routes import Route
from launcher.plan.ds_config import make_ds_config, stage_of
from launcher.plan.known_models import find_model
from launcher.plan.launch_plan import LaunchPlan, make_plan
from launcher.plan.model_facts import ModelFacts
from launcher.plan.network import choose_network
from launcher.plan.spec import Drill, RankSpec
from launcher.platforms.detect import Place
from tests.unit.plan.plan_inputs import GIB, config, host, loaded

ONE = Place("one machine", 1, 0)
NICS = host().nics
MODEL = ModelFacts("/m", "llama", 1_000_000_000)


def plan(
    more: dict[str, Any] | None = None, cards: str = "8xA100", place: Place = ONE, environ: dict[str, str] | None = None
) -> LaunchPlan:
    job, facts = loaded(more), host(cards)
    return make_plan(job, facts, MODEL, place, choose_network(job.config, facts, place), environ or {})


def test_eight_gpus() -> None:
    made = plan()
    assert (made.device.value, made.num_ranks.value, made.precision.value, made.zero_stage.value) == (
        "cuda",
        8,
        "bf16",
        2,
    )
    assert made.hostfile == "10.1.0.5 slots=8\n"
    assert "NCCL_SOCKET_IFNAME=lo\n" in made.deepspeed_env
    assert made.ds_config["zero_optimization"]["stage"] == 2
    assert made.memory_forecast_bytes is not None
    assert (made.identity["precision"], made.identity["deepspeed.stage"]) == ("bf16", 2)


def test_the_plan_is_json() -> None:
    document = json.loads(json.dumps(plan().to_json()))
    assert document["precision"] == {"value": "bf16", "reason": plan().precision.reason, "by": "ftlaunch"}


def test_the_same_inputs_give_the_same_plan() -> None:
    assert plan() == plan()


def test_what_the_user_set_reaches_the_plan() -> None:
    made = plan({"env": {"NCCL_DEBUG": "INFO"}, "deepspeed": {"stage": 1}}, environ={"NCCL_IB_DISABLE": "0"})
    values = {variable.name: (variable.value, variable.origin) for variable in made.variables}
    assert values["NCCL_DEBUG"] == ("INFO", "job.yaml")
    assert values["NCCL_IB_DISABLE"] == ("0", "environment")
    assert (made.zero_stage.value, made.zero_stage.by) == (1, "job.yaml")


def test_a_deepspeed_json_of_the_users_own_is_taken_as_it_is(tmp_path: Path) -> None:
    own = {"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": "auto"}
    (tmp_path / "ds.json").write_text(json.dumps(own))
    made = plan({"deepspeed": {"config": str(tmp_path / "ds.json")}})
    assert dict(made.ds_config) == own
    assert (made.zero_stage.value, made.zero_stage.by) == (3, "job.yaml")


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("offload", [False, True])
def test_the_deepspeed_json_leaves_to_transformers_what_must_agree(stage: int, offload: bool) -> None:
    made = make_ds_config(
        config({"deepspeed": {"stage": stage, "offload_optimizer": offload and stage > 0}}),
        zero_stage=stage,
        device="cuda",
    )
    assert stage_of(made) == stage
    for key in (
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
        "train_batch_size",
        "gradient_clipping",
    ):
        assert made[key] == "auto"
    assert made["bf16"]["enabled"] == made["fp16"]["enabled"] == "auto"
    assert ("offload_optimizer" in made["zero_optimization"]) == (offload and stage > 0)
    json.dumps(made)


@pytest.mark.parametrize(
    ("more", "key"),
    [
        ({"monitor": {"prometheus_port": 9400}}, "monitor.prometheus_port"),
    ],
)
def test_what_is_not_in_this_version_is_said_not_ignored(more: dict[str, Any], key: str) -> None:
    with pytest.raises(NotInThisVersion, match="not in this version") as caught:
        plan(more)
    assert key in str(caught.value)
    assert "/jobs/job.yaml" in str(caught.value)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("checkpoint", "available_gib", "tier", "every"),
    [
        ({}, 400, (True, "ftlaunch"), 0),
        ({"memory": "auto"}, 10, (False, "ftlaunch"), None),
        ({"memory": "off"}, 400, (False, "job.yaml"), None),
        ({"memory": "on"}, 10, (True, "job.yaml"), 1),
        ({"memory": 7}, 400, (True, "job.yaml"), 7),
    ],
)
def test_checkpoints_in_memory(
    checkpoint: dict[str, Any], available_gib: int, tier: tuple[bool, str], every: int | None
) -> None:
    """1e9 parameters, all trained: 18 GB of state, four times, beside what the ranks take."""
    job = loaded({"method": "full", "checkpoint": checkpoint})
    facts = host("1xA100", memory=Memory(512 * GIB, available_gib * GIB, None, None))
    made = make_plan(job, facts, MODEL, ONE, choose_network(job.config, facts, ONE), {})
    assert ((made.memory_tier.value, made.memory_tier.by), made.memory_every) == (tier, every)
    assert made.node_forecast.tier_bytes == pytest.approx(4 * 16e9, rel=0.01)


def test_a_budget_without_effect_is_noted() -> None:
    assert "checkpoint.budget has no effect" in " ".join(plan({"checkpoint": {"budget": 0.02, "memory": 3}}).notes)
    assert "budget" not in " ".join(plan({"checkpoint": {"budget": 0.02}}).notes)


# -- several nodes -----------------------------------------------------------------------------------------------------


def nodes(count: int | tuple[int, int], rank: int | None = 1, *, platform: str = "cluster.hosts") -> Place:
    most = count[1] if isinstance(count, tuple) else count
    return Place(platform, count, rank, hosts=tuple(f"10.1.0.{5 + i}" for i in range(most)), master_addr="10.1.0.5")


def no_names(asked: Sequence[str]) -> Mapping[str, frozenset[str]]:
    return {}


def by_eth0(address: str) -> Route:
    return Route("eth0", "10.1.0.5", address)


def plan_for(place: Place, more: dict[str, Any] | None = None, cards: str = "8xA100", **known: Any) -> LaunchPlan:
    job, facts = (
        loaded(more),
        host(cards, nics=[replace(n, ipv4=("10.1.0.6",)) if n.name == "eth0" else n for n in NICS]),
    )
    network = choose_network(job.config, facts, place, no_names, by_eth0)
    return make_plan(job, facts, known.pop("model", MODEL), place, network, {}, **known)


def test_two_nodes() -> None:
    made = plan_for(nodes(2))
    assert (made.num_nodes, made.min_nodes, made.num_ranks.value) == (2, 2, 8)
    assert (made.full_world_size, made.smallest_world_size) == (16, 16)
    assert made.hostfile == "10.1.0.5 slots=8\n10.1.0.6 slots=8\n"
    assert made.meeting is not None
    assert (made.meeting.name, made.meeting.host_ip) == ("n1", "10.1.0.6")
    values = {variable.name: variable.value for variable in made.variables}
    assert values["NCCL_SOCKET_IFNAME"] == values["GLOO_SOCKET_IFNAME"] == "eth0"


def test_one_node_meets_nobody() -> None:
    assert (plan().num_nodes, plan().min_nodes, plan().meeting) == (1, 1, None)


def test_what_this_node_found_for_itself_is_not_for_the_others() -> None:
    made = plan_for(nodes(2), {"env": {"NCCL_DEBUG": "INFO"}})
    assert "SOCKET_IFNAME" not in made.deepspeed_env
    assert "NCCL_IB_DISABLE" not in made.deepspeed_env
    assert "NCCL_DEBUG=INFO\n" in made.deepspeed_env
    named = plan_for(nodes(2), {"env": {"NCCL_SOCKET_IFNAME": "eth"}})
    assert "NCCL_SOCKET_IFNAME=eth\n" in named.deepspeed_env


def test_the_plan_of_several_nodes_is_json() -> None:
    document = json.loads(json.dumps(plan_for(nodes((1, 2))).to_json()))
    assert document["meeting"]["wanted"] == {"min_nodes": 1, "max_nodes": 2}


def test_the_global_batch_is_that_of_the_full_size_and_stays() -> None:
    training = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
    made = plan_for(nodes((1, 3)), {"training": training})
    assert made.global_batch_size == 4 * 2 * 24
    assert [made.accumulation(ranks) for ranks in (24, 16, 8)] == [2, 3, 6]
    assert plan_for(nodes((1, 3)), {"training": training}, earlier_batch_size=100).global_batch_size == 100
    assert plan_for(nodes((1, 3)), {"training": training}, earlier_batch_size=100).accumulation(24) == 2


def test_the_stage_and_the_forecast_are_for_the_smallest_size() -> None:
    """7e9 parameters, all trained: 2P + 18P/G bytes fit 70 % of 80 GiB on four ranks and not on two."""
    seven_b = ModelFacts("/m", "llama", 7_000_000_000)
    made = {
        count: plan_for(nodes(count), {"method": "full"}, "2xA100", model=seven_b)
        for count in (1, 2, 4, (1, 4), (2, 4))
    }
    assert [m.zero_stage.value for m in made.values()] == [3, 2, 2, 3, 2]
    forecast = {count: m.memory_forecast_bytes for count, m in made.items()}
    assert forecast[(2, 4)] == forecast[2]
    assert forecast[(1, 4)] == forecast[1]


def test_with_a_known_shape_the_stage_is_the_first_that_fits_at_its_peak() -> None:
    """7.6e9 parameters, all trained on eight cards: 34 GiB each with one row of 2048 tokens; with eight rows 63 GiB, of
    which the logits are 28; with sixteen not even ZeRO-3 fits."""
    model = find_model("Qwen/Qwen2.5-7B")
    made = {
        rows: plan_for(nodes(1), {"method": "full", "training": {"per_device_train_batch_size": rows}}, model=model)
        for rows in (1, 8, 12, 32)
    }
    assert [plan.zero_stage.value for plan in made.values()] == [2, 2, 3, 3]
    assert "ZeRO-2 fits" in made[1].zero_stage.reason
    assert "ZeRO-2 would not fit" in made[12].zero_stage.reason
    assert "neither" in made[32].zero_stage.reason
    for plan in made.values():
        assert plan.memory_forecast is not None
        assert plan.memory_forecast_bytes == plan.memory_forecast.total_bytes
        (same,) = [
            one
            for one in plan.alternatives
            if one.zero_stage == plan.zero_stage.value and not one.offload_optimizer and not one.offload_params
        ]
        assert same.memory == plan.memory_forecast, "what is shown, decided by and checked is one number"
        assert all(one.fits or one.why for one in plan.alternatives)


def test_a_drill_may_name_a_rank_of_another_node() -> None:
    drill = {"drill": {"kill": {"rank": 15, "step": 5}}}
    assert plan_for(nodes(2), drill).full_world_size == 16
    with pytest.raises(UserError, match="8 rank"):
        plan_for(nodes(1, 0), drill)


def test_slots_of_the_hostfile_are_the_ranks() -> None:
    place = replace(nodes(2, platform="hostfile"), num_ranks_per_node=4)
    made = plan_for(place)
    assert (made.num_ranks.value, made.num_ranks.by) == (4, "job.yaml")
    assert "4 slot(s), of 8 visible GPUs" in " ".join(made.notes)
    assert plan_for(place, {"cluster": {"nproc_per_node": 2}}).num_ranks.value == 2
    with pytest.raises(PreflightRefused, match="slots of the hostfile is 4, but 2 GPU"):
        plan_for(place, {"cluster": {"hostfile": "/job/hostfile"}}, "2xA100")


def test_a_head_that_is_no_node_plans_for_the_others() -> None:
    """A login machine without GPUs: what it lacks says nothing about the nodes."""
    made = plan_for(nodes(2, None), {"precision": "fp16", "cluster": {"nproc_per_node": 8}}, "none")
    assert made.is_head_only
    assert made.meeting is None
    assert made.precision.value == "fp16"
    assert made.hostfile == "10.1.0.5 slots=8\n10.1.0.6 slots=8\n"
    assert "none of the nodes" in " ".join(made.notes)
    with pytest.raises(PreflightRefused, match="fp16"):
        plan_for(nodes(2, 0), {"precision": "fp16"}, "none")


@pytest.mark.parametrize(
    ("place", "launcher", "said"),
    [
        (nodes(2, None), "none", "cluster.launcher: none leaves it to you"),
        (Place("MPIJob", 2, None), "auto", "their names are not known here"),
    ],
)
def test_a_head_that_can_start_nobody_is_refused(place: Place, launcher: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        plan_for(place, {"cluster": {"launcher": launcher}})


@pytest.mark.parametrize(
    ("place", "cluster", "said"),
    [
        (Place("DLC", 2, 1, master_addr="dlc1-master-0"), {}, "no address is known yet for dlc1-master-0"),
        (Place("DLC", 2, 1, master_addr="10.1.0.5"), {}, "DLC does not tell the other nodes' addresses"),
        (replace(nodes(4), num_nodes=2), {}, "4 hosts are named and at most 2 train at a time"),
        (nodes(2), {"gather_seconds": 80, "wait_seconds": 100}, "gather_seconds: 50 s"),
    ],
)
def test_what_is_not_as_one_might_think_is_noted(place: Place, cluster: dict[str, Any], said: str) -> None:
    assert said in " ".join(plan_for(place, {"cluster": cluster}).notes)
    assert said not in " ".join(plan_for(nodes(2)).notes)


# -- what ranks are told -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("targets", [None, "all-linear", ("q_proj", "v_proj")])
def test_a_spec_is_read_back_as_it_was_written(targets: Any) -> None:
    spec = RankSpec(
        output_dir="/run/保险",
        run_id="feedface",
        generation=3,
        config=config().model_dump(mode="json"),
        config_sha="0123456789abcdef",
        device="cpu",
        precision="fp32",
        zero_stage=2,
        gradient_checkpointing=False,
        lora_target_modules=targets,
        ds_config={"zero_optimization": {"stage": 2}},
        identity={"lora.target_modules": ["q_proj"]},
        global_batch_size=64,
        resume_from="/run/checkpoint-10",
        memory_every=5,
        drills=(Drill(0, 1, 8), Drill(1, 0, 9, "SIGSTOP", "micro_batch", 2)),
    )
    assert RankSpec.from_json(spec.to_json()) == spec
    assert spec.output_path == Path("/run/保险")
