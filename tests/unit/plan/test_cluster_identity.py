"""Two nodes are let into one generation when they would train the same thing; else the difference is readable."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from launcher.cluster.codec import from_json, to_json
from launcher.cluster.model import Identity
from launcher.plan.cluster_identity import cluster_identity
from launcher.plan.launch_plan import make_plan
from launcher.plan.model_facts import ModelFacts
from launcher.plan.network import choose_network
from launcher.platforms.place import Place
from tests.unit.plan.plan_inputs import host, loaded

MODEL = ModelFacts("/m", "llama", 1_000_000_000)
VERSIONS = {
    "ftlaunch": "0.2.0",
    "torch": "2.13.0",
    "torch_cuda": "13.0",
    "deepspeed": "0.19.8",
    "transformers": "5.24.0",
    "peft": "0.21.0",
    "accelerate": "1.15.0",
    "bitsandbytes": "0.49.0",
    "python": "3.11.4",
    "driver": "580.1",
    "kernel": "6.1",
    "glibc": "2.36",
}


def identity(
    more: dict[str, Any] | None = None,
    cards: str = "8xA100",
    *,
    rank: int = 0,
    model: ModelFacts = MODEL,
    folder: str = "f00d",
    environ: dict[str, str] | None = None,
    versions: dict[str, str] | None = None,
    rdma: tuple[str, ...] = (),
) -> Identity:
    place = Place("cluster.hosts", 2, rank, hosts=("10.1.0.5", "10.1.0.6"), master_addr="10.1.0.5")
    job, facts = loaded(more), host(cards, versions=VERSIONS | (versions or {}), rdma=rdma)
    network = choose_network(job.config, facts, Place("one machine", 1, 0))
    plan = make_plan(job, facts, model, place, network, environ or {})
    return cluster_identity(job, plan, facts, folder)


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"cards": "8xV100"}, ["precision: bf16 here, fp16 there"]),
        (
            {"cards": "4xA100"},
            ["global batch: 128 here, 64 there", "ranks on each node: 8 here, 4 there", "ranks at full size"],
        ),
        ({"cards": "none"}, ["device: cuda here, cpu there", "NCCL_IB_DISABLE: 1 here, none there"]),
        ({"versions": {"torch": "2.12.1"}}, ["torch: 2.13.0 here, 2.12.1 there"]),
        ({"versions": {"torch_cuda": "12.8"}}, ["CUDA of torch: 13.0 here, 12.8 there"]),
        ({"versions": {"python": "3.12.4"}}, ["Python: 3.11 here, 3.12 there"]),
        ({"folder": "beef"}, ["output folder: f00d here, beef there"]),
        ({"rdma": ("mlx5_0",)}, ["NCCL_IB_DISABLE: 1 here, unset there"]),
        ({"model": ModelFacts("/m", "gpt2", 1_000_000_000)}, ["LoRA target modules: q_proj", "all-linear there"]),
        ({"model": ModelFacts("/m", "llama", 7)}, ["parameters of the model: 1000000000 here, 7 there"]),
        ({"more": {"output_dir": "/elsewhere"}}, ["job.yaml, output_dir: /run here, /elsewhere there"]),
        ({"more": {"training": {"learning_rate": 0.1}}}, ["job.yaml, training.learning_rate: none here, 0.1 there"]),
        ({"more": {"lora": {"r": 8}}}, ["job.yaml, lora.r: 16 here, 8 there"]),
        ({"more": {"data": {"train": ["/b.jsonl"]}}}, ['job.yaml, data.train: ["/a.jsonl"] here, ["/b.jsonl"] there']),
        ({"more": {"env": {"NCCL_ALGO": "Ring"}}}, ["job.yaml, env.NCCL_ALGO: none here, "]),
        ({"more": {"cluster": {"agent_port": 4000}}}, ["agent port: 29430 here, 4000 there"]),
        ({"more": {"deepspeed": {"stage": 3}}}, ["ZeRO stage: 2 here, 3 there"]),
        ({"more": {"method": "full"}}, ["method: lora here, full there"]),
    ],
)
def test_a_difference_is_said_in_words(other: dict[str, Any], said: list[str]) -> None:
    differences = "\n".join(identity().differences(identity(**other)))
    for words in said:
        assert words in differences


@pytest.mark.parametrize(
    "other",
    [
        {"rank": 1},
        {"versions": {"driver": "590.0", "kernel": "5.15", "glibc": "2.31", "python": "3.11.9"}},
        {"versions": {"bitsandbytes": "0.50"}},  # method: lora does not use it
        {"more": {"cluster": {"interface": "eth0"}}},
        {"more": {"cluster": {"launcher": "none"}}},
        {"more": {"cluster": {"hosts": ["10.1.0.5", "10.1.0.6"], "nodes": 1}}},
        {"more": {"check": {"skip": ["shm.size"]}}},
        {"environ": {"NCCL_DEBUG": "INFO"}},
    ],
)
def test_what_may_differ_does(other: dict[str, Any]) -> None:
    assert identity().differences(identity(**other)) == []


def test_bitsandbytes_counts_where_it_is_used() -> None:
    mine, theirs = (
        identity({"method": "qlora"}, versions={"bitsandbytes": version}) for version in ("0.49.0", "0.50.0")
    )
    assert mine.differences(theirs) == ["bitsandbytes: 0.49.0 here, 0.50.0 there"]


def test_it_travels() -> None:
    mine = identity()
    assert from_json(Identity, to_json(mine)) == mine


def test_a_key_alone_names_the_difference_and_no_digest_of_the_whole() -> None:
    found = identity({"training": {"learning_rate": 0.02}}).differences(identity({"training": {"learning_rate": 0.01}}))
    assert found == ["job.yaml, training.learning_rate: 0.02 here, 0.01 there"]


def test_long_values_are_shortened_and_still_differ() -> None:
    mine, theirs = (identity({"data": {"train": ["/a.jsonl"], "system_prompt": "x" * 200 + end}}) for end in "ab")
    (words,) = mine.differences(theirs)
    assert words.startswith("job.yaml, data.system_prompt: xxx")
    assert max(len(value) for value in mine.contract.values()) <= 60


def test_a_line_break_does_not_break_the_message() -> None:
    said = identity({"data": {"train": ["/a.jsonl"], "system_prompt": "one\ntwo"}}).differences(identity())
    assert said == ['job.yaml, data.system_prompt: "one\\ntwo" here, none there']


@pytest.mark.parametrize(
    "secret",
    [
        {"cluster": {"token": "t0ps3cret"}},
        {"env": {"HF_TOKEN": "t0ps3cret"}},
        {"env": {"PLAIN": "t0ps3cret"}},
        {"model": {"path": "https://me:t0ps3cret@host/model"}},
    ],
)
def test_no_secret_travels_with_it(secret: dict[str, Any]) -> None:
    assert "t0ps3cret" not in repr(identity(secret))


def test_the_token_is_no_part_of_it() -> None:
    """Who has another one is not heard at all; and its digest is nobody's business."""
    assert identity({"cluster": {"token": "a"}}) == identity()


def test_a_changed_deepspeed_json_of_ones_own_is_noticed(tmp_path: Any) -> None:
    found = []
    for bucket in (1000, 2000):
        (tmp_path / "ds.json").write_text(f'{{"zero_optimization": {{"stage": 2, "reduce_bucket_size": {bucket}}}}}')
        found.append(identity({"deepspeed": {"config": str(tmp_path / "ds.json")}}))
    assert found[0].differences(found[1])[0].startswith("DeepSpeed JSON: ")


def test_every_value_is_text() -> None:
    mine = dataclasses.asdict(identity())
    values = [*mine["versions"].values(), *mine["contract"].values()]
    assert all(isinstance(value, str) and value for value in values)
