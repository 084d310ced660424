"""The whole plan of a start, as data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from launcher.errors import NotInThisVersion, UserError
from launcher.plan.ds_config import make_ds_config, stage_of
from launcher.plan.launch_plan import LaunchPlan, make_plan
from launcher.plan.model_facts import ModelFacts
from launcher.plan.network import choose_network
from launcher.plan.spec import Drill, RankSpec
from launcher.platforms.detect import Place
from tests.unit.plan.plan_inputs import config, host, loaded

ONE = Place("one machine", 1, 0)
MODEL = ModelFacts("/m", "llama", 1_000_000_000)


def plan(
    more: dict[str, Any] | None = None, cards: str = "8xA100", place: Place = ONE, environ: dict[str, str] | None = None
) -> LaunchPlan:
    job, facts = loaded(more), host(cards)
    return make_plan(job, facts, MODEL, place, choose_network(job.config, facts), environ or {})


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
        ({"cluster": {"nodes": 2}}, "cluster"),
        ({"cluster": {"nodes": "1:2"}}, "cluster"),
        ({"cluster": {"hosts": ["a", "b"]}}, "cluster"),
        ({"monitor": {"prometheus_port": 9400}}, "monitor.prometheus_port"),
        ({"checkpoint": {"memory": "on"}}, "checkpoint.memory"),
        ({"restart": {"hang_seconds": 60}}, "restart.hang_seconds"),
    ],
)
def test_what_is_not_in_this_version_is_said_not_ignored(more: dict[str, Any], key: str) -> None:
    with pytest.raises(NotInThisVersion, match="not in this version") as caught:
        plan(more)
    assert key in str(caught.value)
    assert "/jobs/job.yaml" in str(caught.value)
    assert caught.value.exit_code == 2


def test_nodes_that_the_platform_started_are_not_left_idle() -> None:
    with pytest.raises(NotInThisVersion, match=r"Slurm has started 2 nodes \(SLURM_NNODES=2\)"):
        plan(place=Place("Slurm", 2, 0, evidence=(("SLURM_NNODES", "2"),)))


# -- network -----------------------------------------------------------------------------------------------------------


def test_one_node_stays_on_the_loopback_and_its_hostfile_names_a_real_address() -> None:
    network = choose_network(config(), host())
    assert (network.interface, network.master_addr, network.node_ip) == ("lo", "127.0.0.1", "10.1.0.5")


def test_a_node_without_network_is_itself() -> None:
    assert choose_network(config(), host(nics=())).node_ip == "127.0.0.1"


def test_an_interface_that_was_asked_for() -> None:
    network = choose_network(config({"cluster": {"interface": "eth0"}}), host())
    assert (network.interface, network.master_addr) == ("eth0", "10.1.0.5")


@pytest.mark.parametrize(("name", "said"), [("eth9", "eth9 is not there"), ("eth2", "eth2 has no IPv4 address")])
def test_an_interface_that_cannot_be_used_names_those_that_can(name: str, said: str) -> None:
    with pytest.raises(UserError) as caught:
        choose_network(config({"cluster": {"interface": name}}), host())
    assert said in str(caught.value)
    assert "eth0 (10.1.0.5)" in str(caught.value)


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
        resume_from="/run/checkpoint-10",
        drills=(Drill(0, 1, 8), Drill(1, 0, 9, "SIGSTOP")),
    )
    assert RankSpec.from_json(spec.to_json()) == spec
    assert spec.output_path == Path("/run/保险")
