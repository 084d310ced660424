"""Labels lie exactly on what the model is to learn. The tokenizer knows whole words, so that ids can be read by eye."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest

tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed")

from launcher.data.encode import EncodedDataset, encode_dataset, encode_record  # noqa: E402
from launcher.data.packing import pack  # noqa: E402
from launcher.data.records import IGNORED_LABEL, DataError, Record, Turn  # noqa: E402

WORDS = ["<unk>", "<end>", "<user>", "<assistant>", "<system>", "why", "because", "be", "brief", "one", "two", "three"]


class WordTokenizer:
    """What `encode` asks of a Transformers tokenizer, on top of a real word-level one."""

    eos_token_id: int | None = 1

    def __init__(self, template: str | None = "plain") -> None:
        self._tokenizer = tokenizers.Tokenizer(
            tokenizers.models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>")
        )
        self._tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
        self.chat_template = template

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        return {"input_ids": self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids}

    def apply_chat_template(
        self, messages: list[dict[str, str]], *, tokenize: bool, add_generation_prompt: bool
    ) -> str:
        assert not tokenize
        parts = [f"<{m['role']}> {m['content']} <end>" for m in messages]
        if self.chat_template == "changes its mind" and messages[-1]["role"] == "assistant":
            parts[0] = f"<system> {parts[0]}"
        return " ".join([*parts, "<assistant>"] if add_generation_prompt else parts)

    def words(self, ids: Any) -> list[str]:
        return ["_" if i == IGNORED_LABEL else WORDS[i] for i in ids]


def conversation(*turns: tuple[str, str]) -> Record:
    return Record("train.jsonl", 1, turns=tuple(Turn(*turn) for turn in turns))


QUESTION = conversation(("user", "why"), ("assistant", "because"))


def test_labels_cover_the_answer_and_its_end() -> None:
    tokenizer = WordTokenizer()
    ids, labels = encode_record(QUESTION, tokenizer, train_on_prompt=False)
    assert tokenizer.words(ids) == ["<user>", "why", "<end>", "<assistant>", "because", "<end>"]
    assert tokenizer.words(labels) == ["_", "_", "_", "_", "because", "<end>"]


def test_of_several_turns_the_last_answer_is_learned() -> None:
    tokenizer = WordTokenizer()
    record = conversation(
        ("system", "be brief"), ("user", "one"), ("assistant", "two"), ("user", "why"), ("assistant", "three")
    )
    ids, labels = encode_record(record, tokenizer, train_on_prompt=False)
    assert tokenizer.words(ids)[:4] == ["<system>", "be", "brief", "<end>"]
    assert [word for word in tokenizer.words(labels) if word != "_"] == ["three", "<end>"]
    assert len(ids) == len(labels)


def test_train_on_prompt_learns_everything() -> None:
    ids, labels = encode_record(QUESTION, WordTokenizer(), train_on_prompt=True)
    assert labels == ids


def test_plain_text_is_learned_whole_and_ends() -> None:
    tokenizer = WordTokenizer()
    ids, labels = encode_record(Record("t", 1, text="one two"), tokenizer, train_on_prompt=False)
    assert tokenizer.words(ids) == ["one", "two", "<end>"]
    assert labels == ids
    once, _ = encode_record(Record("t", 1, text="one <end>"), tokenizer, train_on_prompt=False)
    assert tokenizer.words(once) == ["one", "<end>"], "the end is not doubled"


def test_a_template_that_renders_the_prompt_differently_is_refused() -> None:
    with pytest.raises(DataError, match=r"train\.jsonl:1: .*train_on_prompt"):
        encode_record(QUESTION, WordTokenizer("changes its mind"), train_on_prompt=False)
    assert encode_record(QUESTION, WordTokenizer("changes its mind"), train_on_prompt=True)[0]


def test_without_a_chat_template_the_answer_is_still_what_is_learned() -> None:
    tokenizer = WordTokenizer(None)
    _, labels = encode_record(QUESTION, tokenizer, train_on_prompt=False)
    assert tokenizer.words(labels)[-2:] == ["because", "<end>"]
    assert set(tokenizer.words(labels)[:-2]) == {"_"}


def test_without_a_template_and_an_end_token_nothing_is_none() -> None:
    """Base models without an end-of-text token exist; None is no token id."""
    tokenizer = WordTokenizer(None)
    tokenizer.eos_token_id = None
    ids, labels = encode_record(QUESTION, tokenizer, train_on_prompt=False)
    assert None not in ids
    assert len(ids) == len(labels)


def dataset(*records: Record, max_length: int = 64) -> EncodedDataset:
    return encode_dataset(records, WordTokenizer(), max_length=max_length, train_on_prompt=False)


def test_a_data_set_gives_back_each_sample() -> None:
    records = [QUESTION, Record("t", 2, text="one two three"), conversation(("user", "two"), ("assistant", "three"))]
    encoded = dataset(*records)
    assert (len(encoded), encoded.num_truncated) == (3, 0)
    for index, record in enumerate(records):
        ids, labels = encoded.sample(index)
        assert (ids.tolist(), labels.tolist()) == encode_record(record, WordTokenizer(), train_on_prompt=False)


def test_long_samples_are_cut_and_counted() -> None:
    encoded = dataset(QUESTION, Record("t", 2, text="one"), max_length=5)
    assert encoded.num_truncated == 1
    assert [len(encoded.sample(i)[0]) for i in range(2)] == [5, 2]
    assert encoded.sample(0)[1].tolist()[-1] == WORDS.index("because")


def test_nothing_to_learn_is_an_error_with_the_remedy() -> None:
    with pytest.raises(DataError, match=r"raise data\.max_length"):
        dataset(QUESTION, max_length=4)
    with pytest.raises(DataError, match="no records"):
        dataset()


def test_what_was_looked_through_can_be_sent_to_another_process_and_stays_the_same_data():
    ids = np.array([3, 1, 2, 7], dtype=np.int32)
    dataset = EncodedDataset(ids, ids.copy(), np.array([0, 3, 4]), 0)
    packing = pack([3, 1], 8)
    fresh = dataset.digest(), dataset.digest(packing)
    dataset.look_through()
    sent = pickle.loads(pickle.dumps(dataset))
    assert dataset.largest_token_id == sent.largest_token_id == 7
    assert (dataset.digest(), dataset.digest(packing)) == (sent.digest(), sent.digest(packing)) == fresh
    assert fresh[0] != fresh[1]
