"""Samples of a packed row do not see each other; models that would let them are refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("transformers", reason="transformers is not installed")

import torch
from transformers import AutoModelForCausalLM, BloomConfig, LlamaConfig, Qwen2Config

from launcher.data.batches import Collator, PackedDataset, SampleDataset
from launcher.data.encode import EncodedDataset
from launcher.data.packing import pack
from launcher.errors import UserError
from launcher.train.packed_attention import require_packing

_SMALL: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("config", [LlamaConfig(**_SMALL), Qwen2Config(**_SMALL)], ids=["llama", "qwen2"])
def test_packed_samples_are_predicted_as_if_each_were_alone(config: Any, attention: str) -> None:
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()
    model.config.use_cache = False
    require_packing(model, batch_size=2)
    lengths = [7, 4, 5, 9, 6]
    flat = np.random.default_rng(1).integers(0, 50, sum(lengths)).astype(np.int32)
    data = EncodedDataset(flat, flat.copy(), np.concatenate([[0], np.cumsum(lengths)]), 0)
    packing = pack(lengths, 20)
    assert [packing.row(row).tolist() for row in range(len(packing))] == [[3, 0, 1], [4, 2]]
    collate, packed, single = Collator(0), PackedDataset(data, packing), SampleDataset(data)

    def logits(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        with torch.no_grad():
            found: torch.Tensor = model(**{k: v for k, v in batch.items() if k not in ("labels", "sample_ids")}).logits
        return found

    rows = logits(collate([packed[0], packed[1]]))
    for row in range(2):
        start = 0
        for sample in packing.row(row).tolist():
            alone = logits(collate([single[sample]]))[0, : lengths[sample]]
            torch.testing.assert_close(rows[row, start : start + lengths[sample]], alone, rtol=1e-5, atol=1e-6)
            start += lengths[sample]


def test_the_look_above_can_fail() -> None:
    """Without positions that begin anew, a sample does see the one before it."""
    model = AutoModelForCausalLM.from_config(LlamaConfig(**_SMALL)).eval()
    ids = torch.arange(10)[None]
    with torch.no_grad():
        together = model(input_ids=ids, position_ids=torch.arange(10)[None], use_cache=False).logits[0, 5:]
        alone = model(input_ids=ids[:, 5:], use_cache=False).logits[0]
    assert not torch.allclose(together, alone, rtol=1e-3, atol=1e-4)


def test_models_that_would_mix_samples_are_refused() -> None:
    bloom = AutoModelForCausalLM.from_config(BloomConfig(vocab_size=50, hidden_size=32, n_layer=1, n_head=4))
    with pytest.raises(UserError, match=r"BloomForCausalLM: it takes no position_ids. Remove packing"):
        require_packing(bloom, 1)
    llama = AutoModelForCausalLM.from_config(LlamaConfig(**_SMALL))
    llama.config._attn_implementation = "flash_attention_2"
    require_packing(llama, 1)
    with pytest.raises(UserError, match="batches of one row only"):
        require_packing(llama, 2)
    llama.config._attn_implementation = "sdpa"
    llama.config.get_text_config = lambda: SimpleNamespace(layer_types=["full_attention", "linear_attention"])
    with pytest.raises(UserError, match="of type linear_attention would carry"):
        require_packing(llama, 2)
