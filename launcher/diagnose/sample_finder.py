"""Finds the sample that a failed step could not take: `python -m launcher.diagnose.sample_finder`, a `Search` in.

The samples of the step that failed come first: they follow from the seed and the step alone (`data/order.py`); then all
the others, as far as the time goes. Uses transformers for the tokenizer, so `sample_search.py` starts it as a process
of its own.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from launcher.data.encode import encode_record
from launcher.data.order import SampleOrder
from launcher.data.records import Record, read_records
from launcher.diagnose.bad_sample import TOKEN, BadSample, Limits, first_offence
from launcher.diagnose.sample_search import Search


def suspects(search: Search, num_samples: int) -> list[int]:
    """The samples of the step that failed, over all ranks."""
    order = SampleOrder(num_samples, 1, 1, search.global_batch_size, search.seed)
    epoch, step = divmod(search.step - 1, order.steps_per_epoch)
    start = step * search.global_batch_size
    chosen: list[int] = order.permutation(epoch)[start : start + search.global_batch_size].tolist()
    return chosen


def search_records(search: Search, records: Sequence[Record], tokenizer: Any) -> BadSample | None:
    deadline_s = time.monotonic() + search.within_s
    for index in _in_order(search, len(records)):
        ids, labels = encode_record(records[index], tokenizer, train_on_prompt=search.train_on_prompt)
        offence = first_offence(ids[: search.max_length], labels[: search.max_length], search.limits)
        if offence:
            token = tokenizer.convert_ids_to_tokens(int(offence.value)) if offence.kind == TOKEN else None
            return BadSample(records[index].source, records[index].line, offence, token or "")
        if time.monotonic() > deadline_s:
            return None
    return None


def _in_order(search: Search, num_samples: int) -> Iterator[int]:
    first = [] if search.packed else suspects(search, num_samples)
    yield from first
    yield from np.setdiff1d(np.arange(num_samples), first).tolist()


def main() -> int:
    raw = json.load(sys.stdin)
    search = Search(**{**raw, "limits": Limits(**raw["limits"]), "train": tuple(raw["train"])})
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(search.model, trust_remote_code=search.trust_remote_code)
    records = list(read_records(search.train, search.data_format, search.system_prompt))
    found = search_records(search, records, tokenizer)
    print(json.dumps(asdict(found) if found else None))
    return 0


if __name__ == "__main__":
    sys.exit(main())
