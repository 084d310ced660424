"""The exactness matrix: a run that was killed in several ways against the same run undisturbed, bit for bit.

One disturbed run is killed four times: before a micro-batch, in a save, in an evaluation, after a step. Steps and ranks
differ from combination to combination, so that the whole matrix has been killed at each step.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from launcher.agent.ledger import effective_samples, read_samples
from launcher.data.encode import encode_dataset
from launcher.data.order import SampleOrder
from launcher.data.packing import pack
from launcher.data.records import read_records
from tests.fault.harness import Job, Run, base_config, merged
from tests.fault.weights import digests, history, num_tensors

STEPS = 12  # two epochs of six steps, the last of each short
SAVE_EVERY = 2
EVALUATE_EVERY = 3
NUM_RANKS = 2
BATCH_SIZE = 2
METHODS = ("lora", "qlora", "full")
STAGES = (0, 1, 2, 3)
NUM_RECORDS = {1: 22, 3: 64}  # by accumulation
NUM_RECORDS_TO_PACK = 61  # 4 steps an epoch, or 2 with accumulation
MAX_LENGTH = 64
SEED = 42


@dataclass(frozen=True)
class Combination:
    method: str
    stage: int
    accumulation: int
    packing: bool = False

    @property
    def name(self) -> str:
        return f"{self.method}-zero{self.stage}-accumulation{self.accumulation}{'-packing' * self.packing}"

    @property
    def number(self) -> int:
        return ALL.index(self)

    @property
    def num_records(self) -> int:
        return NUM_RECORDS_TO_PACK if self.packing else NUM_RECORDS[self.accumulation]

    @property
    def precision(self) -> str:
        """Each method and stage has both; with bf16 the fp32 weights are others than those that the model has."""
        return ("fp32", "bf16")[(METHODS.index(self.method) + self.stage + self.accumulation // 2) % 2]

    def config(self, tiny: Path, folder: Path) -> dict[str, Any]:
        records = (tiny / "train.jsonl").read_text("utf-8").splitlines(keepends=True)
        folder.mkdir(parents=True, exist_ok=True)
        train = folder.parent / "train.jsonl"
        train.write_text("".join(records[: self.num_records]), "utf-8")
        changes: dict[str, Any] = {
            "method": self.method,
            "lora": {"r": 4, "dropout": 0.1} if self.method != "full" else None,
            "precision": self.precision,
            "deepspeed": {"stage": self.stage},
            "data": {
                "train": str(train),
                "eval": str(tiny / "eval.jsonl"),
                "packing": self.packing,
                "max_length": MAX_LENGTH,
            },
            "training": {
                "max_steps": STEPS,
                "gradient_accumulation_steps": self.accumulation,
                "per_device_train_batch_size": BATCH_SIZE,
                "per_device_eval_batch_size": BATCH_SIZE,
                "eval_strategy": "steps",
                "eval_steps": EVALUATE_EVERY,
                "lr_scheduler_type": "cosine",
                "weight_decay": 0.1,
                "seed": SEED,
            },
            "checkpoint": {"every_steps": SAVE_EVERY},
            "cluster": {"nproc_per_node": NUM_RANKS},
        }
        return merged(base_config(tiny, folder / "out"), changes)

    @property
    def steps_per_epoch(self) -> int:
        return {1: 4, 3: 2}[self.accumulation] if self.packing else 6

    def kills(self) -> list[dict[str, Any]]:
        i = self.number // len(NUM_RECORDS)  # both accumulations are killed at every step
        rank = (self.number + i) % NUM_RANKS
        micro_batch = {"step": 1 + i * 5 % STEPS, "batch": 1}
        if self.accumulation > 1:  # in the middle; the last step of an epoch is too short to have one
            micro_batch = {"step": micro_batch["step"], "batch": 2 + i % 2}
            micro_batch["step"] -= micro_batch["step"] % self.steps_per_epoch == 0
        save, evaluation = 1 + i % (STEPS // SAVE_EVERY), 1 + i % (STEPS // EVALUATE_EVERY)
        return [
            {"rank": rank, "at": "micro_batch", **micro_batch},
            {"rank": 1 - rank, "at": "save", "step": SAVE_EVERY * save},
            {"rank": i % 2, "at": "evaluation", "step": EVALUATE_EVERY * evaluation, "batch": 1 + i // 2 % 2},
            {"rank": 1 - i % 2, "step": 1 + i * 7 % STEPS},
        ]


ALL = (
    *(Combination(*values) for values in product(METHODS, STAGES, NUM_RECORDS)),
    Combination("lora", 2, 1, packing=True),
    Combination("lora", 3, 3, packing=True),
    Combination("qlora", 0, 3, packing=True),
    Combination("full", 1, 1, packing=True),
)


@dataclass(frozen=True)
class Verdict:
    """`differences`: what is not the same; empty when the disturbed run is exact."""

    num_kills: int
    num_checkpoints: int
    num_tensors: int
    differences: tuple[str, ...]


def run_pair(
    combination: Combination, tiny: Path, folder: Path, environ_of_disturbed: dict[str, str] | None = None
) -> Verdict:
    """Run both, compare all that they have left. Raises AssertionError when a run does not end well, or a kill has not
    happened."""
    undisturbed = run_undisturbed(combination, tiny, folder)
    disturbed = run_disturbed(combination, tiny, folder, environ_of_disturbed or {})
    return compared(combination, undisturbed, disturbed)


def run_undisturbed(combination: Combination, tiny: Path, folder: Path) -> Job:
    job = Job(folder / "undisturbed", combination.config(tiny, folder / "undisturbed"))
    run = job.run(timeout_s=300)
    assert run.process.returncode == 0, run.log
    assert len(run.events("generation_started")) == 1, run.log
    return job


def run_disturbed(combination: Combination, tiny: Path, folder: Path, environ: dict[str, str]) -> Job:
    kills = combination.kills()
    config = merged(combination.config(tiny, folder / "disturbed"), {"drill": {"kill": kills}})
    job = Job(folder / "disturbed", config)
    run = job.run(timeout_s=400, environ=environ)
    assert run.process.returncode == 0, run.log
    require_kills(run, kills)
    return job


def require_kills(run: Run, kills: list[dict[str, Any]]) -> None:
    """Each has happened, once, where it was meant to, and the run went on from a checkpoint after it."""
    fired = {event["number"]: event for event in run.events("drill")}
    assert sorted(fired) == list(range(len(kills))), run.log
    for number, kill in enumerate(kills):
        assert kill.items() <= fired[number].items(), run.log
    # A rank that is killed while it saves beside the training may leave another time to come to a kill of its own.
    assert len(kills) <= len(run.events("generation_started")) <= 1 + len(kills), run.log


def compared(combination: Combination, undisturbed: Job, disturbed: Job) -> Verdict:
    folders = [f"checkpoint-{step}" for step in range(SAVE_EVERY, STEPS + 1, SAVE_EVERY)] + ["final"]
    differences: list[str] = []
    tensors = 0
    for folder in folders:
        expected, found = (digests(job.output_dir / folder) for job in (undisturbed, disturbed))
        tensors += num_tensors(undisturbed.output_dir / folder)
        differences += [f"{folder}/{key}" for key in sorted(expected | found) if expected.get(key) != found.get(key)]
    histories = [history(job.checkpoint(STEPS)) for job in (undisturbed, disturbed)]
    assert len(histories[0]) >= STEPS + STEPS // EVALUATE_EVERY
    if histories[0] != histories[1]:
        differences.append(f"losses: {histories[1]} instead of {histories[0]}")
    differences += _wrong_samples(combination, disturbed)
    return Verdict(len(disturbed.config["drill"]["kill"]), len(folders) - 1, tensors, tuple(differences))


def _wrong_samples(combination: Combination, job: Job) -> Iterator[str]:
    """Steps that were not given their part of the permutation; samples that were not given once an epoch."""
    rows = _rows(combination, job)
    global_batch = NUM_RANKS * BATCH_SIZE * combination.accumulation
    order = SampleOrder(len(rows), BATCH_SIZE, NUM_RANKS, global_batch, seed=SEED)
    assert order.steps_per_epoch == combination.steps_per_epoch
    steps = effective_samples(read_samples(job.output_dir))
    if sorted(steps) != list(range(1, STEPS + 1)):
        yield f"samples: of steps {sorted(steps)}"
    for step, ids in steps.items():
        epoch, place = divmod(step - 1, order.steps_per_epoch)
        places = order.permutation(epoch)[place * global_batch : (place + 1) * global_batch].tolist()
        if sorted(ids) != sorted(sample for row in places for sample in rows[row]):
            yield f"samples of step {step}: {ids}"
    counts = Counter(index for ids in steps.values() for index in ids)
    epochs = STEPS // order.steps_per_epoch  # whole ones
    if counts != dict.fromkeys(range(combination.num_records), epochs):
        yield f"samples: not each {epochs} times"
    seen = json.loads((job.output_dir / "final" / "MANIFEST.json").read_text("utf-8"))["samples_seen"]
    if seen != epochs * combination.num_records:
        yield f"samples: MANIFEST.json says {seen}"


def _rows(combination: Combination, job: Job) -> list[list[int]]:
    """The samples of each row, found out anew."""
    if not combination.packing:
        return [[sample] for sample in range(combination.num_records)]
    from transformers import AutoTokenizer

    records = read_records([job.config["data"]["train"]], "auto")
    tokenizer = AutoTokenizer.from_pretrained(job.config["model"]["path"])
    encoded = encode_dataset(records, tokenizer, max_length=MAX_LENGTH, train_on_prompt=False)
    packing = pack(np.diff(encoded.offsets), MAX_LENGTH)
    return [packing.row(row).tolist() for row in range(len(packing))]
