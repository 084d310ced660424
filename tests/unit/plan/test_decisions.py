"""Each choice with its reason, over a table of hosts and jobs."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from launcher.errors import PreflightRefused, UserError
from launcher.host.facts import Cpu
from launcher.plan.decisions import (
    choose_device,
    choose_gradient_checkpointing,
    choose_lora_targets,
    choose_num_ranks,
    choose_precision,
    choose_zero_stage,
    require_methods_fit,
    static_bytes,
)
from launcher.plan.model_facts import ModelFacts
from tests.unit.plan.plan_inputs import GIB, config, host

BF16_CPU = Cpu("Sapphire Rapids", 32, 16, flags_bf16=True)
SEVEN_B = ModelFacts("/m", model_type="llama", num_parameters=7_000_000_000)


@pytest.mark.parametrize(
    ("cards", "visible", "device", "ranks"),
    [
        ("none", None, "cpu", 1),
        ("1xA100", None, "cuda", 1),
        ("8xA100", None, "cuda", 8),
        ("8xA100", (2, 5), "cuda", 2),
        ("8xA100", (), "cpu", 1),
    ],
)
def test_device_and_ranks(cards: str, visible: tuple[int, ...] | None, device: str, ranks: int) -> None:
    facts = host(cards) if visible is None else host(cards, visible_gpus=visible)
    chosen = choose_device(facts)
    assert chosen.value == device
    assert choose_num_ranks(config(), facts, device).value == ranks


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        (host("none"), "NVML is not installed"),
        (host("none", nvml="ok"), "no GPU"),
        (host("2xA100", visible_gpus=()), "none visible"),
        (host("4xA100+2xV100"), "6 GPUs visible: 4 x A100, 2 x V100"),
    ],
)
def test_the_device_says_why(facts: Any, reason: str) -> None:
    assert reason in choose_device(facts).reason


@pytest.mark.parametrize(
    ("cards", "visible", "precision", "reason"),
    [
        ("8xA100", None, "bf16", "8.0 or more"),
        ("8xV100", None, "fp16", "8 x V100"),
        ("1xT4", None, "fp16", "1 x T4"),
        ("4xA100+4xV100", None, "fp16", "4 x V100"),
        ("4xA100+4xV100", (0, 3), "bf16", "8.0 or more"),
        ("4xA100+4xV100", (3, 4), "fp16", "1 x V100"),
        ("2xH100", None, "bf16", "8.0 or more"),
    ],
)
def test_precision_of_gpus(cards: str, visible: tuple[int, ...] | None, precision: str, reason: str) -> None:
    facts = host(cards) if visible is None else host(cards, visible_gpus=visible)
    chosen = choose_precision(config(), facts, "cuda")
    assert (chosen.value, chosen.by) == (precision, "ftlaunch")
    assert reason in chosen.reason


def test_precision_of_cpus() -> None:
    assert choose_precision(config(), host(), "cpu").value == "fp32"
    assert choose_precision(config(), host(cpu=BF16_CPU), "cpu").value == "bf16"


@pytest.mark.parametrize(
    ("asked", "cards", "device"),
    [("fp16", "8xA100", "cuda"), ("fp32", "8xV100", "cuda"), ("bf16", "1xA100", "cuda"), ("bf16", "none", "cpu")],
)
def test_the_precision_that_was_asked_for(asked: str, cards: str, device: str) -> None:
    chosen = choose_precision(config({"precision": asked}), host(cards), device)
    assert (chosen.value, chosen.by) == (asked, "job.yaml")


@pytest.mark.parametrize(
    ("asked", "cards", "device", "said"),
    [
        ("bf16", "8xV100", "cuda", "8 x V100 has compute capability 7.0"),
        ("bf16", "4xA100+4xV100", "cuda", "4 x V100"),
        ("fp16", "none", "cpu", "CPUs do not train in fp16"),
    ],
)
def test_a_precision_that_the_node_does_not_have_is_refused(asked: str, cards: str, device: str, said: str) -> None:
    with pytest.raises(PreflightRefused) as caught:
        choose_precision(config({"precision": asked}), host(cards), device)
    assert said in str(caught.value)
    assert "precision: auto" in str(caught.value), "the way out"
    assert caught.value.exit_code == 3


@pytest.mark.parametrize(
    ("method", "cards", "parameters", "stage"),
    [
        ("lora", "8xA100", 7e9, 2),
        ("qlora", "1xV100", 7e9, 2),
        ("lora", "8xV100", 7e9, 3),
        ("full", "8xA100", 1e9, 2),
        ("full", "8xA100", 70e9, 3),
        ("full", "1xA100", 7e9, 3),
        ("full", "1xA100+7xV100", 3e9, 3),
    ],
)
def test_zero_stage_2_where_it_fits_on_the_smallest_card(
    method: str, cards: str, parameters: float, stage: int
) -> None:
    facts = host(cards)
    model = dataclasses.replace(SEVEN_B, num_parameters=int(parameters))
    chosen = choose_zero_stage(config({"method": method}), facts, model, "cuda", len(facts.gpus))
    assert chosen.value == stage
    assert "GiB" in chosen.reason


@pytest.mark.parametrize(("asked", "by"), [(0, "job.yaml"), (1, "job.yaml"), (3, "job.yaml"), ("auto", "ftlaunch")])
def test_zero_stage_asked_for_or_unknown_model(asked: Any, by: str) -> None:
    chosen = choose_zero_stage(config({"deepspeed": {"stage": asked}}), host("1xA100"), ModelFacts("hub/id"), "cuda", 1)
    assert (chosen.value, chosen.by) == (2 if asked == "auto" else asked, by)


def test_zero_stage_on_cpus_is_2() -> None:
    assert choose_zero_stage(config({"method": "full"}), host(), SEVEN_B, "cpu", 2).value == 2


def test_static_bytes_are_deepspeeds_own_estimates() -> None:
    """Its memory estimators: 2P + 18P/G bytes a card for ZeRO-2 with all weights trained, 18P/G for ZeRO-3."""
    assert static_bytes("full", 1000, 4, zero_stage=2) == 2000 + 18 * 1000 / 4
    assert static_bytes("full", 1000, 4, zero_stage=3) == 18 * 1000 / 4


@pytest.mark.parametrize("method", ["full", "lora", "qlora"])
def test_stage_3_and_more_ranks_never_need_more(method: str) -> None:
    for ranks in (1, 2, 8, 64):
        two, three = (static_bytes(method, 7_000_000_000, ranks, zero_stage=stage) for stage in (2, 3))
        assert 0 < three <= two
        assert static_bytes(method, 7_000_000_000, 2 * ranks, zero_stage=2) <= two


def test_an_adapter_on_a_4_bit_base_needs_least() -> None:
    qlora, lora, full = (static_bytes(m, 7_000_000_000, 1, zero_stage=2) for m in ("qlora", "lora", "full"))
    assert 3 * GIB < qlora < lora < full


@pytest.mark.parametrize(
    ("training", "device", "expected"),
    [
        ({}, "cuda", (True, "ftlaunch")),
        ({}, "cpu", (False, "ftlaunch")),
        ({"gradient_checkpointing": False}, "cuda", (False, "job.yaml")),
        ({"gradient_checkpointing": True}, "cpu", (True, "job.yaml")),
    ],
)
def test_gradient_checkpointing(training: dict[str, Any], device: str, expected: tuple[bool, str]) -> None:
    chosen = choose_gradient_checkpointing(config({"training": training}), device)
    assert (chosen.value, chosen.by) == expected


def test_lora_targets() -> None:
    known = choose_lora_targets(config(), SEVEN_B)
    assert known.value is not None
    assert "q_proj" in known.value
    assert "down_proj" in known.value
    assert "lm_head" not in known.value
    assert choose_lora_targets(config(), ModelFacts("hub/id")).value == "all-linear"
    asked = choose_lora_targets(config({"lora": {"target_modules": ["q_proj"]}}), SEVEN_B)
    assert (asked.value, asked.by) == (("q_proj",), "job.yaml")
    assert choose_lora_targets(config({"lora": {"target_modules": "all-linear"}}), SEVEN_B).by == "job.yaml"
    assert choose_lora_targets(config({"method": "full"}), SEVEN_B).value is None


def test_more_ranks_than_gpus_are_refused_before_anything_starts() -> None:
    with pytest.raises(PreflightRefused, match="nproc_per_node is 4, but 2 GPU"):
        require_methods_fit(config(), "cuda", 4, host("2xA100"))
    require_methods_fit(config(), "cuda", 2, host("2xA100"))
    require_methods_fit(config(), "cpu", 4, host())


def test_a_drill_for_a_rank_that_is_not_there_is_a_mistake() -> None:
    drill = config({"drill": {"kill": {"rank": 2, "step": 5}}})
    with pytest.raises(UserError, match=r"drill.kill.rank is 2.*2 rank\(s\): 0 to 1"):
        require_methods_fit(drill, "cpu", 2, host())
    require_methods_fit(drill, "cpu", 3, host())
