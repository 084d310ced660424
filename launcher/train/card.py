"""The model card of `final/`: what the run was, so that the folder speaks for itself."""

from __future__ import annotations

from typing import Any

from launcher.config.models import JobConfig
from launcher.plan.spec import RankSpec
from launcher.train.versions import stack_versions


def model_card(spec: RankSpec, config: JobConfig, trainer: Any) -> str:
    base = config.model.path if config.model else ""
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    evaluations = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    rows = {
        "base model": base,
        "method": config.method,
        "optimizer steps": trainer.state.global_step,
        "samples": trainer.samples_seen(),
        "ranks": trainer.args.world_size,
        "precision": spec.precision,
        "ZeRO stage": spec.zero_stage,
        "last training loss": f"{losses[-1]:.4f}" if losses else "-",
        "evaluation loss, first and last": f"{evaluations[0]:.4f}, {evaluations[-1]:.4f}" if evaluations else "-",
        "run": spec.run_id,
        "configuration": spec.config_sha,
        "versions": ", ".join(f"{name} {version}" for name, version in stack_versions().items()),
    }
    table = "\n".join(f"| {name} | {value} |" for name, value in rows.items())
    library = "transformers" if config.method == "full" else "peft"
    front = f"---\nlibrary_name: {library}\n---\n"
    return f"{front}# {spec.output_path.name}\n\nFine-tuned with ftlaunch.\n\n| | |\n|---|---|\n{table}\n"
