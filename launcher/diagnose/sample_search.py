"""Looks for the sample that a failed step could not take; a short-lived process, because encoding needs transformers.

`find_bad_sample` asks; `python -m launcher.diagnose.sample_search` answers: one JSON object in, one out. The samples of
the step that failed come first: they follow from the seed and the step alone (`data/order.py`); then all the others, as
far as the time goes.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from launcher.data.encode import encode_record
from launcher.data.order import SampleOrder
from launcher.data.records import Record, read_records
from launcher.diagnose.bad_sample import BadSample, Limits, Offence, first_offence

SEARCH_WITHIN_S = 15.0


@dataclass(frozen=True)
class Search:
    """`step` is the optimizer step that failed, from 1; `model` a folder or a hub id that has the tokenizer.

    `packed`: samples are packed into rows, so that a step does not tell which they were.
    """

    train: tuple[str, ...]
    data_format: str
    system_prompt: str | None
    max_length: int
    train_on_prompt: bool
    model: str
    limits: Limits
    step: int
    global_batch_size: int
    seed: int
    packed: bool = False
    trust_remote_code: bool = False
    within_s: float = SEARCH_WITHIN_S


def find_bad_sample(search: Search, environ: Mapping[str, str]) -> BadSample | None:
    """None where there is none, and where the search failed or took too long: it is help, not evidence."""
    command = [sys.executable, "-m", "launcher.diagnose.sample_search"]
    # The verdict must not wait for a hub that does not answer: what the run has loaded is in the cache.
    environ = {**environ, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "TOKENIZERS_PARALLELISM": "false"}
    root = str(Path(__file__).parents[2])
    environ["PYTHONPATH"] = f"{root}:{environ['PYTHONPATH']}" if environ.get("PYTHONPATH") else root
    try:
        done = subprocess.run(
            command,
            input=json.dumps(asdict(search)).encode(),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=search.within_s,
            env=environ,
            check=True,
        )
        found = json.loads(done.stdout.splitlines()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return None
    if found is None:
        return None
    return BadSample(found["source"], found["line"], Offence(**found["offence"]), found["token"])


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
            token = tokenizer.convert_ids_to_tokens(int(offence.value)) if offence.kind == "token id" else None
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
