"""What an optimizer step asks of the network, and how long it takes without it: what a forecast of scaling needs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any

from launcher.agent.events import read_json_lines
from launcher.agent.prepare import Prepared
from launcher.config.models import JobConfig
from launcher.host.facts import Gpu
from launcher.plan.forecasts import bytes_of_weight, trained_parameters
from launcher.plan.model_facts import ModelFacts
from launcher.preflight.cluster_facts import StepNeeds

# Dense bf16 (fp16 where there is no bf16) in TFLOP/s, by NVIDIA's data sheets; the first name that is part of the
# card's own name counts.
TFLOPS: Mapping[str, float] = MappingProxyType(
    {
        "B200": 2250,
        "H20": 148,
        "H100": 989,
        "H800": 989,
        "H200": 989,
        "A100": 312,
        "A800": 312,
        "L20": 119.5,
        "L40S": 362,
        "A10": 125,
        "4090": 165,
        "5090": 209,
        "V100": 125,
        "T4": 65,
    }
)
USED_SHARE = 0.4  # of these that a fine-tuning reaches on one node (33 to 50 % are usual)


def needs_of(prepared: Prepared) -> StepNeeds | None:
    """Of this job, at its full number of nodes."""
    plan, inputs = prepared.plan, prepared.inputs
    if inputs is None:
        return None
    train = next((facts for facts in inputs.data if facts.name == "train" and facts.num_measured), None)
    accumulation = plan.accumulation(plan.full_world_size)
    return step_needs(
        prepared.job.config,
        plan.model,
        plan.lora_target_modules.value,
        precision=plan.precision.value,
        zero_stage=plan.zero_stage.value,
        world_size=plan.full_world_size,
        samples_per_rank=accumulation * plan.per_device_batch_size,
        accumulation=accumulation,
        tokens_per_sample=(train.num_tokens - train.num_tokens_cut) / train.num_measured if train else None,
        gpus=inputs.visible if inputs.device == "cuda" else (),
        measured_step_s=measured_step_s(prepared.output_dir),
    )


def measured_step_s(output_dir: Path) -> float | None:
    """Seconds of an optimizer step, between two checkpoints of one attempt of an earlier start on one node."""
    files = list((output_dir / "ftlaunch" / "events").glob("*.jsonl"))
    if len(files) != 1:
        return None
    return step_s_of(read_json_lines(files[0]))


def step_s_of(events: Iterable[Mapping[str, Any]]) -> float | None:
    """From the attempt with the most steps between its first and its last checkpoint."""
    saved: dict[int, list[tuple[float, int]]] = {}
    for event in events:
        if event.get("event") == "checkpoint_saved":
            at_s = datetime.fromisoformat(str(event["t"]).replace("Z", "+00:00")).timestamp()
            saved.setdefault(int(event["gen"]), []).append((at_s, int(event["step"])))
    spans = [(saves[-1][0] - saves[0][0], saves[-1][1] - saves[0][1]) for saves in saved.values()]
    seconds, steps = max(spans, key=lambda span: span[1], default=(0.0, 0))
    return seconds / steps if steps > 0 else None


def step_needs(
    config: JobConfig,
    model: ModelFacts,
    targets: str | tuple[str, ...] | None,
    *,
    precision: str,
    zero_stage: int,
    world_size: int,
    samples_per_rank: int,
    accumulation: int,
    tokens_per_sample: float | None,
    gpus: Sequence[Gpu],
    measured_step_s: float | None,
) -> StepNeeds | None:
    """None where the model's shape or the time of a step is not known. `measured_step_s`: of an earlier start on one
    node, which wins. ZeRO 2 sums up after every micro-batch, ZeRO 3 also gathers the weights for it."""
    trained = trained_parameters(config, model, targets)
    if trained is None or model.num_parameters is None:
        return None
    step_s, source = measured_step_s, "measured by an earlier start"
    if step_s is None:
        step_s = _computed_step_s(config, model.num_parameters, samples_per_rank, tokens_per_sample, gpus)
        source = f"forecast from the cards at {USED_SHARE:.0%} of their peak"
    if not step_s:
        return None
    one_sum = trained * bytes_of_weight(precision)
    # DeepSpeed's ZeRO 1 and 2 sum whole buckets and then gather the weights that each rank has updated; a gather sends
    # half of what a sum does.
    gathered = one_sum // 2 if zero_stage in (1, 2) else 0
    if zero_stage == 3:
        one_sum += model.num_parameters * bytes_of_weight(precision)
    times = accumulation if zero_stage >= 2 else 1
    return StepNeeds(one_sum * times + gathered, step_s, world_size, source)


def _computed_step_s(
    config: JobConfig, parameters: int, samples_per_rank: int, tokens_per_sample: float | None, gpus: Sequence[Gpu]
) -> float | None:
    """2 operations a parameter and token forward, 2 for the gradients of activations, 2 for those of weights (Kaplan
    et al., 2020): adapters do without the last."""
    peaks = [peak for gpu in gpus if (peak := _tflops(gpu.name)) is not None]
    if not peaks or tokens_per_sample is None:
        return None
    operations = (6 if config.method == "full" else 4) * parameters * tokens_per_sample * samples_per_rank
    return operations / (min(peaks) * 1e12 * USED_SHARE)


def _tflops(name: str) -> float | None:
    words = name.replace("-", " ").split()
    return next((peak for key, peak in TFLOPS.items() if key in words), None)
