"""What a rank begins with: tokenizer, encoded data, and the model where every rank would load the same.

Made once on a node by the template (`template.py`), from which ranks are forked; else by each rank for itself.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.config.models import JobConfig
from launcher.data.encode import EncodedDataset, encode_dataset
from launcher.data.prepared import folder_of, key_of, load
from launcher.data.records import Record, expand_files, read_records
from launcher.errors import UserError
from launcher.host.storage import StorageKind
from launcher.plan.spec import RankSpec
from launcher.train.model import load_model, load_tokenizer, prepare_model_files
from launcher.train.prepare_data import recipe_of
from launcher.train.same_weights import weights_digest

log = logging.getLogger("ftlaunch.train")

_DEFAULT_SEED = 42  # TrainingArguments.seed


@dataclass(frozen=True)
class Inputs:
    """`model` is None where each rank has to load its own; `digest`: of its weights. `sources`: the files that all this
    was made from, as they were then; `made_for`: what else it depends on."""

    tokenizer: Any
    train: EncodedDataset
    evaluation: EncodedDataset | None
    model: Any | None
    digest: str
    made_for: str
    sources: Mapping[str, tuple[int, int, int]]

    def suit(self, spec: RankSpec) -> bool:
        return self.made_for == _made_for(spec)

    @property
    def are_current(self) -> bool:
        """Whether the files are still those that were read. Some system calls for each of them."""
        return self.sources == {name: _stamp(name) for name in self.sources}


def make_inputs(
    spec: RankSpec, config: JobConfig, enter: Callable[[str], None], tell_records: Callable[[int], None]
) -> Inputs:
    """Needs no process group and no rank's number, so it can be done before there are any. Raises UserError.

    `enter` is told of each phase, `tell_records` how many records have been encoded in it.
    """
    if config.data is None:
        raise UserError("data: is missing")
    enter("preparing model files")
    folder = prepare_model_files(config)
    sources = {name: _stamp(name) for name in _source_files(config, folder)}
    enter("encoding data")
    tokenizer = load_tokenizer(config)
    train, evaluation = encode_all(spec, config, tokenizer, tell_records)
    train.look_through()
    model, digest = None, ""
    if can_be_shared(spec, config):
        enter("loading model")
        model = load_model(spec, config, seed=int(config.training.get("seed", _DEFAULT_SEED)))
        digest = weights_digest(model)
    return Inputs(tokenizer, train, evaluation, model, digest, _made_for(spec), sources)


def can_be_shared(spec: RankSpec, config: JobConfig) -> bool:
    """ZeRO-3 divides weights among the ranks while they are loaded; QLoRA quantizes them on the rank's own GPU."""
    return spec.zero_stage != 3 and config.method != "qlora" and spec.shares_model


def encode_all(
    spec: RankSpec, config: JobConfig, tokenizer: Any, tell_records: Callable[[int], None]
) -> tuple[EncodedDataset, EncodedDataset | None]:
    """Training and evaluation data; what `ftlaunch prepare` has kept of them is only mapped."""
    data = config.data
    assert data is not None  # callers have checked

    def encode(patterns: Sequence[str]) -> EncodedDataset:
        kept = _prepared(spec, config, patterns, tokenizer)
        if kept is not None:
            return kept
        records = told(read_records(patterns, data.format, data.system_prompt))
        return encode_dataset(records, tokenizer, max_length=data.max_length, train_on_prompt=data.train_on_prompt)

    def told(records: Iterator[Record]) -> Iterator[Record]:
        for count, record in enumerate(records, start=1):
            tell_records(count)
            yield record

    return encode(data.train), encode(data.eval) if data.eval else None


def _prepared(spec: RankSpec, config: JobConfig, patterns: Sequence[str], tokenizer: Any) -> EncodedDataset | None:
    """What `ftlaunch prepare` has kept for these very files, tokenizer and settings."""
    folder = folder_of(spec.output_path)
    if not folder.is_dir():
        return None
    key = key_of(expand_files(patterns), recipe_of(config, tokenizer))
    dataset = load(folder / key, mapped=spec.storage_kind is StorageKind.POSIX)
    what = "prepared data: %s is used" if dataset else "prepared data: %s is not there, the records are encoded"
    log.info(what, folder / key)
    return dataset


def _made_for(spec: RankSpec) -> str:
    config = spec.config
    training = config.get("training", {})
    parts: dict[str, Any] = {name: config.get(name) for name in ("model", "method", "lora", "qlora", "data")}
    parts["seed"] = training.get("seed", _DEFAULT_SEED)
    parts["plan"] = [spec.precision, spec.device, spec.zero_stage, spec.gradient_checkpointing]
    parts["targets"] = spec.lora_target_modules
    return json.dumps(parts, sort_keys=True)


def _source_files(config: JobConfig, model_folder: str) -> list[str]:
    """A hub id has none here: what it stands for lies in a cache, whose files do not change."""
    assert config.data is not None  # make_inputs() has checked
    folder = Path(model_folder)
    files = [path for path in folder.iterdir() if path.is_file()] if folder.is_dir() else []
    files += expand_files(config.data.train)
    if config.data.eval:
        files += expand_files(config.data.eval)
    return [str(path) for path in files]


def _stamp(name: str) -> tuple[int, int, int]:
    try:
        stat = os.stat(name)
    except OSError:
        return (0, 0, 0)  # gone: whoever reads it will say so
    return (stat.st_ino, stat.st_size, stat.st_mtime_ns)
