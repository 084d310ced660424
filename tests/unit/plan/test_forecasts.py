"""What checkpoints, the memory tier and the ranks take, against checkpoints that were really written."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from launcher.host.compute import Memory
from launcher.plan.forecasts import (
    SMALL_FILES_BYTES,
    CheckpointSize,
    NodeForecast,
    checkpoint_size,
    choose_memory_tier,
    forecast_node,
    memory_tier_bytes,
    trained_parameters,
)
from launcher.plan.model_facts import ModelFacts
from tests.unit.plan.plan_inputs import GIB, config

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
SMOLLM2 = ModelFacts("/m", "llama", 134_515_008, 576, 30, 49152, 576, 192, 1536, ties_embeddings=True)
MID = ModelFacts("/m", "llama", 17_109_504, 512, 4, 8000, 512, 128, 1024)
MID_TIED = replace(MID, num_parameters=17_109_504 - 8000 * 512, ties_embeddings=True)


# -- what is trained ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "more", "targets", "trained"),
    [
        (SMOLLM2, {"method": "full"}, None, 134_515_008),
        (SMOLLM2, {}, ALL, 4_884_480),  # as PEFT counts them
        (SMOLLM2, {}, "all-linear", 4_884_480),
        (SMOLLM2, {"lora": {"r": 8}}, ALL, 2_442_240),
        (SMOLLM2, {}, ("q_proj", "v_proj"), 921_600),
        (SMOLLM2, {"lora": {"modules_to_save": ["lm_head"]}}, ALL, 4_884_480 + 576 * 49152),
        (SMOLLM2, {}, ("query_key_value",), 1_345_150),  # a hundredth
        (ModelFacts("/m", num_parameters=7_000_000_000), {}, ALL, 70_000_000),
        (ModelFacts("hub/id"), {}, ALL, None),
    ],
)
def test_trained_parameters(model: ModelFacts, more: dict[str, Any], targets: Any, trained: int | None) -> None:
    assert trained_parameters(config(more), model, targets) == trained


# -- a checkpoint ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "method", "stage", "precision", "shards", "states", "export"),
    [  # bytes that DeepSpeed 0.19.8 and Transformers 5.24 wrote for two ranks, in units of 10 kB
        (MID, "full", 2, "fp32", 2 * 10266, 6845, 6844),
        (MID, "full", 3, "fp32", 2 * 10266, 0, 6844),
        (MID, "full", 0, "fp32", 20537 - 6844, 6844, 6844),
        (MID, "full", 1, "bf16", 2 * 10266, 3423, 3422),
        (MID, "full", 0, "bf16", 23960 - 3422, 3422, 3422),
        (MID_TIED, "lora", 2, "fp32", 2 * 305, 1846, 204),
        (MID_TIED, "lora", 3, "fp32", 2 * 305, 0, 204),
        (MID, "lora", 2, "bf16", 2 * 305, 106, 102),
        (SMOLLM2, "lora", 2, "fp32", 2 * 2933, 13310, 1959),
    ],
)
def test_a_checkpoint_is_as_large_as_those_that_were_written(
    model: ModelFacts, method: str, stage: int, precision: str, shards: int, states: int, export: int
) -> None:
    size = checkpoint_size(config({"method": method}), model, ALL, zero_stage=stage, precision=precision)
    assert size is not None
    assert size.optimizer_bytes == pytest.approx(shards * 1e4, rel=0.01)
    assert size.states_bytes == pytest.approx(states * 1e4, rel=0.05)  # a state dict's names count in small ones
    assert size.export_bytes - SMALL_FILES_BYTES == pytest.approx(export * 1e4, rel=0.05)
    assert size.total_bytes == size.optimizer_bytes + size.states_bytes + size.export_bytes


# -- the memory tier ---------------------------------------------------------------------------------------------------

SIZE = CheckpointSize(optimizer_bytes=80 * GIB, states_bytes=8 * GIB, export_bytes=2 * GIB, zero_stage=2)


@pytest.mark.parametrize(
    ("nodes", "peers", "gib"),
    [
        ((1, 1), True, 4 * 90),  # three slots and a copy for a resume
        ((2, 2), False, 4 * 50),
        ((2, 2), True, 8 * 50),  # and four of the neighbour's
        ((8, 8), True, 8 * 20),
        ((1, 8), True, 8 * 50),  # two nodes with the neighbour's are more than all of the optimizer on one
        ((1, 8), False, 4 * 90),
    ],
)
def test_the_memory_tier_at_the_size_of_the_job_that_needs_most(nodes: tuple[int, int], peers: bool, gib: int) -> None:
    needed = memory_tier_bytes(SIZE, 8, min_nodes=nodes[0], max_nodes=nodes[1], peers=peers)
    assert needed == pytest.approx(gib * GIB, rel=1e-6)


def test_with_two_nodes_or_one_the_neighbours_copies_may_weigh_more_than_the_larger_share() -> None:
    size = replace(SIZE, optimizer_bytes=GIB)
    assert memory_tier_bytes(size, 8, min_nodes=1, max_nodes=2, peers=True) > 6 * 10 * GIB


def test_without_zero_one_rank_holds_the_whole_optimizer() -> None:
    whole = replace(SIZE, zero_stage=0)
    needed = memory_tier_bytes(whole, 8, min_nodes=2, max_nodes=2, peers=False)
    assert needed == pytest.approx(4 * 90 * GIB, rel=1e-6)


# -- whether it is used ------------------------------------------------------------------------------------------------

FORECAST = NodeForecast(ranks_bytes=20 * GIB, tier_bytes=70 * GIB, checkpoint_bytes=1, final_bytes=1)


def memory(usable_gib: float, limit_gib: int | None = None) -> Memory:
    return Memory(1000 * GIB, int(usable_gib * GIB), None if limit_gib is None else limit_gib * GIB, 0)


@pytest.mark.parametrize(
    ("asked", "there", "forecast", "used"),
    [
        ("auto", memory(101), FORECAST, True),
        ("auto", memory(99), FORECAST, False),
        ("auto", memory(500, limit_gib=99), FORECAST, False),  # what the cgroup allows, not what the machine has
        ("auto", memory(500, limit_gib=101), FORECAST, True),
        ("auto", memory(1), NodeForecast(None, None, None, None), True),
        ("auto", None, FORECAST, True),
        ("off", memory(500), FORECAST, False),
        ("on", memory(1), FORECAST, True),  # preflight refuses the node
        (5, memory(1), FORECAST, True),
    ],
)
def test_whether_checkpoints_are_kept_in_memory(
    asked: Any, there: Memory | None, forecast: NodeForecast, used: bool
) -> None:
    chosen = choose_memory_tier(config({"checkpoint": {"memory": asked}}), there, forecast)
    assert chosen.value is used
    assert chosen.by == ("ftlaunch" if asked == "auto" else "job.yaml")


def test_the_sizes_are_said() -> None:
    chosen = choose_memory_tier(config(), memory(99), FORECAST)
    assert "needs 70.0 GiB on this node, 79.0 GiB are free" in chosen.reason


# -- the ranks ---------------------------------------------------------------------------------------------------------


def ranks_bytes(more: dict[str, Any], device: str, **changes: Any) -> int | None:
    given: dict[str, Any] = {"precision": "bf16", "zero_stage": 2, "num_ranks": 8, "nodes": (1, 1), "card_bytes": None}
    model = ModelFacts("/m", "llama", 8 * GIB)
    return forecast_node(config(more), model, ALL, device=device, **given | changes).ranks_bytes


def test_what_the_ranks_take() -> None:
    assert ranks_bytes({"method": "full"}, "cuda") == 24 * GIB
    offload = {"method": "full", "deepspeed": {"stage": 2, "offload_optimizer": True}}
    assert ranks_bytes(offload, "cuda") == (24 + 16 * 8) * GIB
    assert ranks_bytes(offload, "cuda", nodes=(4, 4)) == (24 + 16 * 2) * GIB
    assert ranks_bytes({"method": "full"}, "cpu", precision="fp32", num_ranks=2) == 64 * GIB
    assert ranks_bytes({"method": "full"}, "cpu", num_ranks=2, card_bytes=40 * GIB) == 80 * GIB
