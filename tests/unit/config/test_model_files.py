"""A model's folder that is not whole is told before anything loads it."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from launcher.config.model_files import ModelFiles, read_model_files
from launcher.config.models import ModelConfig

CONFIG = {"model_type": "llama", "vocab_size": 100, "max_position_embeddings": 64, "rope_theta": 10000.0}
TOKENIZER = {"model": {"vocab": {"a": 0, "b": 99}}, "added_tokens": [{"id": 103, "content": "<end>"}]}


def shard(num_bytes: int = 8) -> bytes:
    head = json.dumps({"w": {"dtype": "U8", "shape": [num_bytes], "data_offsets": [0, num_bytes]}}).encode()
    return len(head).to_bytes(8, "little") + head + bytes(num_bytes)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    (folder / "tokenizer_config.json").write_text('{"chat_template": "x"}')
    (folder / "model.safetensors").write_bytes(shard())
    return folder


def read(folder: Path, **environ: str) -> ModelFiles:
    return read_model_files(ModelConfig(path=str(folder)), environ)


def test_a_whole_folder(model: Path) -> None:
    files = read(model)
    assert files.problems == ()
    assert (files.vocab_size, files.tokenizer_size, files.max_positions) == (100, 104, 64)
    assert (files.has_chat_template, files.learned_positions) == (True, False)


def _index(folder: Path, total_size: int = 16, names: tuple[str, ...] = ("a", "b")) -> None:
    (folder / "model.safetensors").unlink()
    weight_map = {name: f"{name}.safetensors" for name in names}
    index = {"metadata": {"total_size": total_size}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    for name in names:
        (folder / f"{name}.safetensors").write_bytes(shard())


SPOILED: dict[str, tuple[Callable[[Path], object], str]] = {
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "no weights"),
    "cut short": (
        lambda folder: (folder / "model.safetensors").write_bytes(shard()[:-1]),
        "its head says 76: a download was cut short",
    ),
    "no head": (lambda folder: (folder / "model.safetensors").write_bytes(b"\xff" * 99), "no readable head"),
    "a pointer": (
        lambda folder: (folder / "model.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\n"),
        "Git LFS pointer",
    ),
    "no tokenizer": (lambda folder: [path.unlink() for path in folder.glob("tokenizer*")], "no tokenizer"),
    "config that is no JSON": (lambda folder: (folder / "config.json").write_text("{"), "config.json"),
    "a shard is missing": (
        lambda folder: (_index(folder), (folder / "b.safetensors").unlink()),
        "1 of 2 files of model.safetensors.index.json are missing: b.safetensors",
    ),
    "shards smaller than the index says": (lambda folder: _index(folder, 10_000), "their weights alone 10000"),
    "shards without their index": (
        lambda folder: (folder / "model.safetensors").rename(folder / "a.safetensors"),
        "without model.safetensors.index.json",
    ),
}


@pytest.mark.parametrize("name", SPOILED)
def test_what_is_missing_or_broken(name: str, model: Path) -> None:
    spoil, words = SPOILED[name]
    spoil(model)
    (problem,) = read(model).problems
    assert words in problem


def test_an_index_with_all_its_files(model: Path) -> None:
    _index(model)
    assert read(model).problems == ()


def test_a_table_of_positions(model: Path) -> None:
    (model / "config.json").write_text('{"model_type": "gpt2", "n_positions": 1024, "vocab_size": 9}')
    files = read(model)
    assert (files.max_positions, files.learned_positions) == (1024, True)


def hub(model_id: str, cache: Path, **environ: str) -> ModelFiles:
    return read_model_files(ModelConfig(path=model_id), {"HF_HOME": str(cache), **environ})


def test_a_model_of_the_hub(tmp_path: Path, model: Path) -> None:
    offline = hub("a/b", tmp_path, HF_HUB_OFFLINE="1")
    assert offline.folder is None
    assert "HF_HUB_OFFLINE" in offline.hub
    with socket.create_server(("127.0.0.1", 0)) as server:
        endpoint = f"http://127.0.0.1:{server.getsockname()[1]}"
        assert hub("a/b", tmp_path, HF_ENDPOINT=endpoint).hub == ""
    assert "cannot be reached" in hub("a/b", tmp_path, HF_ENDPOINT=endpoint).hub
    assert hub("a/b", tmp_path, HF_ENDPOINT=endpoint, HTTPS_PROXY="http://proxy").hub == ""
    repository = tmp_path / "hub" / "models--a--b"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("c0ffee")
    (repository / "snapshots").mkdir()
    model.rename(repository / "snapshots" / "c0ffee")
    cached = hub("a/b", tmp_path, HF_HUB_OFFLINE="1")
    assert (cached.hub, cached.vocab_size) == ("", 100)
