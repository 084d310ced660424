"""Makes a tiny Llama-like model with its own tokenizer, and data for it: a step takes milliseconds, everything is real.

Run as a program: `python tests/fault/tiny_model.py FOLDER`. Needs the training stack, which pytest's own process does
not import.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

NUM_RECORDS = 64
_WORDS = ("node", "rank", "loss", "shard", "step", "save", "kill", "resume", "port", "store", "queue", "batch")


def make_model(folder: Path) -> None:
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    vocabulary = [
        "<pad>",
        "<eos>",
        "<unk>",
        "user",
        "assistant",
        ":",
        *_WORDS,
        *(str(i) for i in range(NUM_RECORDS + 8)),
    ]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(vocabulary)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Whitespace()])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", model_max_length=64
    )
    fast.save_pretrained(folder)
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        pad_token_id=0,
        eos_token_id=1,
        attention_dropout=0.1,  # the random state matters to every step
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def make_data(path: Path, num_records: int = NUM_RECORDS) -> None:
    lines = []
    for i in range(num_records):
        question = " ".join(_WORDS[(i * 3 + k) % len(_WORDS)] for k in range(3 + i % 4))
        answer = " ".join(_WORDS[(i * 5 + k * 2) % len(_WORDS)] for k in range(2 + i % 3))
        lines.append(json.dumps({"question": f"{question} {i}", "answer": answer}))
    path.write_text("\n".join(lines) + "\n", "utf-8")


if __name__ == "__main__":
    target = Path(sys.argv[1])
    target.mkdir(parents=True, exist_ok=True)
    make_model(target / "model")
    make_data(target / "train.jsonl")
    make_data(target / "eval.jsonl", 8)
