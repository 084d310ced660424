"""What is kept on disk is what would be encoded, and nothing else is taken for it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("tokenizers", reason="tokenizers is not installed")

from launcher.data.encode import encode_batch, encode_dataset, encode_record
from launcher.data.encode_all import NOTHING_LEFT, TOKEN, Statistics, Wanted, encode_files
from launcher.data.prepared import META, PreparedWriter, Recipe, folder_of, key_of, load
from launcher.data.records import DataError, Record, Turn, read_records
from launcher.data.scan import RECORD, REPEATED, Faults
from tests.unit.data.test_encode import WordTokenizer

RECIPE = Recipe("t", "auto", None, 8, False)


class BatchTokenizer(WordTokenizer):
    """Takes lists, too, as Transformers' tokenizers do; its template refuses some conversations."""

    def __call__(self, text: Any, add_special_tokens: bool = True) -> dict[str, Any]:
        if isinstance(text, str):
            return super().__call__(text, add_special_tokens)
        return {"input_ids": [super(BatchTokenizer, self).__call__(one)["input_ids"] for one in text]}

    def apply_chat_template(self, messages: Any, *, tokenize: bool, add_generation_prompt: bool) -> Any:
        if messages and isinstance(messages[0], list):
            return [
                self.apply_chat_template(one, tokenize=tokenize, add_generation_prompt=add_generation_prompt)
                for one in messages
            ]
        if any(message["role"] == "refused" for message in messages):
            raise ValueError("roles must alternate")
        return super().apply_chat_template(messages, tokenize=tokenize, add_generation_prompt=add_generation_prompt)


def record(number: int, *roles: str) -> Record:
    words = ("why", "because", "be", "brief", "one", "two", "three")
    turns = tuple(
        Turn(role, f"{words[(number + i) % 7]} {words[(number * 3 + i) % 7]}") for i, role in enumerate(roles)
    )
    return Record("t.jsonl", number, turns=turns)


@pytest.mark.parametrize("template", ["plain", None, "changes its mind"])
@pytest.mark.parametrize("train_on_prompt", [False, True])
def test_a_batch_is_encoded_as_its_records_are(template: str | None, train_on_prompt: bool) -> None:
    tokenizer = BatchTokenizer(template)
    records = [
        record(n, *roles) for n, roles in enumerate([("user", "assistant"), ("system", "user", "assistant")] * 3)
    ]
    records += [Record("t.jsonl", 9, text="one two"), record(10, "user", "assistant")]

    def alone(one: Record) -> object:
        try:
            return encode_record(one, tokenizer, train_on_prompt=train_on_prompt)
        except DataError as error:
            return str(error)

    together = encode_batch(records, tokenizer, train_on_prompt=train_on_prompt)
    assert [str(one) if isinstance(one, DataError) else one for one in together] == [alone(one) for one in records]


def test_what_the_template_refuses_stands_alone() -> None:
    records = [record(1, "user", "assistant"), record(2, "refused", "assistant"), record(3, "user", "assistant")]
    first, refused, last = encode_batch(records, BatchTokenizer(), train_on_prompt=False)
    assert isinstance(refused, DataError)
    assert str(refused) == "t.jsonl:2: the chat template refuses it: roles must alternate"
    assert not isinstance(first, DataError)
    assert not isinstance(last, DataError)


def write(path: Path, num_records: int = 30) -> Path:
    words = ("why", "because", "brief", "one", "two")
    lines = [json.dumps({"question": " ".join(words[: 1 + n % 5]), "answer": words[n % 4]}) for n in range(num_records)]
    path.write_text("\n".join(lines) + "\n")
    return path


def prepared(files: list[Path], folder: Path, num_processes: int = 1) -> Faults:
    faults, statistics, writer = Faults(), Statistics(), PreparedWriter(folder)
    wanted = Wanted("auto", None, 8, False)
    for block in encode_files(files, BatchTokenizer(), wanted, num_processes=num_processes, faults=faults):
        writer.append(block.input_ids, block.labels, block.lengths)
        statistics.add(block.statistics)
    writer.finish(num_truncated=statistics.num_cut, report={})
    return faults


@pytest.mark.parametrize("num_processes", [1, 2])
def test_a_prepared_set_is_the_set_that_would_be_encoded(
    num_processes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("launcher.data.scan.BLOCK_BYTES", 200)
    files = [write(tmp_path / "a.jsonl"), write(tmp_path / "b.jsonl", 7)]
    prepared(files, tmp_path / "set", num_processes)
    fresh = encode_dataset(
        read_records([str(path) for path in files], "auto"), BatchTokenizer(), max_length=8, train_on_prompt=False
    )
    for mapped in (True, False):
        stored = load(tmp_path / "set", mapped=mapped)
        assert stored is not None
        assert stored.digest() == fresh.digest()
        assert stored.num_truncated == fresh.num_truncated > 0
        for index in range(len(fresh)):
            np.testing.assert_array_equal(stored.sample(index), fresh.sample(index))


def test_a_damaged_or_unfinished_set_is_none(tmp_path: Path) -> None:
    folder = tmp_path / "set"
    prepared([write(tmp_path / "a.jsonl")], folder)
    assert load(folder) is not None
    ids = next(folder.glob("input_ids-*.bin"))
    whole = ids.read_bytes()
    ids.write_bytes(bytes([whole[0] ^ 1]) + whole[1:])
    assert load(folder) is None
    ids.write_bytes(whole[:-4])
    assert load(folder) is None
    ids.write_bytes(whole)
    assert load(folder) is not None
    (folder / META).unlink()
    assert load(folder) is None


def test_a_second_writer_replaces_the_first_and_a_discarded_one_leaves_nothing(tmp_path: Path) -> None:
    path, folder = write(tmp_path / "a.jsonl"), tmp_path / "run" / "ftlaunch" / "data" / "set"
    PreparedWriter(folder).discard()
    assert not folder.parent.exists()
    prepared([path], folder)
    prepared([path], folder)
    assert len(list(folder.iterdir())) == 4
    assert load(folder) is not None
    assert folder_of(tmp_path / "run") == folder.parent


def test_the_key_is_of_contents_and_settings(tmp_path: Path) -> None:
    a, b = write(tmp_path / "a.jsonl"), write(tmp_path / "b.jsonl")
    key = key_of([a], RECIPE)
    assert key == key_of([b], RECIPE)
    changes: list[dict[str, Any]] = [
        {"tokenizer_digest": "u"},
        {"data_format": "qa"},
        {"system_prompt": "Be brief."},
        {"max_length": 9},
        {"train_on_prompt": True},
    ]
    assert set(RECIPE.__dict__) == {name for change in changes for name in change}
    others = {key_of([a], dataclasses.replace(RECIPE, **change)) for change in changes}
    b.write_text(b.read_text().replace("why", "one", 1))
    others |= {key_of([b], RECIPE), key_of([a, a], RECIPE)}
    assert len(others) == 7
    assert key not in others


def test_faults_of_all_kinds_in_the_order_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    long = json.dumps({"question": "why " * 20, "answer": "one"})
    path.write_text('{"question": "why", "answer": "one"}\n{\n' + long + '\n{"question": "why", "answer": "one"}\n')
    faults, statistics = Faults(), Statistics()
    wanted = Wanted("auto", None, 8, False, vocab_size=9)
    for block in encode_files([path], BatchTokenizer(), wanted, num_processes=1, faults=faults):
        statistics.add(block.statistics)
    assert [(fault.kind, fault.line) for fault in faults.kept] == [
        (TOKEN, 1),
        (RECORD, 2),
        (TOKEN, 3),
        (NOTHING_LEFT, 3),
        (TOKEN, 4),
        (REPEATED, 4),
    ]
    assert "token id 9 is beyond the model's vocabulary of 9" in faults.kept[0].text
    assert (statistics.num_cut, statistics.longest_at, statistics.largest_id) == (1, f"{path}:3", 9)
