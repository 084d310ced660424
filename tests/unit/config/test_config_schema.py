from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

import pytest
from ruamel.yaml import YAML

from launcher.config.models import DataFormat
from launcher.config.schema import job_schema
from launcher.config.training import training_keys
from launcher.data.records import FORMATS

WRONG = Path(__file__).parent / "wrong"


def _described(node: Mapping[str, Any], name: str) -> Iterator[tuple[str, bool]]:
    for key, below in node.get("properties", {}).items():
        if name != "training":
            yield f"{name}.{key}", bool(below.get("description"))


def test_every_key_is_described() -> None:
    schema = job_schema()
    sections = {"": schema, **schema["$defs"]}
    missing = [key for name, node in sections.items() for key, described in _described(node, name) if not described]
    assert missing == []


def test_training_arguments_are_in_the_schema() -> None:
    training = job_schema()["properties"]["training"]
    assert training["additionalProperties"] is False
    assert training["properties"]["learning_rate"] == {"type": "number", "minimum": 0}
    assert "bf16" in training_keys()
    assert "bf16" not in training["properties"]


def test_formats_are_those_that_the_data_reader_knows() -> None:
    assert set(get_args(DataFormat)) == {"auto", *FORMATS}


@pytest.mark.parametrize("name", ["key-typo", "training-typo", "value-yes", "value-nodes", "missing-output-dir"])
def test_schema_refuses_what_the_loader_refuses(name: str) -> None:
    jsonschema = pytest.importorskip("jsonschema", reason="jsonschema is not installed")
    document = YAML(typ="safe", pure=True).load((WRONG / f"{name}.yaml").read_text("utf-8"))
    assert list(jsonschema.Draft202012Validator(job_schema()).iter_errors(document))


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"deepspeed": "ds.json", "env": {"A": 1}, "cluster": {"nodes": "2:4"}},
        {"drill": {"kill": {"rank": 1, "step": 8}}, "training": {"learning_rate": 1, "tf32": None}},
        {"data": {"train": ["a.jsonl"], "eval": "b.jsonl"}, "lora": {"target_modules": ["q_proj"], "alpha": None}},
    ],
)
def test_schema_accepts_short_forms(more: dict[str, Any]) -> None:
    jsonschema = pytest.importorskip("jsonschema", reason="jsonschema is not installed")
    job = {"output_dir": "runs", "model": {"path": "owner/model"}, "data": {"train": "a.jsonl"}, **more}
    jsonschema.Draft202012Validator.check_schema(job_schema())
    jsonschema.Draft202012Validator(job_schema()).validate(job)
