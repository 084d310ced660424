from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from launcher.checkpoint.manifest import (
    MANIFEST_NAME,
    FileRecord,
    LaterVersion,
    Manifest,
    hash_file,
    iter_files,
    parse_manifest,
    record_files,
    write_manifest,
)
from tests.unit.checkpoint.checkpoint_folders import manifest_of, stage


def test_a_manifest_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    folder = stage(tmp_path, 10)
    manifest = manifest_of(folder, 10, identity={"model.path": "/模型", "lora.target_modules": ["q", "v"]})
    write_manifest(folder, manifest)
    assert parse_manifest((folder / MANIFEST_NAME).read_text("utf-8")) == manifest


def test_it_names_every_file_but_itself_and_leaves_nothing_else(tmp_path: Path) -> None:
    folder = stage(tmp_path, 10)
    before = list(iter_files(folder))
    assert "global_step10/mp_rank_00_model_states.pt" in before
    write_manifest(folder, manifest_of(folder, 10))
    assert list(iter_files(folder)) == before
    assert set(record_files(folder)) == set(before)
    assert sorted(path.name for path in folder.iterdir() if "MANIFEST" in path.name) == [MANIFEST_NAME]


def test_sizes_and_hashes_are_those_of_the_content(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"")
    nothing = "99aa06d3014798d86001c324468d497f"  # XXH3-128 of no bytes, from its specification
    assert hash_file(file) == FileRecord(0, nothing)
    file.write_bytes(b"a" * (9 << 20))
    whole = hash_file(file)
    assert whole.size_bytes == 9 << 20
    file.write_bytes(b"a" * ((9 << 20) - 1) + b"b")
    assert hash_file(file).xxh3_128 != whole.xxh3_128


def test_total_bytes_counts_all_files(tmp_path: Path) -> None:
    folder = stage(tmp_path, 10)
    sizes = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    assert manifest_of(folder, 10).total_bytes == sizes


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        "{}",
        json.dumps({"v": 2, "files": {}}),
        json.dumps({"v": 1}),
        json.dumps({"v": 1, "files": {"a": {}}}),
        json.dumps({"v": 1, "files": {"a": [1, "x"]}}),
        json.dumps({"v": 1, "files": {}, "step": 3}),
        json.dumps({"v": 1, "files": []}),
        json.dumps({"v": 1, "files": None}),
    ],
)
def test_what_is_no_manifest_raises_one_of_the_named_errors(text: str) -> None:
    with pytest.raises((ValueError, KeyError, TypeError)):
        parse_manifest(text)


def sealed(**changes: Any) -> str:
    return replace(Manifest(**SMALL), **changes).to_json()


SMALL: dict[str, Any] = {
    "step": 3,
    "world_size": 2,
    "num_nodes": 1,
    "precision": "fp32",
    "run_id": "feedface",
    "config_sha": "01",
    "identity": {"lora.dropout": 0.1, "data.train": ("a", "b"), "training.lr_scheduler_kwargs": {10: 1, 9: 2}},
    "samples_seen": 12,
    "versions": {},
    "files": {"latest": FileRecord(1, "00")},
}


def test_its_own_hash_is_that_of_what_a_reader_sees() -> None:
    """Tuples, and numbers as keys, are not the same after they were read."""
    assert parse_manifest(sealed()).step == 3


def test_a_change_to_any_field_breaks_its_hash() -> None:
    for name, value in json.loads(sealed()).items():
        changed = {**json.loads(sealed()), name: [value]}
        with pytest.raises(ValueError, match="its own hash differs"):
            parse_manifest(json.dumps(changed))


def test_a_later_version_is_told_from_damage() -> None:
    with pytest.raises(LaterVersion):
        parse_manifest(sealed(v=2))
    damaged = sealed(v=2).replace('"step": 3', '"step": 4')
    with pytest.raises(ValueError, match="its own hash differs"):
        parse_manifest(damaged)


@pytest.mark.parametrize(
    "changes",
    [
        {"step": "3"},
        {"world_size": 0},
        {"world_size": True},
        {"samples_seen": None},
        {"identity": []},
        {"files": {"latest": FileRecord("1", "00")}},  # type: ignore[arg-type]
        {"files": {"/etc/passwd": FileRecord(1, "00")}},
        {"files": {"a/../../b": FileRecord(1, "00")}},
    ],
)
def test_what_others_count_with_has_its_type(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"is .|is not within"):
        parse_manifest(sealed(**changes))
