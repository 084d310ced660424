"""Conversations in, token ids and labels out, held compactly: one flat array and offsets instead of millions of
lists."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
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
        hasher = self._hasher.copy()
        for array in () if packing is None else (packing.samples, packing.offsets):
            hasher.update(np.ascontiguousarray(array).view(np.uint8).data)
        return str(hasher.hexdigest())

    @cached_property
    def _hasher(self) -> xxhash.xxh3_128:
        hasher = xxhash.xxh3_128()
        for array in (self.input_ids, self.labels, self.offsets):
            hasher.update(np.ascontiguousarray(array).view(np.uint8).data)
        return hasher

    def __getstate__(self) -> dict[str, Any]:
        """For DataLoader workers that are not forked: a hasher cannot be pickled."""
        return {name: value for name, value in self.__dict__.items() if name != "_hasher"}

    @cached_property
    def largest_token_id(self) -> int:
        return int(self.input_ids.max())

    def look_through(self) -> None:
        """Once, so that what is asked of all tokens is known to every process that is forked from this one."""
        _ = self._hasher, self.largest_token_id

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
    messages = _messages(record)
    if not getattr(tokenizer, "chat_template", None):
        return _encode_plain(tokenizer, messages, train_on_prompt=train_on_prompt)
    full = _template_ids(tokenizer, messages, add_generation_prompt=False)
    prompt = None if train_on_prompt else _template_ids(tokenizer, messages[:-1], add_generation_prompt=True)
    labelled = _labelled(record, full, prompt)
    if isinstance(labelled, DataError):
        raise labelled
    return labelled


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


def encode_batch(
    records: Sequence[Record], tokenizer: Any, *, train_on_prompt: bool
) -> list[tuple[list[int], list[int]] | DataError]:
    """What `encode_record` gives for each record, several times faster: the tokenizer gets all texts at once. An error
    stands in the place of its record."""
    results: list[tuple[list[int], list[int]] | DataError | None] = [None] * len(records)
    with_template: list[int] = []
    for place, record in enumerate(records):
        if record.text or not getattr(tokenizer, "chat_template", None):
            results[place] = encode_record(record, tokenizer, train_on_prompt=train_on_prompt)
        else:
            with_template.append(place)
    asked = [_messages(records[place]) for place in with_template]
    whole = _render_all(tokenizer, asked, add_generation_prompt=False)
    prompts = (
        [None] * len(whole)
        if train_on_prompt
        else _render_all(tokenizer, [messages[:-1] for messages in asked], add_generation_prompt=True)
    )
    texts = [text for text in (*whole, *prompts) if isinstance(text, str)]
    encoded = iter(tokenizer(texts, add_special_tokens=False)["input_ids"] if texts else [])
    whole_ids, prompt_ids = (
        [list(next(encoded)) if isinstance(text, str) else text for text in part] for part in (whole, prompts)
    )
    for place, full, prompt in zip(with_template, whole_ids, prompt_ids, strict=True):
        record = records[place]
        error = next((part for part in (full, prompt) if isinstance(part, Exception)), None)
        if isinstance(full, list) and not isinstance(prompt, (str, Exception)):
            results[place] = _labelled(record, full, prompt)
        else:
            results[place] = DataError(f"{record.source}:{record.line}: the chat template refuses it: {error}")
    return [result for result in results if result is not None]


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


def _labelled(record: Record, full: list[int], prompt: list[int] | None) -> tuple[list[int], list[int]] | DataError:
    """`prompt`: what is not learned of `full`; None learns everything."""
    if prompt is None:
        return full, list(full)
    if full[: len(prompt)] != prompt:
        return DataError(
            f"{record.source}:{record.line}: the tokenizer's chat template renders the prompt differently once the "
            "answer is there, so the answer's place is unknown; use data.train_on_prompt: true or another template"
        )
    return full, [IGNORED_LABEL] * len(prompt) + full[len(prompt) :]


def _template_ids(tokenizer: Any, messages: Sequence[dict[str, str]], *, add_generation_prompt: bool) -> list[int]:
    text = _rendered(tokenizer, messages, add_generation_prompt=add_generation_prompt)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _messages(record: Record) -> list[dict[str, str]]:
    return [{"role": turn.role, "content": turn.content} for turn in record.turns]


def _render_all(
    tokenizer: Any, conversations: list[list[dict[str, str]]], *, add_generation_prompt: bool
) -> list[str | Exception]:
    """All at once, which is faster; one by one where the template refuses some. An empty conversation (the prompt of
    a lone answer) is for the slow way, too: a list of them would be taken for one conversation."""
    if conversations and all(conversations):
        with contextlib.suppress(Exception):
            return list(
                tokenizer.apply_chat_template(
                    conversations, tokenize=False, add_generation_prompt=add_generation_prompt
                )
            )
    rendered: list[str | Exception] = []
    for messages in conversations:
        try:
            rendered.append(_rendered(tokenizer, messages, add_generation_prompt=add_generation_prompt))
        except Exception as error:  # noqa: BLE001  # the template is a program that came with the model
            rendered.append(error)
    return rendered


def _rendered(tokenizer: Any, messages: Sequence[dict[str, str]], *, add_generation_prompt: bool) -> str:
    return str(
        tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=add_generation_prompt)
    )
