"""Bytes that one rank needs on its card at the peak of a step, part by part. Pure; docs/sizing.md has the table.

What DeepSpeed 0.19.8 keeps is read from its code (runtime/zero/stage_1_and_2.py, stage3.py), what PyTorch keeps for
the backward pass from Transformers' modules (see `launcher.plan.activations`); scripts/bench_memory_forecast.py
compares both with what torch allocates. Three moments can be the peak, and the largest is the forecast:

- loss: the first moment of the backward pass. All that the layers keep is there, and the gradient of the logits;
- layer: a layer's own backward pass. With gradient checkpointing it has been run again and is there whole;
- step: the optimizer. Nothing of the layers is left, gradients are there twice, once in fp32.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from launcher.config.models import JobConfig
from launcher.plan.activations import Activations, activations_of
from launcher.plan.forecasts import bytes_of_weight, trained_parameters
from launcher.plan.model_facts import ModelFacts, linear_shapes

_GIB = 1024**3

DEFAULT_BUCKET_ELEMENTS = 500_000_000  # reduce_bucket_size of DeepSpeed (runtime/zero/config.py)
NF4_BYTES = 0.5 + 4 / 64  # a weight, and an fp32 constant for each block of 64
NF4_DOUBLE_BYTES = 0.5 + 1 / 64 + 4 / (64 * 256)  # constants in 8 bits with constants of their own (QLoRA, 2023)
# ZeRO-3 keeps gathered weights that it needs again within stage3_max_reuse_distance (1e9 elements): at the loss those
# of the last layers, whose way there and back is no longer than that.
_GATHERED_ELEMENTS = 500_000_000
_SUB_GROUP_ELEMENTS = 1_000_000_000  # ZeRO-3 steps over so many weights at a time

CONTEXT_BYTES = int(0.6 * _GIB)  # CUDA context, cuBLAS workspaces and kernels of one process
NCCL_BYTES = int(0.5 * _GIB)  # buffers of its channels, where there are several ranks
# What the caching allocator holds and cannot hand out: blocks of 2 MiB and more that fit no request.
_MARGIN_SHARE = 0.05

# Bytes of optimizer state beside the fp32 weight, by words in training.optim. Transformers' default is AdamW.
_MOMENT_BYTES = (("8bit", 2), ("sgd", 0), ("adafactor", 0), ("lion", 4), ("rmsprop", 4), ("adagrad", 4))
_ADAM_MOMENT_BYTES = 8


@dataclass(frozen=True)
class MemorySetting:
    """What decides how much memory a rank of a given model needs.

    `num_trained`: parameters with a gradient. `num_ranks`: all that share the optimizer's state. `length`: tokens of a
    row, `padded`: rows of a micro-batch may differ in length, or several samples share one: attention gets a mask.
    `accumulates`: a step has several micro-batches, so gradients are there while the next ones are computed.
    `lora_inputs`, `lora_rank`: inputs of all adapters of a layer together, and the outputs of their first halves.
    """

    method: str
    precision: str
    zero_stage: int
    num_ranks: int
    num_trained: int
    micro_batch: int = 1
    length: int = 2048
    gradient_checkpointing: bool = True
    padded: bool = False
    accumulates: bool = False
    offload_optimizer: bool = False
    offload_params: bool = False
    double_quant: bool = True
    lora_inputs: int = 0
    lora_ranks: int = 0
    lora_dropout: bool = False
    moment_bytes: int = _ADAM_MOMENT_BYTES
    bucket_elements: int = DEFAULT_BUCKET_ELEMENTS
    num_buckets: int = 2  # two with overlap_comm
    device: str = "cuda"

    @property
    def weight_bytes(self) -> int:
        return bytes_of_weight(self.precision)

    @property
    def tokens(self) -> int:
        return self.micro_batch * self.length


@dataclass(frozen=True)
class MemoryForecast:
    """Bytes on one card when the step is at its peak, which is the moment `peak`.

    `gathered`: weights that are there only while they are used: whole ones of ZeRO-3, unpacked ones of QLoRA.
    `logits`: the vocabulary's scores of all tokens, their log-softmax and the gradients of both, in fp32.
    """

    peak: str
    weights: int
    gradients: int
    optimizer: int
    gathered: int
    buckets: int
    activations: int
    logits: int
    context: int
    margin: int

    @property
    def total_bytes(self) -> int:
        return sum(self.parts().values())

    @property
    def allocated_bytes(self) -> int:
        """What torch allocates: without the CUDA context and what the allocator cannot use."""
        return self.total_bytes - self.context - self.margin

    @property
    def states_bytes(self) -> int:
        """What is there all the time, whatever the rows' length."""
        return self.weights + self.optimizer + self.context

    def parts(self) -> dict[str, int]:
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name != "peak"}


def setting_of(
    config: JobConfig,
    model: ModelFacts,
    targets: str | tuple[str, ...] | None,
    *,
    device: str,
    precision: str,
    zero_stage: int,
    num_ranks: int,
    gradient_checkpointing: bool,
    ds_config: Mapping[str, Any],
) -> MemorySetting:
    """`num_ranks`: of all nodes, at the smallest size of the job. `ds_config`: the JSON, the user's own or ours."""
    zero = ds_config.get("zero_optimization", {})
    training = config.training
    micro_batch = int(training.get("per_device_train_batch_size", 8))
    packing = bool(config.data and config.data.packing)
    inputs, ranks = lora_sizes(model, targets, config.lora.r) if config.method != "full" else (0, 0)
    return MemorySetting(
        method=config.method,
        precision=precision,
        zero_stage=zero_stage,
        num_ranks=num_ranks,
        num_trained=trained_parameters(config, model, targets) or 0,
        micro_batch=micro_batch,
        length=config.data.max_length if config.data else 2048,
        gradient_checkpointing=gradient_checkpointing,
        padded=micro_batch > 1 or packing,
        accumulates=int(training.get("gradient_accumulation_steps", 1)) > 1,
        offload_optimizer=_offloads(zero, "offload_optimizer"),
        offload_params=_offloads(zero, "offload_param"),
        double_quant=config.qlora.double_quant,
        lora_inputs=inputs,
        lora_ranks=ranks,
        lora_dropout=config.lora.dropout > 0,
        moment_bytes=moment_bytes(str(training.get("optim", ""))),
        bucket_elements=bucket_elements(zero, zero_stage, model),
        num_buckets=2 if zero.get("overlap_comm", zero_stage == 3) and zero_stage < 3 else 1,
        device=device,
    )


def lora_sizes(model: ModelFacts, targets: str | tuple[str, ...] | None, rank: int) -> tuple[int, int]:
    """Inputs of the adapters of one layer together, and the outputs of their first halves."""
    shapes = linear_shapes(model)
    names = tuple(shapes) if targets == "all-linear" or not targets else targets
    known = [shapes[name] for name in names if name in shapes]
    return sum(inputs for inputs, _ in known), rank * len(known)


def moment_bytes(optim: str) -> int:
    return next((size for word, size in _MOMENT_BYTES if word in optim), _ADAM_MOMENT_BYTES)


def bucket_elements(zero: Mapping[str, Any], zero_stage: int, model: ModelFacts) -> int:
    """Transformers writes the square of the hidden size where the JSON says "auto"."""
    if zero_stage == 0:
        return 0
    size = zero.get("reduce_bucket_size", DEFAULT_BUCKET_ELEMENTS)
    return int(size) if size != "auto" else (model.hidden_size or 0) ** 2


def _offloads(zero: Mapping[str, Any], key: str) -> bool:
    section = zero.get(key)
    return isinstance(section, Mapping) and section.get("device", "none") not in ("none", None)


def forecast_memory(model: ModelFacts, setting: MemorySetting) -> MemoryForecast | None:
    """None where the model's shape is not known: its number of parameters alone tells nothing about activations."""
    activations = activations_of(model, setting)
    if model.num_parameters is None or activations is None:
        return None
    moments = [
        _at_loss(model, setting, activations),
        _at_layer(model, setting, activations),
        _at_step(model, setting),
    ]
    worst = max(moments, key=lambda moment: moment.total_bytes)
    if setting.device == "cpu":
        return worst
    moving = worst.gradients + worst.gathered + worst.buckets + worst.activations + worst.logits
    context = CONTEXT_BYTES + (NCCL_BYTES if setting.num_ranks > 1 else 0)
    # Whole weights of ZeRO-3 come and go in many sizes: as much again lies between them, free and in pieces.
    margin = int(_MARGIN_SHARE * moving) + (worst.gathered if setting.zero_stage == 3 else 0)
    return replace(worst, context=context, margin=margin)


def model_states(model: ModelFacts, setting: MemorySetting) -> tuple[int, int]:
    """Weights and optimizer states of one rank, which are there all the time."""
    size, trained, ranks = setting.weight_bytes, setting.num_trained, setting.num_ranks
    weights = frozen_bytes(model, setting) + size * trained
    if setting.zero_stage == 3:
        weights = 0 if setting.offload_params else weights // ranks
    if setting.offload_optimizer:
        return weights, 0
    # ZeRO has an fp32 copy of its own in fp32, too (ZeRO-3 could do without, where it takes both for the same device).
    has_copy = size < 4 or setting.zero_stage > 0
    shard = trained if setting.zero_stage == 0 else -(-trained // ranks)
    return weights, (setting.moment_bytes + (4 if has_copy else 0)) * shard


def frozen_bytes(model: ModelFacts, setting: MemorySetting) -> int:
    """Weights without a gradient, unsharded."""
    total = model.num_parameters or 0
    if setting.method == "full":
        return 0
    if setting.method == "lora":
        return setting.weight_bytes * total
    shapes = linear_shapes(model)
    linear = (model.num_layers or 0) * sum(inputs * outputs for inputs, outputs in shapes.values())
    packed = NF4_DOUBLE_BYTES if setting.double_quant else NF4_BYTES
    # Embeddings, head, norms and experts (which are no linear layers) stay as they are.
    return int(packed * linear) + setting.weight_bytes * (total - linear)


def _gradient_shard(setting: MemorySetting) -> int:
    """Gradients that stay on the card between two micro-batches."""
    if setting.zero_stage < 2:
        return setting.weight_bytes * setting.num_trained
    return 0 if setting.offload_optimizer else setting.weight_bytes * setting.num_trained // setting.num_ranks


def _buckets(setting: MemorySetting) -> int:
    return setting.num_buckets * setting.bucket_elements * setting.weight_bytes if setting.zero_stage > 0 else 0


def _gathered(model: ModelFacts, setting: MemorySetting) -> int:
    hidden, vocab = model.hidden_size or 0, model.vocab_size or 0
    if setting.zero_stage == 3:
        prefetch = int(0.9 * hidden * hidden)  # stage3_prefetch_bucket_size, as Transformers fills it in
        whole = (model.num_parameters or 0) + (setting.num_trained if setting.method != "full" else 0)
        elements = min(whole, max(_GATHERED_ELEMENTS, hidden * vocab) + prefetch)
        per_element = (frozen_bytes(model, setting) + setting.weight_bytes * setting.num_trained) / whole
        return int(max(per_element * elements, setting.weight_bytes * hidden * vocab))
    if setting.method == "qlora":  # one layer's weights are unpacked at a time
        largest = max((inputs * outputs for inputs, outputs in linear_shapes(model).values()), default=0)
        return setting.weight_bytes * largest
    return 0


def _moment(model: ModelFacts, setting: MemorySetting, peak: str, **parts: int) -> MemoryForecast:
    weights, optimizer = model_states(model, setting)
    empty = {"gathered": 0, "buckets": 0, "activations": 0, "logits": 0, "context": 0, "margin": 0}
    return MemoryForecast(peak=peak, weights=weights, optimizer=optimizer, **{**empty, **parts})


def _at_loss(model: ModelFacts, setting: MemorySetting, activations: Activations) -> MemoryForecast:
    # ZeRO-3 has a place for all of its gradients from the start; the others allocate them as they come.
    stay = setting.accumulates or setting.zero_stage == 3
    return _moment(
        model,
        setting,
        "loss",
        gradients=_gradient_shard(setting) if stay else 0,
        gathered=_gathered(model, setting),
        buckets=_buckets(setting),
        activations=activations.kept_bytes,
        logits=activations.logits_bytes,
    )


def _at_layer(model: ModelFacts, setting: MemorySetting, activations: Activations) -> MemoryForecast:
    """The first layers' backward pass, the last to come: gradients are complete, and with checkpointing the inputs of
    almost all layers are still there when the last layer has its turn; the larger of the two is near either.

    The largest gradient is there whole until it is reduced: the output head's, and of a tied one the embedding's, too.
    """
    whole = 0
    if setting.method == "full":
        head = setting.weight_bytes * (model.hidden_size or 0) * (model.vocab_size or 0)
        whole = head * (2 if model.ties_embeddings else 1)
    return _moment(
        model,
        setting,
        "layer",
        gradients=_gradient_shard(setting) + whole,
        gathered=_gathered(model, setting),
        buckets=_buckets(setting),
        activations=activations.in_layer_bytes,
    )


def _at_step(model: ModelFacts, setting: MemorySetting) -> MemoryForecast:
    shard = _gradient_shard(setting)
    buckets = _buckets(setting) if setting.zero_stage == 3 else 0  # ZeRO-1 and 2 give theirs back after the last one
    own = setting.num_trained // (setting.num_ranks if setting.zero_stage else 1)
    if setting.offload_optimizer:
        return _moment(model, setting, "step", gradients=shard, buckets=buckets)
    if setting.zero_stage == 3:
        flat = 4 * min(own, _SUB_GROUP_ELEMENTS)
    elif setting.zero_stage == 0:
        flat = 4 * own if setting.weight_bytes < 4 else 0
    else:  # made flat, then turned into fp32, which a flat one in fp32 is already
        flat = (setting.weight_bytes + (4 if setting.weight_bytes < 4 else 0)) * own
    return _moment(model, setting, "step", gradients=shard + flat, buckets=buckets)
