"""The program behind `ftlaunch prepare`: encodes and checks all records with the model's own tokenizer.

A request (JSON: `config`, `num_processes`) comes on standard input; lines of JSON go to standard output: `told` for
progress, then one `facts`, or one `error` that the user can mend.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any, Literal

from launcher.config.models import JobConfig
from launcher.data.encode_all import NOTHING_LEFT, UNUSABLE, Statistics, Wanted, encode_files
from launcher.data.facts import DataFacts
from launcher.data.prepared import PreparedWriter, Recipe, folder_of, key_of, load, tokenizer_digest
from launcher.data.records import expand_files
from launcher.data.scan import REPEATED, ROLE, Faults
from launcher.errors import UserError


def recipe_of(config: JobConfig, tokenizer: Any) -> Recipe:
    """What the ranks and `ftlaunch prepare` must agree on to use the same set."""
    data = config.data
    assert data is not None  # whoever encodes has checked
    return Recipe(tokenizer_digest(tokenizer), data.format, data.system_prompt, data.max_length, data.train_on_prompt)


def main() -> int:
    request = json.loads(sys.stdin.read())
    config = JobConfig.model_validate(request["config"])
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # several processes instead
    try:
        _prepare(config, int(request["num_processes"]))
    except UserError as error:
        _say(error=str(error))
    return 0


def _prepare(config: JobConfig, num_processes: int) -> None:
    from launcher.train.model import load_tokenizer

    assert config.data is not None  # the command has checked
    tokenizer = load_tokenizer(config)
    answer = []
    sets: tuple[tuple[Literal["train", "eval"], list[str]], ...] = (
        ("train", config.data.train),
        ("eval", config.data.eval),
    )
    for name, patterns in sets:
        if patterns:
            answer.append(_prepare_one(config, name, patterns, tokenizer, num_processes))
    _say(facts=answer)


def _prepare_one(
    config: JobConfig, name: Literal["train", "eval"], patterns: list[str], tokenizer: Any, num_processes: int
) -> dict[str, Any]:
    data = config.data
    assert data is not None
    files = expand_files(patterns)
    wanted = Wanted(
        data.format, data.system_prompt, data.max_length, data.train_on_prompt, vocab_size=_vocab_size(config)
    )
    folder = folder_of(Path(config.output_dir)) / key_of(files, recipe_of(config, tokenizer))
    writer, faults, statistics = PreparedWriter(folder), Faults(), Statistics()

    def told(num_records: int) -> None:
        _say(told=num_records, of=name)

    try:
        for block in encode_files(files, tokenizer, wanted, num_processes=num_processes, faults=faults, told=told):
            writer.append(block.input_ids, block.labels, block.lengths)
            statistics.add(block.statistics)
        facts = _facts(name, wanted, faults, statistics)
        if facts.num_unusable or statistics.num_learned == 0:
            writer.discard()
        else:
            writer.finish(num_truncated=statistics.num_cut, report=facts.to_json())
    except BaseException:
        writer.discard()
        raise
    stored = load(folder) is not None
    return {"facts": facts.to_json(), "folder": str(folder) if stored else None}


def _facts(name: Literal["train", "eval"], wanted: Wanted, faults: Faults, statistics: Statistics) -> DataFacts:
    return DataFacts(
        name=name,
        num_records=statistics.num_records,
        num_looked_at=statistics.num_records,
        is_everything=True,
        max_length=wanted.max_length,
        unusable=faults.of(*UNUSABLE),
        num_unusable=faults.num(*UNUSABLE),
        roles=faults.of(ROLE),
        num_roles=faults.num(ROLE),
        repeated=faults.of(REPEATED),
        num_repeated=faults.num(REPEATED),
        nothing_left=faults.of(NOTHING_LEFT),
        num_nothing_left=faults.num(NOTHING_LEFT),
        num_measured=statistics.num_records,
        num_cut=statistics.num_cut,
        num_tokens=statistics.num_tokens,
        num_tokens_cut=statistics.num_tokens_cut,
        longest=statistics.longest,
        longest_at=statistics.longest_at,
        largest_id=statistics.largest_id,
        has_turns=wanted.data_format != "text",
    )


def _vocab_size(config: JobConfig) -> int | None:
    """Rows of the embedding, by the model's configuration."""
    from transformers import AutoConfig

    from launcher.train.model import prepare_model_files

    assert config.model is not None
    folder = prepare_model_files(config)
    model = AutoConfig.from_pretrained(
        folder, revision=config.model.revision or "main", trust_remote_code=config.model.trust_remote_code
    )
    size = getattr(model.get_text_config(), "vocab_size", None)
    return size if isinstance(size, int) else None


def _say(**message: Any) -> None:
    print(json.dumps(message), flush=True)


if __name__ == "__main__":
    sys.exit(main())
