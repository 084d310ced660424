"""What makes two starts the same run: the settings that, if changed, make a checkpoint meaningless for the job.

Left out on purpose: how long to train, how often to save, logging, cluster and spot settings: those may change between
two starts of one run.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the courier, which commits, is to stay small: no pydantic
    from launcher.config.models import JobConfig

_TRAINING_KEYS = {
    "seed": 42,
    "data_seed": None,
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "optim": "adamw_torch_fused",
}

# Settings that live on in the optimizer's and the schedule's state: a new value has no effect on a run in progress.
FROZEN_BY_STATE = (
    "learning_rate",
    "lr_scheduler_type",
    "lr_scheduler_kwargs",
    "warmup_steps",
    "weight_decay",
    "adam_beta1",
    "adam_beta2",
    "adam_epsilon",
)


def run_identity(config: JobConfig, *, zero_stage: int, precision: str) -> dict[str, Any]:
    """Flat dotted keys to JSON values."""
    identity: dict[str, Any] = {
        "model.path": config.model.path if config.model else None,
        "model.gguf_file": config.model.gguf_file if config.model else None,
        "model.revision": config.model.revision if config.model else None,
        "method": config.method,
        "data.train": list(config.data.train) if config.data else None,
        "data.format": config.data.format if config.data else None,
        "data.max_length": config.data.max_length if config.data else None,
        "data.packing": config.data.packing if config.data else None,
        "data.train_on_prompt": config.data.train_on_prompt if config.data else None,
        "data.system_prompt": config.data.system_prompt if config.data else None,
        "deepspeed.stage": zero_stage,
        "precision": precision,
    }
    if config.method != "full":
        identity.update({f"lora.{key}": value for key, value in config.lora.model_dump(mode="json").items()})
    if config.method == "qlora":
        identity.update({f"qlora.{key}": value for key, value in config.qlora.model_dump(mode="json").items()})
    for key, default in _TRAINING_KEYS.items():
        identity[f"training.{key}"] = config.training.get(key, default)
    return identity


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """(key, old value, new value) of every key that differs. A key that one side does not know is not compared: a newer
    version may record more, and a run in progress must survive the upgrade."""
    keys = sorted({*old} & {*new})
    return [(key, old.get(key), new.get(key)) for key in keys if old.get(key) != new.get(key)]
