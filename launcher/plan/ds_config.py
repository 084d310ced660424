"""The DeepSpeed JSON: the user's own where given, else one for the chosen stage and precision."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from launcher.config.models import JobConfig


def make_ds_config(config: JobConfig, *, zero_stage: int, device: str) -> dict[str, Any]:
    """`"auto"` values are filled in by Transformers from TrainingArguments, so that the two can never disagree."""
    if config.deepspeed.config is not None:
        own: dict[str, Any] = json.loads(Path(config.deepspeed.config).read_text("utf-8"))
        return own
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


def stage_of(ds_config: dict[str, Any]) -> int:
    return int(ds_config.get("zero_optimization", {}).get("stage", 0))
