"""Looks for the sample that a failed step could not take; a short-lived process, because encoding needs transformers.

This is the side that asks, in the agent, which stays small: no numpy, no transformers. `sample_finder.py` answers.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from launcher.diagnose.bad_sample import BadSample, Limits, Offence

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
    command = [sys.executable, "-m", "launcher.diagnose.sample_finder"]
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
