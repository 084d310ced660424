"""Shapes of well-known models, for a plan on a machine that has none of their files.

Each row is the model's own config.json, as published at https://huggingface.co/<name>/blob/main/config.json. A
fine-tuned relative of the same shape (`-Instruct`, `-Chat`, `-Base`) is found by the name without that ending.
"""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any

from launcher.errors import UserError
from launcher.plan.model_facts import ModelFacts, facts_of, read_model_facts

_KEYS = (
    "model_type",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "intermediate_size",
    "vocab_size",
    "tie_word_embeddings",
)
_MIXTRAL = {"num_local_experts": 8, "num_experts_per_tok": 2}

KNOWN: dict[str, tuple[Any, ...]] = {
    "Qwen/Qwen2.5-0.5B": ("qwen2", 896, 24, 14, 2, 4864, 151936, True),
    "Qwen/Qwen2.5-1.5B": ("qwen2", 1536, 28, 12, 2, 8960, 151936, True),
    "Qwen/Qwen2.5-3B": ("qwen2", 2048, 36, 16, 2, 11008, 151936, True),
    "Qwen/Qwen2.5-7B": ("qwen2", 3584, 28, 28, 4, 18944, 152064, False),
    "Qwen/Qwen2.5-14B": ("qwen2", 5120, 48, 40, 8, 13824, 152064, False),
    "Qwen/Qwen2.5-32B": ("qwen2", 5120, 64, 40, 8, 27648, 152064, False),
    "Qwen/Qwen2.5-72B": ("qwen2", 8192, 80, 64, 8, 29568, 152064, False),
    "Qwen/Qwen3-0.6B": ("qwen3", 1024, 28, 16, 8, 3072, 151936, True, {"head_dim": 128}),
    "Qwen/Qwen3-1.7B": ("qwen3", 2048, 28, 16, 8, 6144, 151936, True, {"head_dim": 128}),
    "Qwen/Qwen3-4B": ("qwen3", 2560, 36, 32, 8, 9728, 151936, True, {"head_dim": 128}),
    "Qwen/Qwen3-8B": ("qwen3", 4096, 36, 32, 8, 12288, 151936, False, {"head_dim": 128}),
    "Qwen/Qwen3-14B": ("qwen3", 5120, 40, 40, 8, 17408, 151936, False, {"head_dim": 128}),
    "Qwen/Qwen3-32B": ("qwen3", 5120, 64, 64, 8, 25600, 151936, False, {"head_dim": 128}),
    "Qwen/Qwen3-30B-A3B": (
        *("qwen3_moe", 2048, 48, 32, 4, 6144, 151936, False),
        {"head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768},
    ),
    "meta-llama/Llama-2-7b-hf": ("llama", 4096, 32, 32, 32, 11008, 32000, False),
    "meta-llama/Llama-2-13b-hf": ("llama", 5120, 40, 40, 40, 13824, 32000, False),
    "meta-llama/Llama-2-70b-hf": ("llama", 8192, 80, 64, 8, 28672, 32000, False),
    "meta-llama/Meta-Llama-3-8B": ("llama", 4096, 32, 32, 8, 14336, 128256, False),
    "meta-llama/Meta-Llama-3-70B": ("llama", 8192, 80, 64, 8, 28672, 128256, False),
    "meta-llama/Llama-3.1-8B": ("llama", 4096, 32, 32, 8, 14336, 128256, False),
    "meta-llama/Llama-3.1-70B": ("llama", 8192, 80, 64, 8, 28672, 128256, False),
    "meta-llama/Llama-3.2-1B": ("llama", 2048, 16, 32, 8, 8192, 128256, True, {"head_dim": 64}),
    "meta-llama/Llama-3.2-3B": ("llama", 3072, 28, 24, 8, 8192, 128256, True, {"head_dim": 128}),
    "mistralai/Mistral-7B-v0.1": ("mistral", 4096, 32, 32, 8, 14336, 32000, False),
    "mistralai/Mistral-7B-v0.3": ("mistral", 4096, 32, 32, 8, 14336, 32768, False),
    "mistralai/Mixtral-8x7B-v0.1": ("mixtral", 4096, 32, 32, 8, 14336, 32000, False, _MIXTRAL),
    "mistralai/Mixtral-8x22B-v0.1": ("mixtral", 6144, 56, 48, 8, 16384, 32000, False, _MIXTRAL),
    "HuggingFaceTB/SmolLM2-135M": ("llama", 576, 30, 9, 3, 1536, 49152, True),
    "HuggingFaceTB/SmolLM2-360M": ("llama", 960, 32, 15, 5, 2560, 49152, True),
    "HuggingFaceTB/SmolLM2-1.7B": ("llama", 2048, 24, 32, 32, 8192, 49152, True),
}

_ENDINGS = ("-instruct", "-chat", "-base", "-it")


def find_model(name: str) -> ModelFacts:
    """Of a folder with config.json, else of a known model, by its name with or without the owner. Raises UserError."""
    if Path(name).is_dir() or name.startswith("package:"):
        facts = read_model_facts(name)
        if facts.num_parameters is None:
            raise UserError(f"--model {facts.source}; a decoder like Llama with its config.json is needed")
        return facts
    by_plain = {plain: full for full in KNOWN for plain in (full.lower(), full.split("/")[1].lower())}
    wanted = name.lower().removesuffix("/")
    for plain in (wanted, *(_without_endings(wanted))):
        if full := by_plain.get(plain):
            return facts_of(full, known_config(full))
    near = difflib.get_close_matches(wanted.split("/")[-1], by_plain, n=3, cutoff=0.5)
    names = list(dict.fromkeys(by_plain[plain] for plain in near)) or sorted(KNOWN)
    hint = f"did you mean {' or '.join(names)}?" if near else f"known are {', '.join(names)}."
    raise UserError(
        f"--model {name}: this model is not known here and no folder of this machine; {hint} Or give a folder with "
        "its config.json (no weights are needed)"
    )


def known_config(name: str) -> dict[str, Any]:
    row = KNOWN[name]
    more: dict[str, Any] = row[len(_KEYS)] if len(row) > len(_KEYS) else {}
    return dict(zip(_KEYS, row, strict=False)) | more


def _without_endings(name: str) -> list[str]:
    """`qwen2.5-7b-instruct` -> `qwen2.5-7b`; Llama 2 is `llama-2-7b-chat-hf` and `llama-2-7b-hf`."""
    found = [name.removesuffix(ending) for ending in _ENDINGS if name.endswith(ending)]
    return found + [name.replace(f"{ending}-hf", "-hf") for ending in _ENDINGS if name.endswith(f"{ending}-hf")]
