from __future__ import annotations

from typing import Any

import pytest

from launcher.checkpoint.identity import differences, run_identity
from launcher.config.models import JobConfig

BASE: dict[str, Any] = {"output_dir": "/run", "model": {"path": "/m"}, "data": {"train": ["/a.jsonl"]}}


def identity(more: dict[str, Any] | None = None, *, stage: int = 2, precision: str = "bf16") -> dict[str, Any]:
    return run_identity(JobConfig.model_validate(BASE | (more or {})), zero_stage=stage, precision=precision)


@pytest.mark.parametrize(
    ("more", "key"),
    [
        ({"model": {"path": "/other"}}, "model.path"),
        ({"model": {"path": "/m", "revision": "v2"}}, "model.revision"),
        ({"model": {"path": "/m", "gguf_file": "q4.gguf"}}, "model.gguf_file"),
        ({"method": "qlora"}, "method"),
        ({"lora": {"r": 8}}, "lora.r"),
        ({"lora": {"target_modules": ["q_proj"]}}, "lora.target_modules"),
        ({"data": {"train": ["/b.jsonl"]}}, "data.train"),
        ({"data": {"train": ["/a.jsonl"], "format": "qa"}}, "data.format"),
        ({"data": {"train": ["/a.jsonl"], "max_length": 512}}, "data.max_length"),
        ({"data": {"train": ["/a.jsonl"], "packing": True}}, "data.packing"),
        ({"data": {"train": ["/a.jsonl"], "train_on_prompt": True}}, "data.train_on_prompt"),
        ({"data": {"train": ["/a.jsonl"], "system_prompt": "Be brief."}}, "data.system_prompt"),
        ({"training": {"seed": 7}}, "training.seed"),
        ({"training": {"per_device_train_batch_size": 2}}, "training.per_device_train_batch_size"),
        ({"training": {"gradient_accumulation_steps": 4}}, "training.gradient_accumulation_steps"),
        ({"training": {"optim": "sgd"}}, "training.optim"),
    ],
)
def test_a_setting_that_makes_it_another_run_is_told_by_its_key(more: dict[str, Any], key: str) -> None:
    assert key in [changed for changed, _, _ in differences(identity(), identity(more))]


def test_the_bits_of_the_base_model_are_part_of_a_qlora_run() -> None:
    nf4, fp4 = ({"method": "qlora", "qlora": {"quant_type": kind}} for kind in ("nf4", "fp4"))
    assert differences(identity(nf4), identity(fp4))


def test_stage_and_precision_count_as_they_were_decided() -> None:
    assert differences(identity(stage=2), identity(stage=3)) == [("deepspeed.stage", 2, 3)]
    assert differences(identity(precision="bf16"), identity(precision="fp16")) == [("precision", "bf16", "fp16")]


@pytest.mark.parametrize(
    "more",
    [
        {"training": {"max_steps": 999}},
        {"training": {"num_train_epochs": 9}},
        {"training": {"logging_steps": 1}},
        {"checkpoint": {"every_steps": 7, "keep": 1}},
        {"spot": {"exit_code": 143}},
        {"restart": {"max_without_progress": 9}},
        {"output_dir": "/elsewhere"},
        {"env": {"NCCL_DEBUG": "INFO"}},
        {"drill": {"kill": {"rank": 0, "step": 3}}},
        {"cluster": {"master_port": 29500}},
    ],
)
def test_what_may_change_between_two_starts_of_one_run(more: dict[str, Any]) -> None:
    assert differences(identity(), identity(more)) == []


def test_a_default_written_out_is_the_same_run() -> None:
    assert not differences(
        identity(),
        identity({"training": {"seed": 42, "per_device_train_batch_size": 8}, "lora": {"r": 16}, "method": "lora"}),
    )


def test_full_training_has_no_adapter_in_its_identity() -> None:
    assert not [key for key in identity({"method": "full"}) if key.startswith("lora.")]


def test_a_key_that_only_one_side_knows_is_not_compared() -> None:
    """A newer ftlaunch records more: a run in progress must survive the upgrade."""
    assert differences({"a": 1, "b": 2}, {"b": 2, "c": 3}) == []
    assert differences({"a": 1, "b": 2}, {"b": 3, "c": 3}) == [("b", 2, 3)]
