"""What the model's config.json tells before any weight is read: size and shape. Reads that one file, nothing else."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from launcher.config.inputs import model_folder

# Mixtures of experts whose layers are written down here; those of others differ too much to be guessed.
_MIXTURES = frozenset({"mixtral", "qwen2_moe", "qwen3_moe"})
_EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts")
_QUERY_BIAS = frozenset({"qwen2", "qwen2_moe"})  # on q, k and v, whatever config.json says; others: attention_bias
_QUERY_NORM = frozenset({"qwen3", "qwen3_moe"})  # a norm of a head's size for queries and one for keys


@dataclass(frozen=True)
class ModelFacts:
    """Computed from the shape of a decoder; None where config.json does not give it.

    `attention_size`: all query heads together, `kv_size`: all key heads. `ties_embeddings`: the output head is the
    embedding. `inner_size`: of the dense MLP, or of each of `num_experts` experts, of which a token passes
    `experts_per_token`; `shared_inner_size`: of the expert that every token passes, 0 where there is none.
    """

    source: str
    model_type: str | None = None
    num_parameters: int | None = None
    hidden_size: int | None = None
    num_layers: int | None = None
    vocab_size: int | None = None
    attention_size: int | None = None
    kv_size: int | None = None
    inner_size: int | None = None
    ties_embeddings: bool = False
    num_heads: int | None = None
    num_experts: int = 0
    experts_per_token: int = 1
    shared_inner_size: int = 0
    drops_attention: bool = False  # attention_dropout, for which CPUs have no kernel that keeps no scores

    @property
    def num_active_parameters(self) -> int | None:
        """Those that a token passes: all of a dense model."""
        if self.num_parameters is None or not self.num_experts:
            return self.num_parameters
        idle = self.num_experts - self.experts_per_token
        return self.num_parameters - (self.num_layers or 0) * idle * 3 * (self.hidden_size or 0) * (
            self.inner_size or 0
        )


def read_model_facts(path: str) -> ModelFacts:
    """Facts of a local folder; only the source's name for a hub id or a folder without config.json (GGUF)."""
    folder = model_folder(path)
    if folder is None or not folder.is_dir():
        return ModelFacts(source=f"{path} (not on this machine: shape unknown)")
    try:
        config = json.loads((folder / "config.json").read_text("utf-8"))
    except (OSError, ValueError):
        return ModelFacts(source=f"{path} (no config.json: shape unknown)")
    config = config.get("text_config", config) if isinstance(config, dict) else None
    if not isinstance(config, dict):
        return ModelFacts(source=f"{path} (config.json is not an object: shape unknown)")
    return facts_of(path, config)


def facts_of(source: str, config: dict[str, Any]) -> ModelFacts:
    """Facts from what config.json holds (of a model with several parts: the language model's)."""
    return ModelFacts(
        source=source,
        model_type=config.get("model_type"),
        num_parameters=count_parameters(config),
        **_inner_shape(config),
        hidden_size=config.get("hidden_size"),
        num_layers=config.get("num_hidden_layers"),
        vocab_size=config.get("vocab_size"),
    )


def linear_shapes(model: ModelFacts) -> dict[str, tuple[int, int]]:
    """Name -> (inputs, outputs) of the linear layers of one block that adapters can be attached to; empty where they
    are not known. Experts are no linear layers: Transformers keeps all of a block in one tensor."""
    hidden, attention, kv, inner = model.hidden_size, model.attention_size, model.kv_size, model.inner_size
    if hidden is None or attention is None or kv is None or inner is None:
        return {}
    attention_shapes = {
        "q_proj": (hidden, attention),
        "k_proj": (hidden, kv),
        "v_proj": (hidden, kv),
        "o_proj": (attention, hidden),
    }
    if model.num_experts:
        return attention_shapes
    return attention_shapes | {
        "gate_proj": (hidden, inner),
        "up_proj": (hidden, inner),
        "down_proj": (inner, hidden),
    }


def _inner_shape(config: dict[str, Any]) -> dict[str, Any]:
    """Nothing for what `count_parameters` does not know either."""
    if count_parameters(config) is None:
        return {}
    heads = int(config["num_attention_heads"])
    head_dim = int(config.get("head_dim") or int(config["hidden_size"]) // heads)
    experts = _num_experts(config)
    return {
        "attention_size": heads * head_dim,
        "kv_size": int(config.get("num_key_value_heads") or heads) * head_dim,
        "inner_size": _expert_size(config) if experts else int(config["intermediate_size"]),
        "ties_embeddings": bool(config.get("tie_word_embeddings")),
        "num_heads": heads,
        "drops_attention": bool(config.get("attention_dropout")),
        "num_experts": experts,
        "experts_per_token": int(config.get("num_experts_per_tok") or 1),
        "shared_inner_size": int(config.get("shared_expert_intermediate_size") or 0) if experts else 0,
    }


def count_parameters(config: dict[str, Any]) -> int | None:
    """Parameters of a Llama-like decoder: embeddings, attention with grouped keys, gated MLP or experts, norms.

    None for configs without these keys, and for mixtures of experts that are not in `_MIXTURES`.
    """
    try:
        hidden, layers, vocab = int(config["hidden_size"]), int(config["num_hidden_layers"]), int(config["vocab_size"])
        heads, inner = int(config["num_attention_heads"]), int(config["intermediate_size"])
    except (KeyError, TypeError, ValueError):
        return None
    model_type = config.get("model_type")
    if any(key in config for key in _EXPERT_KEYS) and model_type not in _MIXTURES:
        return None
    head_dim = int(config.get("head_dim") or hidden // heads)
    kv_heads = int(config.get("num_key_value_heads") or heads)
    attention = hidden * heads * head_dim * 2 + hidden * kv_heads * head_dim * 2
    if model_type in _QUERY_BIAS or config.get("attention_bias"):
        attention += (heads + 2 * kv_heads) * head_dim
    if config.get("attention_bias") and model_type not in _QUERY_BIAS:
        attention += hidden  # the output projection has one, too
    if model_type in _QUERY_NORM:
        attention += 2 * head_dim
    mlp = 3 * hidden * inner
    if experts := _num_experts(config):
        shared = int(config.get("shared_expert_intermediate_size") or 0)
        mlp = experts * 3 * hidden * _expert_size(config) + experts * hidden  # and the router
        mlp += 3 * hidden * shared + hidden if shared else 0
    embeddings = vocab * hidden * (1 if config.get("tie_word_embeddings") else 2)
    return layers * (attention + mlp + 2 * hidden) + embeddings + hidden


def _num_experts(config: dict[str, Any]) -> int:
    return next((int(config[key]) for key in _EXPERT_KEYS if config.get(key)), 0)


def _expert_size(config: dict[str, Any]) -> int:
    return int(config.get("moe_intermediate_size") or config["intermediate_size"])
