"""What pydantic found wrong, in words for the person who wrote the file."""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

from pydantic import ValidationError

from launcher.config.describe import describe
from launcher.config.mistakes import KeyPath, Mistake, dotted, nearest, show_value
from launcher.config.schema import job_schema
from launcher.config.training import OWNED, RENAMED, value_remedy

# Keys of other trainers' files, and what they are called here.
_FOREIGN: Mapping[str, str] = {
    **RENAMED,
    "model_name_or_path": "model.path",
    "base_model": "model.path",
    "model_name": "model.path",
    "dataset": "data.train",
    "datasets": "data.train",
    "train_file": "data.train",
    "train_files": "data.train",
    "validation_file": "data.eval",
    "sequence_len": "data.max_length",
    "finetuning_type": "method",
    "adapter": "method",
    "lora_r": "lora.r",
    "lora_rank": "lora.r",
    "rank": "lora.r",
    "lora_alpha": "lora.alpha",
    "lora_dropout": "lora.dropout",
    "lora_target": "lora.target_modules",
    "lora_target_modules": "lora.target_modules",
    "zero_stage": "deepspeed.stage",
    "nnodes": "cluster.nodes",
    "num_nodes": "cluster.nodes",
    "num_gpus": "cluster.nproc_per_node",
    "gpus": "cluster.nproc_per_node",
    "master_addr": "cluster.hosts (the first host is the master)",
    "max_restarts": "restart.max_without_progress",
    "envs": "env",
    "environment": "env",
}
_SCHEMA_TYPES = {"string": "str", "integer": "int", "number": "float", "boolean": "bool"}


def explain(error: ValidationError, data: Mapping[str, Any]) -> list[Mistake]:
    """One mistake for each key that is wrong. `data` is what was given, before paths were resolved."""
    mistakes: dict[KeyPath, Mistake] = {}
    for item in error.errors(include_url=False):
        for mistake in _explain_one(item["type"], item["loc"], item.get("ctx", {}), data):
            mistakes.setdefault(mistake.key, mistake)
    return _say_once(mistakes.values())


def _say_once(mistakes: Iterable[Mistake]) -> list[Mistake]:
    """Several unknown keys in one section: the list of its keys is shown with the first of them."""
    said: set[tuple[KeyPath, str | None]] = set()
    shortened = []
    for mistake in mistakes:
        about = (mistake.key[:-1], mistake.accepted)
        repeated = mistake.found is None and about in said
        shortened.append(replace(mistake, accepted=None) if repeated else mistake)
        said.add(about)
    return shortened


def _explain_one(kind: str, loc: KeyPath, context: Mapping[str, Any], data: Mapping[str, Any]) -> Iterator[Mistake]:
    if kind == "mistakes":
        yield from context["mistakes"]
    elif kind == "extra_forbidden":
        yield _unknown_key(_given_key(loc, data))
    elif kind == "missing":
        yield _missing_key((*_given_key(loc[:-1], data), loc[-1]))
    else:
        yield _wrong_value(_given_key(loc, data), data)


def _given_key(loc: KeyPath, data: Any) -> KeyPath:
    """`loc` without what pydantic adds: names of union members, and steps below a short form that was expanded."""
    key: KeyPath = ()
    for part in loc:
        in_mapping = isinstance(data, Mapping) and part in data
        in_list = isinstance(data, list) and isinstance(part, int) and part < len(data)
        if in_mapping or in_list:
            data = data[part]
            key = (*key, part)
    return key


def _unknown_key(key: KeyPath) -> Mistake:
    section, name = key[:-1], str(key[-1])
    known = list(_properties(_schema_at(section)))
    return Mistake(
        key,
        f"is not a key of {dotted(section) or 'job.yaml'}",
        accepted=", ".join(known),
        remedy=_remedy_for_unknown(section, name, known),
    )


def _remedy_for_unknown(section: KeyPath, name: str, known: list[str]) -> str | None:
    if name in OWNED:
        return OWNED[name]
    if name in _FOREIGN:
        return f"write {_FOREIGN[name]}"
    elsewhere = _keys_by_last_part()
    if name in elsewhere:
        return f"did you mean {elsewhere[name]}?"
    close = nearest(name, known)
    if close is not None:
        return f"did you mean {dotted((*section, close))}?"
    far = nearest(name, elsewhere)
    return f"did you mean {elsewhere[far]}?" if far is not None else None


def _missing_key(key: KeyPath) -> Mistake:
    node = _schema_at(key)
    example = f"add {key[-1]}: {_flow(_example(node))}"
    return Mistake(key, "is missing", accepted=node.get("description"), remedy=example)


def _wrong_value(key: KeyPath, data: Mapping[str, Any]) -> Mistake:
    value = _value_at(key, data)
    node = _schema_at(key)
    return Mistake(
        key,
        "has a value that is not accepted",
        found=show_value(key, value),
        accepted=_accepted(node),
        remedy=_remedy_for_value(key, value, node),
    )


def _remedy_for_value(key: KeyPath, value: object, node: Mapping[str, Any]) -> str | None:
    if key[:1] == ("env",) and len(key) > 1:
        if value is None:
            return f'write {key[-1]}: "" for an empty value, or remove the line'
        return 'write it in quotes, as in "1" or "true": programs differ in what they take for yes'
    alternatives = [_resolve(item) for item in node.get("anyOf", [node])]
    choices = [str(choice) for item in alternatives for choice in item.get("enum", [item.get("const")]) if choice]
    close = nearest(value, choices) if isinstance(value, str) else None
    if close is not None:
        return f"write {close}"
    types = [_SCHEMA_TYPES[item["type"]] for item in alternatives if item.get("type") in _SCHEMA_TYPES]
    remedy = value_remedy(value, types)
    if remedy is not None:
        return remedy
    example = _example(node)
    if example is None:
        return None
    written = f"write {key[-1]}: {_flow(example)}" if isinstance(key[-1], str) else f"write {_flow(example)}"
    return f"{written}, or remove the line" if value is None else f"for example {written.removeprefix('write ')}"


@cache
def all_keys() -> tuple[str, ...]:
    """Every key of job.yaml as dotted text, sections before what they hold."""
    return tuple(_walk(job_schema(), ""))


def _keys_by_last_part() -> dict[str, str]:
    """`max_steps` -> `training.max_steps`; the first key wins where several end alike."""
    by_last: dict[str, str] = {}
    for key in all_keys():
        by_last.setdefault(key.rsplit(".", 1)[-1], key)
    return by_last


def _walk(node: Mapping[str, Any], prefix: str) -> Iterator[str]:
    for name, below in _properties(node).items():
        yield f"{prefix}{name}"
        yield from _walk(below, f"{prefix}{name}.")


def _schema_at(key: KeyPath) -> Mapping[str, Any]:
    node: Mapping[str, Any] = job_schema()
    for part in key:
        if isinstance(part, int):
            node = next((item["items"] for item in _alternatives(node) if "items" in item), {})
        else:
            node = _properties(node).get(part) or _values_of(node)
    return node


def _properties(node: Mapping[str, Any]) -> Mapping[str, Any]:
    return next((item["properties"] for item in _alternatives(node) if "properties" in item), {})


def _values_of(node: Mapping[str, Any]) -> Mapping[str, Any]:
    patterns = node.get("patternProperties", {})
    return next(iter(patterns.values()), {})


def _alternatives(node: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    node = _resolve(node)
    below = [option for item in node.get("anyOf", []) for option in _alternatives(item)]
    return [node, *below]


def _resolve(node: Mapping[str, Any]) -> Mapping[str, Any]:
    if "$ref" not in node:
        return node
    target: Mapping[str, Any] = job_schema()["$defs"][node["$ref"].rsplit("/", 1)[-1]]
    return target


def _accepted(node: Mapping[str, Any]) -> str:
    return describe(node, job_schema()["$defs"])


def _example(node: Mapping[str, Any]) -> Any:
    return next(iter(node.get("examples", [])), None)


def _flow(value: object) -> str:
    """A value as one would write it in YAML on one line."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name}: {_flow(item)}" for name, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(_flow(item) for item in value) + "]"
    return value if isinstance(value, str) else json.dumps(value)


def _value_at(key: KeyPath, data: Any) -> object:
    for part in key:
        data = data[part]
    return data
