"""What the backward pass needs of the forward pass, in bytes, from the shape of a Llama-like decoder in Transformers 5.

Counted is what autograd saves, operation by operation, not a rule of thumb. For each token, with a weight of s bytes:

- a norm computes in fp32 and keeps its input so (4 h); its output (s h) is kept where the layers behind it need it:
  for gradients of their weights, or for adapters. A norm that is trained keeps the normalised input, too;
- attention keeps queries, keys, values, its result and what a softmax needs of each row (flash or memory-efficient
  kernels; scores of length x length are never kept), and the copy of its result that the output projection reads;
- the MLP keeps four tensors of its inner size: gate, its SiLU, up, and their product;
- an adapter keeps its inner result, with dropout also its input and the mask.

With checkpointing a layer keeps only its input, and one layer at a time is there whole.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from launcher.plan.model_facts import ModelFacts

if TYPE_CHECKING:
    from launcher.plan.memory_model import MemorySetting

# Of each token and entry of the vocabulary when the backward pass begins: the log-softmax, the gradient that the loss
# hands to it and the one that it computes, all in fp32 (torch.nn.functional.cross_entropy on logits.float()).
LOGITS_BYTES = 12


@dataclass(frozen=True)
class Activations:
    """Bytes: `kept_bytes` when the forward pass has ended; `in_layer_bytes` in the backward pass of a layer that began
    with all of these; `logits_bytes` when the backward pass begins."""

    kept_bytes: int
    in_layer_bytes: int
    logits_bytes: int


def activations_of(model: ModelFacts, setting: MemorySetting) -> Activations | None:
    hidden, layers, vocab = model.hidden_size, model.num_layers, model.vocab_size
    if hidden is None or layers is None or vocab is None or model.attention_size is None or model.inner_size is None:
        return None
    size, tokens = setting.weight_bytes, setting.tokens
    layer = layer_bytes(model, setting)
    kept = layers * (size * hidden if setting.gradient_checkpointing else layer)
    # The last norm and what the head reads; the rotary angles, which all layers share, and the tokens themselves.
    ends = 4 * hidden + size * hidden * (2 if setting.method == "full" else 1)
    in_layer = kept + _in_flight(model, setting) + (layer if setting.gradient_checkpointing else 0)
    return Activations(
        kept_bytes=tokens * (kept + ends) + _mask_bytes(setting),
        in_layer_bytes=tokens * in_layer + _mask_bytes(setting),
        logits_bytes=tokens * vocab * LOGITS_BYTES,
    )


def layer_bytes(model: ModelFacts, setting: MemorySetting) -> int:
    """Kept by one layer for each token."""
    size = setting.weight_bytes
    hidden, attention, kv = model.hidden_size or 0, model.attention_size or 0, model.kv_size or 0
    norm = 4 * hidden + size * hidden * (2 if setting.method == "full" else 1)
    keys = 2 * (attention if setting.padded else kv)  # with a mask, keys and values are repeated for each query head
    adapters = size * setting.lora_ranks
    if setting.lora_dropout:
        adapters += (size + 1) * setting.lora_inputs
    if model.drops_attention and setting.device == "cpu":
        # Scores of a row with all others, after the softmax and after dropout, and its mask; everything is repeated.
        scores = (2 * size + 1) * (model.num_heads or 0) * setting.length
        return 2 * norm + 5 * size * attention + scores + _mlp_bytes(model, setting) + adapters
    attended = size * (3 * attention + keys) + 4 * (model.num_heads or 0)
    return 2 * norm + attended + _mlp_bytes(model, setting) + adapters


def _mlp_bytes(model: ModelFacts, setting: MemorySetting) -> int:
    size, inner = setting.weight_bytes, model.inner_size or 0
    if not model.num_experts:
        return 4 * size * inner
    routed = model.experts_per_token * (4 * inner + 2 * (model.hidden_size or 0))  # and its token, there and back
    return size * (routed + 4 * model.shared_inner_size) + 4 * model.num_experts


def _in_flight(model: ModelFacts, setting: MemorySetting) -> int:
    """Gradients of activations within a layer's MLP, where they are largest: of product, gate and up."""
    wide = (model.inner_size or 0) * (model.experts_per_token if model.num_experts else 1)
    return setting.weight_bytes * (3 * max(wide, model.shared_inner_size) + (model.hidden_size or 0))


def _mask_bytes(setting: MemorySetting) -> int:
    """A row of flags for each token, and the numbers that kernels make of it; one for all layers."""
    return setting.tokens * setting.length * (1 + setting.weight_bytes) if setting.padded else 0
