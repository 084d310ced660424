"""Transformers' TrainingArguments from job.yaml and the plan. Everything ftlaunch owns is set here and nowhere else."""

from __future__ import annotations

from typing import Any

from launcher.config.models import JobConfig
from launcher.data.order import micro_batches_per_step
from launcher.plan.ds_config import for_global_batch
from launcher.plan.spec import RankSpec


def training_arguments(spec: RankSpec, config: JobConfig, world_size: int) -> Any:
    """A `transformers.TrainingArguments`. With ZeRO-3 it must exist before the model is loaded, and stay alive.

    However many ranks there are, together they do the run's global batch in a step: accumulation follows from it.
    """
    from transformers import TrainingArguments

    settings: dict[str, Any] = {
        "logging_steps": 10,
        "report_to": ["tensorboard"] if config.monitor.tensorboard else [],
        **{key: value for key, value in config.training.items() if not key.startswith("gradient_checkpointing")},
    }
    has_eval = bool(config.data and config.data.eval)
    settings.update(
        output_dir=spec.output_dir,
        deepspeed=for_global_batch(spec.ds_config, spec.global_batch_size),
        gradient_accumulation_steps=micro_batches_per_step(
            spec.global_batch_size, int(settings.get("per_device_train_batch_size", 8)), world_size
        ),
        bf16=spec.precision == "bf16",
        fp16=spec.precision == "fp16",
        use_cpu=spec.device == "cpu",
        activation_checkpointing=spec.gradient_checkpointing,
        average_tokens_across_devices=True,  # else gradients depend on which rank has which sample
        save_strategy="steps",
        save_steps=config.checkpoint.every_steps,
        save_total_limit=None,  # pruning by step and wholeness is ftlaunch's, not by mtime
        remove_unused_columns=False,  # the sample ids travel with the batch
        disable_tqdm=True,  # the agent shows progress; a bar in a log file helps nobody
        ddp_timeout=int(config.training.get("ddp_timeout", 1800)),
        # The loss before the first step, once: a resumed run has it already.
        eval_on_start=has_eval and spec.resume_from is None,
    )
    if settings["activation_checkpointing"]:
        kwargs = config.training.get("gradient_checkpointing_kwargs") or config.training.get(
            "activation_checkpointing_kwargs"
        )
        settings["activation_checkpointing_kwargs"] = kwargs or {"use_reentrant": False}
    return TrainingArguments(**settings)
