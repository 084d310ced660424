from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from launcher.config.inputs import model_folder
from launcher.plan.model_facts import count_parameters, read_model_facts

# From the models' own config.json; counts from their model cards and safetensors indices.
LLAMA_3_8B = {
    "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "vocab_size": 128256,
    "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336, "tie_word_embeddings": False,
}  # fmt: skip
SMOLLM2_135M = {
    "model_type": "llama", "hidden_size": 576, "num_hidden_layers": 30, "vocab_size": 49152,
    "num_attention_heads": 9, "num_key_value_heads": 3, "intermediate_size": 1536, "tie_word_embeddings": True,
}  # fmt: skip


@pytest.mark.parametrize(("config", "count"), [(LLAMA_3_8B, 8_030_261_248), (SMOLLM2_135M, 134_515_008)])
def test_parameters_of_known_models(config: dict[str, Any], count: int) -> None:
    assert count_parameters(config) == count


def test_a_head_dim_of_its_own_counts() -> None:
    assert count_parameters({**SMOLLM2_135M, "head_dim": 128}) != count_parameters(SMOLLM2_135M)
    assert count_parameters({**SMOLLM2_135M, "head_dim": 64}) == count_parameters(SMOLLM2_135M)


@pytest.mark.parametrize(
    "config",
    [
        {},
        {**SMOLLM2_135M, "num_local_experts": 8},
        {**SMOLLM2_135M, "n_routed_experts": 64},
        {**SMOLLM2_135M, "hidden_size": None},
        {**SMOLLM2_135M, "vocab_size": "large"},
        {key: value for key, value in SMOLLM2_135M.items() if key != "intermediate_size"},
    ],
)
def test_what_is_no_dense_decoder_is_not_guessed(config: dict[str, Any]) -> None:
    assert count_parameters(config) is None


def test_facts_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SMOLLM2_135M))
    facts = read_model_facts(str(tmp_path))
    assert (facts.model_type, facts.num_layers, facts.num_parameters) == ("llama", 30, 134_515_008)


def test_facts_of_a_model_with_a_text_part(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "vl", "text_config": SMOLLM2_135M}))
    assert read_model_facts(str(tmp_path)).num_parameters == 134_515_008


@pytest.mark.parametrize("text", [None, "{", "[]"])
def test_a_folder_without_a_readable_config_is_unknown(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    facts = read_model_facts(str(tmp_path))
    assert facts.num_parameters is None
    assert "shape unknown" in facts.source


def test_a_hub_id_and_a_missing_package_are_not_on_this_machine() -> None:
    assert read_model_facts("owner/model").num_parameters is None
    assert model_folder("owner/model") is None
    assert model_folder("package:no_such_package_here") is None
    assert read_model_facts("package:no_such_package_here").num_parameters is None


def test_a_package_is_its_folder() -> None:
    folder = model_folder("package:pydantic")
    assert folder is not None
    assert (folder / "__init__.py").is_file()
