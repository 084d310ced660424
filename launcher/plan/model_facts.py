"""What the model's config.json tells before any weight is read: size and shape. Reads that one file, nothing else."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from launcher.config.inputs import model_folder


@dataclass(frozen=True)
class ModelFacts:
    """Computed from the shape of a dense decoder; None where config.json does not give it.

    `attention_size`: all query heads together, `kv_size`: all key heads. `ties_embeddings`: the output head is the
    embedding.
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
    return ModelFacts(
        source=path,
        model_type=config.get("model_type"),
        num_parameters=count_parameters(config),
        **_inner_shape(config),
        hidden_size=config.get("hidden_size"),
        num_layers=config.get("num_hidden_layers"),
        vocab_size=config.get("vocab_size"),
    )


def linear_shapes(model: ModelFacts) -> dict[str, tuple[int, int]]:
    """Name -> (inputs, outputs) of the linear layers of one block; empty where they are not known."""
    hidden, attention, kv, inner = model.hidden_size, model.attention_size, model.kv_size, model.inner_size
    if hidden is None or attention is None or kv is None or inner is None:
        return {}
    return {
        "q_proj": (hidden, attention),
        "k_proj": (hidden, kv),
        "v_proj": (hidden, kv),
        "o_proj": (attention, hidden),
        "gate_proj": (hidden, inner),
        "up_proj": (hidden, inner),
        "down_proj": (inner, hidden),
    }


def _inner_shape(config: dict[str, Any]) -> dict[str, Any]:
    """Nothing for what `count_parameters` does not take for a dense decoder either."""
    if count_parameters(config) is None:
        return {}
    heads = int(config["num_attention_heads"])
    head_dim = int(config.get("head_dim") or int(config["hidden_size"]) // heads)
    return {
        "attention_size": heads * head_dim,
        "kv_size": int(config.get("num_key_value_heads") or heads) * head_dim,
        "inner_size": int(config["intermediate_size"]),
        "ties_embeddings": bool(config.get("tie_word_embeddings")),
    }


def count_parameters(config: dict[str, Any]) -> int | None:
    """Parameters of a dense Llama-like decoder: embeddings, attention with grouped keys, gated MLP, norms.

    None for mixtures of experts and for configs without these keys.
    """
    try:
        hidden, layers, vocab = int(config["hidden_size"]), int(config["num_hidden_layers"]), int(config["vocab_size"])
        heads, inner = int(config["num_attention_heads"]), int(config["intermediate_size"])
    except (KeyError, TypeError, ValueError):
        return None
    if any(key in config for key in ("num_experts", "num_local_experts", "n_routed_experts")):
        return None
    head_dim = int(config.get("head_dim") or hidden // heads)
    kv_heads = int(config.get("num_key_value_heads") or heads)
    attention = hidden * heads * head_dim * 2 + hidden * kv_heads * head_dim * 2
    per_layer = attention + 3 * hidden * inner + 2 * hidden
    embeddings = vocab * hidden * (1 if config.get("tie_word_embeddings") else 2)
    return layers * per_layer + embeddings + hidden
