"""Conversations in, token ids and labels out, held compactly: one flat array and offsets instead of millions of
lists."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from launcher.data.packing import Packing
from launcher.data.records import IGNORED_LABEL, DataError, Record

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True)
class EncodedDataset:
    """`num_samples` token sequences of varying length.

    input_ids, labels: int32 of shape (total tokens,); offsets: int64 of shape (num_samples + 1,).
    """

    input_ids: NDArray[np.int32]
    labels: NDArray[np.int32]
    offsets: NDArray[np.int64]
    num_truncated: int

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def digest(self, packing: Packing | None = None) -> str:
        """XXH3-128 (hex) of all token ids, labels and boundaries, and of the rows where samples are packed: the same
        data, template, tokenizer and packing give the same."""
        hasher = xxhash.xxh3_128()
        rows = () if packing is None else (packing.samples, packing.offsets)
        for array in (self.input_ids, self.labels, self.offsets, *rows):
            hasher.update(np.ascontiguousarray(array).view(np.uint8).data)
        return str(hasher.hexdigest())

    def sample(self, index: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        start, end = self.offsets[index], self.offsets[index + 1]
        return self.input_ids[start:end], self.labels[start:end]


def encode_record(record: Record, tokenizer: Any, *, train_on_prompt: bool) -> tuple[list[int], list[int]]:
    """Token ids and labels of one record, not yet truncated.

    Labels cover the last assistant turn and the end-of-turn tokens that follow it; with `train_on_prompt`, everything.
    Raises DataError when the chat template changes the prompt's tokens once the answer is appended: labels would be
    shifted.
    """
    if record.text:
        ids = list(tokenizer(record.text)["input_ids"])
        if tokenizer.eos_token_id is not None and ids[-1:] != [tokenizer.eos_token_id]:
            ids.append(tokenizer.eos_token_id)
        return ids, list(ids)
    messages = [{"role": turn.role, "content": turn.content} for turn in record.turns]
    if not getattr(tokenizer, "chat_template", None):
        return _encode_plain(tokenizer, messages, train_on_prompt=train_on_prompt)
    full = _template_ids(tokenizer, messages, add_generation_prompt=False)
    if train_on_prompt:
        return full, list(full)
    prompt = _template_ids(tokenizer, messages[:-1], add_generation_prompt=True)
    if full[: len(prompt)] != prompt:
        raise DataError(
            f"{record.source}:{record.line}: the tokenizer's chat template renders the prompt differently once the "
            "answer is there, so the answer's place is unknown; use data.train_on_prompt: true or another template"
        )
    return full, [IGNORED_LABEL] * len(prompt) + full[len(prompt) :]


def encode_dataset(
    records: Iterable[Record], tokenizer: Any, *, max_length: int, train_on_prompt: bool
) -> EncodedDataset:
    """Encode all records, cut to `max_length`. Raises DataError when nothing is left to learn from."""
    ids_parts: list[NDArray[np.int32]] = []
    label_parts: list[NDArray[np.int32]] = []
    lengths: list[int] = []
    num_truncated = 0
    for record in records:
        ids, labels = encode_record(record, tokenizer, train_on_prompt=train_on_prompt)
        num_truncated += len(ids) > max_length
        ids_parts.append(np.asarray(ids[:max_length], dtype=np.int32))
        label_parts.append(np.asarray(labels[:max_length], dtype=np.int32))
        lengths.append(len(ids_parts[-1]))
    if not lengths:
        raise DataError("data.train: the files hold no records")
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    labels_flat = np.concatenate(label_parts)
    if not bool((labels_flat != IGNORED_LABEL).any()):
        raise DataError(
            f"data.train: after cutting to max_length {max_length} no record has a token to learn; raise "
            f"data.max_length"
        )
    return EncodedDataset(np.concatenate(ids_parts), labels_flat, offsets, num_truncated)


def plain_prompt(messages: Sequence[dict[str, str]]) -> str:
    """The prompt for a model without a chat template: `role: content` lines, and the beginning of the answer."""
    return "".join(f"{message['role']}: {message['content']}\n" for message in messages) + "assistant:"


def _encode_plain(
    tokenizer: Any, messages: Sequence[dict[str, str]], *, train_on_prompt: bool
) -> tuple[list[int], list[int]]:
    """Prompt and answer are encoded apart: encoded together, a byte-pair tokenizer would merge across their border."""
    prompt = list(tokenizer(plain_prompt(messages[:-1]))["input_ids"])
    if prompt and prompt[-1] == tokenizer.eos_token_id:
        prompt.pop()
    answer = list(tokenizer(" " + messages[-1]["content"], add_special_tokens=False)["input_ids"])
    if tokenizer.eos_token_id is not None:
        answer.append(tokenizer.eos_token_id)
    ids = prompt + answer
    return ids, list(ids) if train_on_prompt else [IGNORED_LABEL] * len(prompt) + answer


def _template_ids(tokenizer: Any, messages: Sequence[dict[str, str]], *, add_generation_prompt: bool) -> list[int]:
    text = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=add_generation_prompt)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])
