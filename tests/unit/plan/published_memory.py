"""Memory that others have published for 7B to 72B, in GB (10^9 bytes), all cards together.

QWEN: README of https://github.com/QwenLM/Qwen, "Profiling of Memory and Speed": A100-80G, micro-batch 1,
accumulation 8, gradient checkpointing, LoRA of rank 64 on c_attn, c_proj, w1 and w2 (its finetune.py). Its unit must be
10^9 bytes: with 162.0 of 2^30 two cards of 80 GB would hold more than they have.
LLAMA_FACTORY: README of https://github.com/hiyouga/LLaMA-Factory, "Hardware Requirement", estimated.
"""

from __future__ import annotations

from typing import NamedTuple

from launcher.plan.known_models import find_model
from launcher.plan.memory_model import DEFAULT_BUCKET_ELEMENTS, MemorySetting, forecast_memory
from launcher.plan.model_facts import ModelFacts, facts_of


class Published(NamedTuple):
    model: str
    method: str
    zero_stage: int
    num_cards: int
    gb: dict[int, float]  # by tokens of a row


QWEN = (
    Published("7B", "lora", 0, 1, {256: 20.1, 512: 20.4, 1024: 21.5, 2048: 23.8, 4096: 29.7, 8192: 36.6}),
    Published("7B", "qlora", 2, 1, {256: 11.5, 512: 11.5, 1024: 12.3, 2048: 13.9, 4096: 16.9, 8192: 23.5}),
    Published("7B", "full", 3, 2, {256: 139.2, 512: 148.0, 1024: 162.0}),
    Published("14B", "lora", 0, 1, {256: 34.6, 512: 35.1, 1024: 35.3, 2048: 37.4, 4096: 42.5, 8192: 55.2}),
    Published("14B", "qlora", 2, 1, {256: 18.7, 512: 18.4, 1024: 18.9, 2048: 19.9, 4096: 23.0, 8192: 27.9}),
    Published("72B", "lora", 3, 4, {256: 215.4, 512: 217.7, 1024: 222.6, 2048: 228.8, 4096: 249.0, 8192: 289.2}),
    Published("72B", "qlora", 2, 1, {256: 61.4, 512: 61.4, 1024: 62.9, 2048: 64.1, 4096: 68.0, 8192: 75.6}),
)
# Its script for QLoRA runs fp16 without autocast, and the model of that time took the loss in 16 bits: 8 bytes for each
# token and entry of the vocabulary where Transformers today needs 12. With these lengths that is more than 20 %.
LOSS_IN_16_BITS = frozenset({("7B", "qlora", 4096), ("7B", "qlora", 8192), ("14B", "qlora", 8192)})

LLAMA_FACTORY = (
    Published("meta-llama/Llama-2-7b-hf", "full", 3, 1, {512: 120}),
    Published("meta-llama/Llama-2-7b-hf", "lora", 0, 1, {512: 16}),
    Published("Qwen/Qwen2.5-14B", "lora", 0, 1, {512: 32}),
    Published("Qwen/Qwen2.5-32B", "lora", 0, 1, {512: 64}),
    Published("meta-llama/Llama-2-70b-hf", "lora", 0, 1, {512: 160}),
    Published("Qwen/Qwen2.5-32B", "qlora", 0, 1, {512: 24}),
    Published("meta-llama/Llama-2-70b-hf", "qlora", 0, 1, {512: 48}),
)

# hidden size, layers, heads, inner size (half of its `intermediate_size`, which is that of w1 and w2 together), words
_QWEN_SHAPES = {
    "1.8B": (2048, 24, 16, 5504, 151936),
    "7B": (4096, 32, 32, 11008, 151936),
    "14B": (5120, 40, 40, 13696, 152064),
    "72B": (8192, 80, 64, 24576, 152064),
}
_QWEN_RANK = 64


def facts(name: str) -> ModelFacts:
    if name not in _QWEN_SHAPES:
        return find_model(name)
    hidden, layers, heads, inner, vocab = _QWEN_SHAPES[name]
    config = {"model_type": "qwen2", "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads}
    return facts_of(name, config | {"intermediate_size": inner, "vocab_size": vocab})


def forecast_gb(published: Published, length: int) -> float:
    model = facts(published.model)
    hidden, inner, attention, kv, layers = (
        size or 0
        for size in (model.hidden_size, model.inner_size, model.attention_size, model.kv_size, model.num_layers)
    )
    rank = _QWEN_RANK if published.model in _QWEN_SHAPES else 8
    adapter = rank * (hidden + attention + 2 * kv + attention + hidden + 3 * (hidden + inner)) * layers
    is_full, stage = published.method == "full", published.zero_stage
    setting = MemorySetting(
        method=published.method,
        precision="bf16",
        zero_stage=stage,
        num_ranks=published.num_cards,
        num_trained=(model.num_parameters or 0) if is_full else adapter,
        length=length,
        accumulates=True,
        double_quant=False,
        lora_inputs=0 if is_full else 3 * hidden + attention + inner,
        lora_ranks=0 if is_full else 5 * rank,
        lora_dropout=True,
        bucket_elements={0: 0, 2: DEFAULT_BUCKET_ELEMENTS, 3: hidden * hidden}[stage],
        num_buckets=2 if stage == 2 else 1,
    )
    forecast = forecast_memory(model, setting)
    assert forecast is not None
    return forecast.total_bytes * published.num_cards / 1e9
