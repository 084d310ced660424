"""The DeepSpeed JSON: the user's own where given, else one for the chosen stage and precision."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from launcher.config.models import JobConfig
from launcher.errors import UserError


def make_ds_config(config: JobConfig, *, zero_stage: int, device: str) -> dict[str, Any]:
    """`"auto"` values are filled in by Transformers from TrainingArguments, so that the two can never disagree."""
    if config.deepspeed.config is not None:
        return read_own(Path(config.deepspeed.config), config)
    zero: dict[str, Any] = {"stage": zero_stage}
    if zero_stage >= 1:
        zero.update(overlap_comm=device == "cuda", contiguous_gradients=True)
    if zero_stage == 3:
        zero.update(
            stage3_gather_16bit_weights_on_model_save=True,
            stage3_prefetch_bucket_size="auto",
            stage3_param_persistence_threshold="auto",
            reduce_bucket_size="auto",
        )
    if config.deepspeed.offload_optimizer:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": device == "cuda"}
    return {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "train_batch_size": "auto",
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
        "fp16": {"enabled": "auto", "initial_scale_power": 16},
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 1_000_000_000,
    }


def read_own(path: Path, config: JobConfig) -> dict[str, Any]:
    """The user's JSON. Raises UserError where it cannot be meant, or contradicts job.yaml's training section."""
    try:
        own = json.loads(path.read_text("utf-8-sig"))
    except (OSError, ValueError) as error:
        raise UserError(f"deepspeed: {path} cannot be read as JSON: {error}") from error
    if not isinstance(own, dict):
        raise UserError(f"deepspeed: {path} holds a {type(own).__name__} where an object is needed")
    zero = own.get("zero_optimization", {})
    if not isinstance(zero, dict) or zero.get("stage", 0) not in (0, 1, 2, 3):
        raise UserError(f"deepspeed: {path}: zero_optimization must be an object with a stage of 0, 1, 2 or 3")
    for key, section in (("elastic_checkpoint", zero), ("load_universal", own.get("checkpoint", {}))):
        if isinstance(section, dict) and section.get(key):
            raise UserError(
                f"deepspeed: {path}: remove {key}: ftlaunch resumes with any number of ranks from DeepSpeed's ordinary "
                "checkpoints, and saves no others."
            )
    for key in ("data_efficiency", "curriculum_learning"):
        section = own.get(key)
        if isinstance(section, dict) and section.get("enabled"):
            raise UserError(
                f"deepspeed: {path}: remove {key}: which samples and tokens make up a step is decided by ftlaunch, so "
                "that a restart goes on exactly (data: {packing: true} fills rows with several short samples)."
            )
    same = {
        "train_micro_batch_size_per_gpu": ("per_device_train_batch_size", 8),
        "gradient_accumulation_steps": ("gradient_accumulation_steps", 1),
    }
    for key, (training_key, default) in same.items():
        wanted = config.training.get(training_key, default)
        if key in own and own[key] not in ("auto", wanted):
            raise UserError(
                f"deepspeed: {path}: {key} is {own[key]!r}, but training.{training_key} is {wanted!r}. "
                'Write "auto" in the JSON.'
            )
    return own


def for_global_batch(ds_config: Mapping[str, Any], global_batch_size: int) -> dict[str, Any]:
    """The JSON with sizes that Transformers fills in from TrainingArguments. Numbers of the user's own JSON (which
    `read_own` has compared) are right for one number of ranks only: with others, each does more or fewer micro-batches.

    Raises UserError where the JSON's train_batch_size is not the run's.
    """
    stated = ds_config.get("train_batch_size", "auto")
    if stated not in ("auto", global_batch_size):
        raise UserError(
            f"deepspeed: train_batch_size is {stated!r}, but an optimizer step of this run takes {global_batch_size} "
            "samples (per_device_train_batch_size x gradient_accumulation_steps x the ranks at full size; a run keeps "
            'it for life). Write "auto" in the JSON.'
        )
    sizes = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size")
    return {**ds_config, **{key: "auto" for key in sizes if key in ds_config}}


def require_precision(own: Mapping[str, Any], precision: str) -> None:
    """Raises UserError when the user's JSON switches on another precision than the plan's."""
    for kind in ("bf16", "fp16"):
        section = own.get(kind)
        enabled = section.get("enabled") if isinstance(section, dict) else None
        if (enabled is True and precision != kind) or (enabled is False and precision == kind):
            raise UserError(
                f"deepspeed: your JSON says {kind}.enabled: {str(enabled).lower()}, but the precision is "
                f"{precision}. Write "
                f'"auto" in the JSON, or precision: {kind} in job.yaml.'
            )


def stage_of(ds_config: dict[str, Any]) -> int:
    return int(ds_config.get("zero_optimization", {}).get("stage", 0))
