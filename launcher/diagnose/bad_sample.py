"""The sample that a model cannot take, found without a GPU: a token id, a label or a length outside the model's tables.

Pure, and without torch: token ids and labels in, the first offence out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from launcher.data.records import IGNORED_LABEL
from launcher.i18n import Text

TOKEN, LABEL, LENGTH, NOT_A_NUMBER = "token id", "label", "length", "nan"

# What a fault of these classes says about the data of the step.
SEARCHED = ("device_assert_index", "device_assert_label", "data_too_long")


@dataclass(frozen=True)
class Limits:
    """Rows of the embedding; rows of a learned table of positions; number of classes of the labels. None: unknown."""

    vocabulary: int | None = None
    positions: int | None = None
    num_labels: int | None = None


@dataclass(frozen=True)
class Offence:
    """`value` of `kind` at `position` (0-based, in tokens), where `limit` is the first value that is too large."""

    kind: str
    position: int
    value: float
    limit: int


@dataclass(frozen=True)
class BadSample:
    """An offence and where it comes from; `token` is the text of the token, where the tokenizer has one."""

    source: str
    line: int
    offence: Offence
    token: str = ""


def first_offence(ids: Sequence[int], labels: Sequence[float], limits: Limits) -> Offence | None:
    """None for a sample that the model can take. A length counts only where ids and labels are right."""
    for position, value in enumerate(ids):
        if limits.vocabulary is not None and not 0 <= value < limits.vocabulary:
            return Offence(TOKEN, position, value, limits.vocabulary)
    for position, label in enumerate(labels):
        if math.isnan(label):
            return Offence(NOT_A_NUMBER, position, label, limits.num_labels or 0)
        if label != IGNORED_LABEL and limits.num_labels is not None and not 0 <= label < limits.num_labels:
            return Offence(LABEL, position, label, limits.num_labels)
    if limits.positions is not None and len(ids) > limits.positions:
        return Offence(LENGTH, limits.positions, len(ids), limits.positions)
    return None


def describe(found: BadSample) -> tuple[Text, Text]:
    """What it is, beginning with file and line; and what to do."""
    offence = found.offence
    where = f"{found.source} line {found.line}"
    place = Text(
        f"{where}, position {offence.position}: ", f"{found.source} 第 {found.line} 行，第 {offence.position} 个位置："
    )
    value = f"{offence.value:g}" if isinstance(offence.value, float) else str(offence.value)
    token = f" ({found.token!r})" if found.token else ""
    if offence.kind == TOKEN:
        what = Text(
            f"token id {value}{token}, vocabulary {offence.limit}; the tokenizer has tokens that the model's embedding "
            "does not",
            f"token id {value}{token}，而词表大小为 {offence.limit}；分词器中有模型词嵌入没有的 token",
        )
        remedy = Text(
            "Use the tokenizer of this very model, or a model whose embedding was resized (resize_token_embeddings).",
            "使用与该模型配套的分词器，或先用 resize_token_embeddings 扩大模型的词嵌入。",
        )
    elif offence.kind == LABEL:
        what = Text(
            f"label {value}, where labels are below {offence.limit} or {IGNORED_LABEL}",
            f"标签 {value}，而标签应小于 {offence.limit} 或为 {IGNORED_LABEL}",
        )
        remedy = Text("Mend the label, or the number of labels.", "修正该标签或标签类别数。")
    elif offence.kind == LENGTH:
        what = Text(
            f"{value} tokens, where the model has {offence.limit} positions",
            f"共 {value} 个 token，而模型只有 {offence.limit} 个位置",
        )
        remedy = Text(
            f"Set data.max_length to at most {offence.limit}.", f"将 data.max_length 设为不超过 {offence.limit}。"
        )
    else:
        what = Text("the label is not a number", "标签不是数字（NaN）")
        remedy = Text("Mend or remove that record.", "修正或删除该记录。")
    return Text(place.en + what.en, place.zh + what.zh), remedy
