"""What the model's config.json tells before any weight is read: size and shape. Reads that one file, nothing else."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from launcher.config.inputs import model_folder


@dataclass(frozen=True)
class ModelFacts:
    """`num_parameters` is computed from the shape of a dense decoder; None where config.json does not give it."""

    source: str
    model_type: str | None = None
    num_parameters: int | None = None
    hidden_size: int | None = None
    num_layers: int | None = None
    vocab_size: int | None = None


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
        hidden_size=config.get("hidden_size"),
        num_layers=config.get("num_hidden_layers"),
        vocab_size=config.get("vocab_size"),
    )


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
