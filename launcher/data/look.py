"""The look at the data that every start takes: a second or so, without torch and without transformers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

from launcher.data.facts import DataFacts
from launcher.data.records import Record
from launcher.data.scan import RECORD, REPEATED, ROLE, DataScan, scan_files
from launcher.errors import UserError

BUDGET_S = 1.0  # for each of train and eval; the check of a whole node has three seconds
NUM_MEASURED = 100  # records whose tokens are counted
_TURN_TOKENS = 4  # at least, of a chat template


def look_at_data(
    name: Literal["train", "eval"],
    patterns: Sequence[str],
    data_format: str,
    system_prompt: str | None,
    max_length: int,
    tokenizer: Any,
    *,
    budget_s: float = BUDGET_S,
) -> DataFacts | None:
    """`tokenizer`: of `load_tokenizer_file`; None counts no tokens. None where a file is not there or cannot be read,
    which `check_inputs` says."""
    try:
        scan = scan_files(patterns, data_format, system_prompt, budget_s=budget_s, num_sampled=NUM_MEASURED)
    except (OSError, UserError):
        return None
    return _facts(name, scan, max_length, tokenizer)


def _facts(name: Literal["train", "eval"], scan: DataScan, max_length: int, tokenizer: Any) -> DataFacts:
    lengths, largest_id = _measure(scan.sample, tokenizer)
    longest, place = max(((length, place) for place, length in enumerate(lengths)), default=(0, -1))
    where = f"{scan.sample[place].source}:{scan.sample[place].line}" if place >= 0 else ""
    cut = [length for length in lengths if length > max_length]
    return DataFacts(
        name=name,
        num_records=scan.num_records,
        num_looked_at=scan.num_looked_at,
        is_everything=False,
        max_length=max_length,
        unusable=scan.faults.of(RECORD),
        num_unusable=scan.faults.num(RECORD),
        roles=scan.faults.of(ROLE),
        num_roles=scan.faults.num(ROLE),
        repeated=scan.faults.of(REPEATED),
        num_repeated=scan.faults.num(REPEATED),
        num_measured=len(lengths),
        num_cut=len(cut),
        num_tokens=sum(lengths),
        num_tokens_cut=sum(cut) - max_length * len(cut),
        longest=longest,
        longest_at=where,
        largest_id=largest_id,
        has_turns=any(record.turns for record in scan.sample),
    )


def _measure(records: Iterable[Record], tokenizer: Any) -> tuple[list[int], int]:
    """Tokens of each record, and the largest token id."""
    if tokenizer is None:
        return [], -1
    lengths, largest = [], -1
    for record in records:
        texts = [turn.content for turn in record.turns] or [record.text]
        encoded = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
        lengths.append(sum(len(ids) for ids in encoded) + _TURN_TOKENS * len(record.turns))
        largest = max([largest, *(max(ids) for ids in encoded if ids)])
    return lengths, largest


def load_tokenizer_file(tokenizer_file: Path | None) -> Any:
    """The tokenizer of a tokenizer.json, without transformers; None where that cannot be had."""
    if tokenizer_file is None or not tokenizer_file.is_file():
        return None
    try:
        import tokenizers

        return tokenizers.Tokenizer.from_file(str(tokenizer_file))
    except Exception:  # noqa: BLE001  # whatever it is, the ranks will say it better: here only lengths are unknown
        return None
