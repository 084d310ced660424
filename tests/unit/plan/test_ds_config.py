"""The user's own DeepSpeed JSON, where the number of ranks changes under it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from launcher.config.models import JobConfig
from launcher.errors import UserError
from launcher.plan.ds_config import for_global_batch, read_own
from launcher.plan.spec import global_batch_of

SIZES = {"train_batch_size": 24, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3}


def own_json(folder: Path, content: dict[str, Any]) -> dict[str, Any]:
    path = folder / "own.json"
    path.write_text(json.dumps(content), "utf-8")
    training = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 3}
    job = {"output_dir": "/run", "model": {"path": "/m"}, "data": {"train": ["/a.jsonl"]}, "training": training}
    return read_own(path, JobConfig.model_validate(job))


def test_numbers_that_are_right_at_full_size_follow_the_ranks(tmp_path: Path) -> None:
    own = own_json(tmp_path, {**SIZES, "zero_optimization": {"stage": 2}})
    assert for_global_batch(own, 24) == {**dict.fromkeys(SIZES, "auto"), "zero_optimization": {"stage": 2}}
    assert for_global_batch({"zero_optimization": {"stage": 2}}, 24) == {"zero_optimization": {"stage": 2}}


def test_a_batch_that_is_not_the_runs_is_an_error_with_both_numbers(tmp_path: Path) -> None:
    own = own_json(tmp_path, {**SIZES, "train_batch_size": 48})
    with pytest.raises(UserError, match=r"train_batch_size is 48, but an optimizer step of this run takes 24 samples"):
        for_global_batch(own, 24)


@pytest.mark.parametrize(
    ("content", "key"),
    [
        ({"zero_optimization": {"stage": 2, "elastic_checkpoint": True}}, "elastic_checkpoint"),
        ({"checkpoint": {"load_universal": True}}, "load_universal"),
    ],
)
def test_what_would_save_or_load_other_checkpoints_is_refused(
    tmp_path: Path, content: dict[str, Any], key: str
) -> None:
    with pytest.raises(UserError, match=f"remove {key}"):
        own_json(tmp_path, content)
    assert own_json(tmp_path, {"zero_optimization": {"stage": 2, "elastic_checkpoint": False}})


@pytest.mark.parametrize("key", ["data_efficiency", "curriculum_learning"])
def test_what_would_choose_samples_or_lengths_by_itself_is_refused(tmp_path: Path, key: str) -> None:
    with pytest.raises(UserError, match=f"remove {key}"):
        own_json(tmp_path, {key: {"enabled": True}})
    assert own_json(tmp_path, {key: {"enabled": False}})


def test_the_global_batch_is_that_of_the_full_size() -> None:
    assert global_batch_of({"per_device_train_batch_size": 2, "gradient_accumulation_steps": 3}, 4) == 24
    assert global_batch_of({}, 16) == 128, "TrainingArguments' defaults: 8 samples, no accumulation"
