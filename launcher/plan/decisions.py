"""Precision, device, ranks, ZeRO stage, checkpointing, LoRA targets: each a pure choice with its reason in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from launcher.config.models import JobConfig
from launcher.errors import PreflightRefused, UserError
from launcher.host.compute import Memory
from launcher.host.facts import HostFacts
from launcher.host.gpus import Gpu
from launcher.plan.alternatives import FITS_SHARE, Alternative
from launcher.plan.chosen import Chosen
from launcher.plan.model_facts import ModelFacts

# Every linear layer of the decoder blocks; `lm_head` is left out (large, and tied to the embeddings in small models).
_LLAMA_LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_LLAMA_LIKE = frozenset(
    {"llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "phi3_small", "internlm3"}
)
_GIB = 1024**3
_TEMPLATE_SHARE = 0.25  # of the memory that is free when the run begins


def visible(facts: HostFacts) -> tuple[Gpu, ...]:
    by_index = {gpu.index: gpu for gpu in facts.gpus}
    return tuple(by_index[i] for i in facts.visible_gpus if i in by_index)


def choose_device(facts: HostFacts) -> Chosen[str]:
    gpus = visible(facts)
    if gpus:
        return Chosen("cuda", f"{len(gpus)} GPU{'s' if len(gpus) > 1 else ''} visible: {_names(gpus)}")
    why = "no GPU" if facts.nvml == "ok" and not facts.gpus else ("none visible" if facts.gpus else facts.nvml)
    return Chosen("cpu", f"no usable GPU ({why})")


def choose_num_ranks(config: JobConfig, facts: HostFacts, device: str, slots: int | None = None) -> Chosen[int]:
    """Ranks on this node. `slots`: what the hostfile that job.yaml names gives each node, as DeepSpeed reads it."""
    asked = config.cluster.nproc_per_node
    if asked != "auto":
        return Chosen(int(asked), "cluster.nproc_per_node", by="job.yaml")
    if slots is not None:
        return Chosen(slots, "slots of cluster.hostfile", by="job.yaml")
    if device == "cuda":
        return Chosen(len(facts.visible_gpus), "one rank for each visible GPU")
    return Chosen(1, "one rank on a machine without GPU")


def choose_precision(config: JobConfig, facts: HostFacts, device: str, earlier: str | None = None) -> Chosen[str]:
    """bf16 only where every card computes it in hardware: what torch reports counts emulation (yes on V100 and T4)."""
    if config.precision != "auto":
        return _asked_precision(config.precision, facts, device)
    if earlier is not None:  # another kind of node continues the run as it began, or refuses
        try:
            return replace(_asked_precision(earlier, facts, device), by="checkpoint", reason="the run began with it")
        except PreflightRefused as refusal:
            raise PreflightRefused(
                f"the run in output_dir began in {earlier}, and this node cannot go on with it ({refusal}). "
                f"Start it on a "
                "node like the first one, or choose another output_dir to begin anew."
            ) from refusal
    if device == "cpu":
        if facts.cpu.flags_bf16:
            return Chosen("bf16", "this CPU has AVX512-BF16 or AMX")
        return Chosen("fp32", "this CPU has neither AVX512-BF16 nor AMX: bf16 would be emulated, and many times slower")
    gpus = visible(facts)
    lacking = [gpu for gpu in gpus if not gpu.has_bf16]
    if not lacking:
        return Chosen("bf16", "every GPU has compute capability 8.0 or more")
    return Chosen("fp16", f"{_names(lacking)}: compute capability below 8.0, no bf16 in hardware")


def _asked_precision(asked: str, facts: HostFacts, device: str) -> Chosen[str]:
    if asked == "bf16" and device == "cuda":
        lacking = [gpu for gpu in visible(facts) if not gpu.has_bf16]
        if lacking:
            raise PreflightRefused(
                f"precision: bf16, but {_names(lacking)} has compute capability {_capability(lacking)} and computes "
                "no bf16 (it would be emulated). Use precision: auto (fp16 here), or GPUs with capability 8.0 or "
                "more."
            )
    if asked == "fp16" and device == "cpu":
        raise PreflightRefused(
            "precision: fp16, but there is no GPU and CPUs do not train in fp16. Use precision: auto."
        )
    return Chosen(asked, "precision", by="job.yaml")


def choose_zero_stage(
    config: JobConfig,
    facts: HostFacts,
    model: ModelFacts,
    device: str,
    num_ranks: int,
    earlier: int | None = None,
    alternatives: Sequence[Alternative] = (),
) -> Chosen[int]:
    """Stage 2 where it fits on the smallest card with a margin; stage 3 where it does not.

    `num_ranks`: of all nodes, at the smallest size of the job, so that it fits however many nodes there are.
    `alternatives`: for that size and card; empty where only the number of parameters is known. Then bytes per parameter
    are those of DeepSpeed's own estimators: ZeRO-2 needs 2P + 18P/G per card when all weights are trained.
    """
    if config.deepspeed.stage != "auto":
        return Chosen(int(config.deepspeed.stage), "deepspeed.stage", by="job.yaml")
    if earlier is not None:
        return Chosen(earlier, "the run began with it", by="checkpoint")
    parameters = model.num_parameters
    gpus = visible(facts)
    if device == "cpu" or parameters is None:
        known = (
            "on CPUs memory is not the limit"
            if device == "cpu"
            else "the model's size is not known before it is loaded"
        )
        return Chosen(2, f"the faster stage; {known}")
    card_bytes = min(gpu.memory_total_bytes for gpu in gpus)
    if alternatives:
        return _first_stage_that_fits(alternatives, offloads=config.deepspeed.offload_optimizer)
    needed = static_bytes(config.method, parameters, num_ranks, zero_stage=2)
    bound = 0.7 * card_bytes
    sizes = f"{needed / _GIB:.1f} GiB of weights, gradients and optimizer per GPU, of {card_bytes / _GIB:.0f} GiB"
    if needed <= bound:
        return Chosen(2, f"ZeRO-2 fits: {sizes}")
    return Chosen(3, f"ZeRO-2 would not fit: {sizes}, and 30 % are kept for activations")


def _first_stage_that_fits(alternatives: Sequence[Alternative], *, offloads: bool) -> Chosen[int]:
    two, three = (
        next(one for one in alternatives if one.zero_stage == stage and one.offload_optimizer == offloads)
        for stage in (2, 3)
    )

    def size(one: Alternative) -> str:
        return f"{one.memory.total_bytes / _GIB:.1f} GiB per GPU at its peak, of {one.card_bytes / _GIB:.0f} GiB"

    if two.fits:
        return Chosen(2, f"ZeRO-2 fits: {size(two)}")
    if three.fits:
        return Chosen(
            3, f"ZeRO-2 would not fit: {size(two)}, {1 - FITS_SHARE:.0%} are kept free; ZeRO-3 needs {size(three)}"
        )
    return Chosen(
        3, f"neither ZeRO-2 ({size(two)}) nor ZeRO-3 fits ({size(three)}, {1 - FITS_SHARE:.0%} are kept free)"
    )


def static_bytes(method: str, parameters: int, num_ranks: int, *, zero_stage: int) -> float:
    """Bytes per card for weights, gradients and optimizer state, without activations.

    full: DeepSpeed's estimators (runtime/zero/stage_1_and_2.py, stage3.py): 2P + 18P/G, and 18P/G for stage 3.
    lora: weights in 16 bits and about 1 % trainable parameters; qlora: 0.55 bytes a parameter for NF4 with its
    constants.
    """
    shard = 1 / num_ranks
    if method == "full":
        return (2 + 18 * shard) * parameters if zero_stage < 3 else 18 * shard * parameters
    weights = (2.0 if method == "lora" else 0.55) * parameters
    adapter = 18 * 0.01 * parameters * shard
    return (weights if zero_stage < 3 else weights * shard) + adapter


def choose_gradient_checkpointing(config: JobConfig, device: str) -> Chosen[bool]:
    for key in ("gradient_checkpointing", "activation_checkpointing"):
        if config.training.get(key) is not None:
            return Chosen(bool(config.training[key]), f"training.{key}", by="job.yaml")
    if device == "cpu":
        return Chosen(False, "on CPUs memory is not the limit; recomputing would cost a third of the speed")
    return Chosen(
        True, "activations are recomputed: about a third slower, several times less memory; set it to false if it fits"
    )


def choose_template(
    config: JobConfig, device: str, precision: str, memory: Memory | None, model: ModelFacts
) -> Chosen[str]:
    """What a process of the node makes once for all ranks and attempts: "inputs" (data and model), "data" or
    "nothing"."""
    asked = config.restart.template
    if asked == "off":
        return Chosen("nothing", "restart.template", by="job.yaml")
    if asked == "on":
        return Chosen("inputs", "restart.template", by="job.yaml")
    if device == "cpu" or model.num_parameters is None or memory is None:
        return Chosen("inputs", "ranks begin at once with model and data")
    needed_bytes = (4 if precision == "fp32" else 2) * model.num_parameters
    sizes = f"the model's {needed_bytes / _GIB:.1f} GiB stay in host memory, of {memory.usable_bytes / _GIB:.0f} GiB"
    if needed_bytes <= _TEMPLATE_SHARE * memory.usable_bytes:
        return Chosen("inputs", f"ranks begin at once; {sizes}")
    return Chosen("data", f"not the model: {sizes}; more than {_TEMPLATE_SHARE:.0%}")


def choose_lora_targets(config: JobConfig, model: ModelFacts) -> Chosen[str | tuple[str, ...] | None]:
    if config.method == "full":
        return Chosen(None, "all weights are trained")
    targets = config.lora.target_modules
    if targets not in ("auto", "all-linear"):
        return Chosen(tuple(targets), "lora.target_modules", by="job.yaml")
    if targets == "auto" and model.model_type in _LLAMA_LIKE:
        return Chosen(_LLAMA_LINEARS, f"all linear layers of {model.model_type} blocks")
    by = "job.yaml" if targets == "all-linear" else "ftlaunch"
    return Chosen("all-linear", "all linear layers except the output head", by=by)


def require_methods_fit(
    config: JobConfig, device: str, num_ranks: int, facts: HostFacts, *, num_nodes: int = 1
) -> None:
    """Combinations that cannot run here, said before anything starts. `num_ranks`: on this node."""
    if device == "cuda" and num_ranks > len(facts.visible_gpus):
        by_slots = config.cluster.nproc_per_node == "auto" and config.cluster.hostfile is not None
        asked = "slots of the hostfile" if by_slots else "cluster.nproc_per_node"
        instead = " without a hostfile, or fewer slots" if by_slots else ""
        raise PreflightRefused(
            f"{asked} is {num_ranks}, but {len(facts.visible_gpus)} GPU(s) are visible here (CUDA_VISIBLE_DEVICES, or "
            f"the GPUs of the pod). Use nproc_per_node: auto{instead}."
        )
    for drill in config.drill.kill if config.drill else ():
        world_size = num_nodes * num_ranks
        if drill.rank >= world_size:
            raise UserError(
                f"drill.kill.rank is {drill.rank}, but this job has {world_size} rank(s): 0 to {world_size - 1}"
            )


def _names(gpus: Sequence[Gpu]) -> str:
    counts: dict[str, int] = {}
    for gpu in gpus:
        counts[gpu.name] = counts.get(gpu.name, 0) + 1
    return ", ".join(f"{count} x {name}" for name, count in counts.items())


def _capability(gpus: Sequence[Gpu]) -> str:
    return ", ".join(sorted({f"{major}.{minor}" for major, minor in (gpu.capability for gpu in gpus)}))
