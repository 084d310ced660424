"""The sample that a model cannot take is named by file, line, position and value."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from launcher.agent.sample_hunt import SampleHunt, limits_of, with_sample
from launcher.config.models import JobConfig
from launcher.data.order import SampleOrder
from launcher.data.records import read_records
from launcher.diagnose.bad_sample import BadSample, Limits, Offence, describe, first_offence
from launcher.diagnose.evidence import RankEvidence, number_lines
from launcher.diagnose.sample_finder import search_records, suspects
from launcher.diagnose.sample_search import Search
from launcher.diagnose.verdict import diagnose

REPOSITORY = Path(__file__).parents[3]
LIMITS = Limits(vocabulary=100, positions=8, num_labels=100)


@pytest.mark.parametrize(
    ("ids", "labels", "offence"),
    [
        ([1, 2, 99], [-100, 2, 99], None),
        ([1, 100, 200], [1, 2, 3], Offence("token id", 1, 100, 100)),
        ([1, -1], [1, 2], Offence("token id", 1, -1, 100)),
        ([1, 2], [-100, 100], Offence("label", 1, 100, 100)),
        ([1, 2], [-1, 3], Offence("label", 0, -1, 100)),
        ([1] * 9, [1] * 9, Offence("length", 8, 9, 8)),
        ([1] * 9, [1] * 8 + [100], Offence("label", 8, 100, 100)),
    ],
)
def test_the_first_value_outside_the_tables_is_found(
    ids: list[int], labels: list[int], offence: Offence | None
) -> None:
    assert first_offence(ids, labels, LIMITS) == offence
    assert first_offence(ids, labels, Limits()) is None, "what nobody knows is no limit"


def test_a_label_that_is_no_number_is_found() -> None:
    found = first_offence([1], [math.nan], Limits())
    assert found is not None
    assert (found.kind, found.position) == ("nan", 0)


def test_the_words_name_file_line_value_and_what_to_do() -> None:
    what, remedy = describe(BadSample("train.jsonl", 48211, Offence("token id", 7, 152064, 151936), "<|new|>"))
    assert what.en == (
        "train.jsonl line 48211, position 7: token id 152064 ('<|new|>'), vocabulary 151936; the tokenizer has tokens "
        "that the model's embedding does not"
    )
    assert "resize_token_embeddings" in remedy.en
    assert "第 48211 行" in what.zh


class Words:
    """A tokenizer whose ids are written in the text; 999 is a token of its own."""

    eos_token_id = None
    chat_template = None

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, Any]:
        return {"input_ids": [int(word) for word in text.split()]}

    def convert_ids_to_tokens(self, number: int) -> str:
        return f"<{number}>"


def search_in(folder: Path, num: int = 40, **more: Any) -> Search:
    bad = (5, 30)
    lines = [{"text": "1 2 999" if i in bad else "1 2 3"} for i in range(num)]
    (folder / "train.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    search = Search(
        train=(str(folder / "train.jsonl"),),
        data_format="text",
        system_prompt=None,
        max_length=16,
        train_on_prompt=False,
        model=str(folder / "model"),
        limits=LIMITS,
        step=1,
        global_batch_size=4,
        seed=42,
    )
    return replace(search, **more)


def find(search: Search) -> BadSample | None:
    return search_records(search, list(read_records(search.train, "text")), Words())


def test_the_samples_of_the_step_that_failed_come_first(tmp_path: Path) -> None:
    place = int(np.flatnonzero(SampleOrder(40, 1, 1, 4, 42).permutation(0) == 30)[0])
    search = search_in(tmp_path, step=1 + place // 4)
    assert 30 in suspects(search, 40)
    found = find(search)
    assert found is not None
    assert (Path(found.source).name, found.line, found.token) == ("train.jsonl", 31, "<999>")
    found = find(replace(search, packed=True))
    assert found is not None
    assert found.line == 6, "where a step does not tell its samples, all are looked at in the order of the file"


def test_a_second_epoch_and_a_cut_sample_are_understood(tmp_path: Path) -> None:
    search = search_in(tmp_path, step=11)
    assert suspects(search, 40) == SampleOrder(40, 1, 1, 4, 42).permutation(1)[:4].tolist()
    assert find(replace(search, max_length=2)) is None, "the bad token is cut off"


def test_the_verdict_shows_the_sample_beside_the_assertion() -> None:
    log = "Assertion `srcIndex < srcSelectDimSize` failed."
    verdict = diagnose([RankEvidence(0, "n0", 1, 1, None, "rank-0.log", number_lines(log), 3)])
    told = with_sample(verdict, BadSample("train.jsonl", 9, Offence("token id", 7, 120, 100)))
    assert (told.cls, told.action) == ("device_assert_index", "stop")
    assert [(line.file, line.line) for line in told.evidence] == [("rank-0.log", 1), ("train.jsonl", 9)]
    assert told.cause.en.startswith(
        "rank 0 (n0): the model cannot take a sample of the training data: train.jsonl line 9"
    )


def test_limits_are_those_of_the_models_tables(tmp_path: Path) -> None:
    config = {"vocab_size": 100, "max_position_embeddings": 64}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert limits_of(str(tmp_path)) == Limits(100, None, 100), "rotary positions do not end"
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 100, "n_positions": 64}))
    assert limits_of(str(tmp_path)) == Limits(100, 64, 100)
    assert limits_of("no/such-model") == Limits()


def test_the_agent_that_asks_stays_small() -> None:
    names = ("numpy", "torch", "transformers")
    loaded = f"import sys, launcher.agent.sample_hunt; print([m for m in {names} if m in sys.modules])"
    answer = subprocess.run([sys.executable, "-c", loaded], check=True, capture_output=True, text=True, cwd=REPOSITORY)
    assert answer.stdout.strip() == "[]"


@pytest.mark.slow  # the child imports transformers
def test_a_run_finds_its_sample_in_a_process_of_its_own(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    model = tmp_path / "model"
    words = tokenizers.models.WordLevel({**{str(i): i for i in range(100)}, "999": 999}, unk_token="0")
    tokenizer = tokenizers.Tokenizer(words)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(model)
    (model / "config.json").write_text(json.dumps({"vocab_size": 100, "model_type": "llama"}))
    search_in(tmp_path)
    job = {
        "output_dir": str(tmp_path / "out"),
        "model": {"path": str(model)},
        "data": {"train": [str(tmp_path / "train.jsonl")], "format": "text"},
    }
    hunt = SampleHunt(JobConfig.model_validate(job), 4, os.environ)
    rank = RankEvidence(0, "n0", 1, 1, None, "r.log", number_lines("IndexError: index out of range in self"), None)
    verdict = hunt.explain(diagnose([rank]), [rank])
    assert "token id 999 ('999'), vocabulary 100" in verdict.cause.en
    assert hunt.explain(diagnose([replace(rank, tail=())]), [rank]).cls == "user_code", "other faults are left alone"
