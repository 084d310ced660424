"""Done when 3: killed at every step, the run ends with bit-for-bit the weights of a run without faults, and every
sample once."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from launcher.agent.ledger import effective_samples, read_samples
from launcher.data.order import SampleOrder
from tests.fault.harness import Job
from tests.fault.tiny_model import NUM_RECORDS
from tests.fault.weights import digests

MakeJob = Callable[..., Job]
STEPS = 12

METHODS: dict[str, dict[str, Any]] = {
    "lora-zero2": {"method": "lora", "deepspeed": {"stage": 2}},
    "full-zero3": {"method": "full", "lora": None, "deepspeed": {"stage": 3}},
}


@pytest.mark.parametrize("method", METHODS)
def test_killed_at_every_step_the_weights_are_those_of_an_undisturbed_run(make_job: MakeJob, method: str) -> None:
    undisturbed = make_job("undisturbed", **METHODS[method])
    assert undisturbed.run().process.returncode == 0
    expected = digests(undisturbed.checkpoint(STEPS))
    assert len(expected) > 20  # a comparison of nothing would pass as well

    # One kill for each step, alternating ranks: every attempt gets one step further than the one before, from whatever
    # checkpoint it found. Twelve kills in one run are harder than twelve runs with one kill each.
    kills = [{"rank": step % 2, "step": step} for step in range(1, STEPS + 1)]
    killed = make_job("killed", **METHODS[method], drill={"kill": kills})
    run = killed.run(timeout_s=400)
    assert run.process.returncode == 0, run.log
    assert [event["step"] for event in run.events("drill")] == list(range(1, STEPS + 1))
    assert len(run.events("generation_started")) == STEPS + 1

    assert digests(killed.checkpoint(STEPS)) == expected
    assert_samples_are_exact(killed)


def test_epochs_accumulation_and_a_short_last_batch(make_job: MakeJob) -> None:
    """61 samples in batches of 2 x 2 with accumulation over 3: the last step of each epoch is short; none is
    repeated."""
    changes: dict[str, Any] = {
        "training": {"max_steps": -1, "num_train_epochs": 2, "gradient_accumulation_steps": 3},
        "checkpoint": {"every_steps": 2},
    }
    undisturbed = make_job("undisturbed", **changes)
    shorten_data(undisturbed, 61)
    assert undisturbed.run().process.returncode == 0
    last = max(event["step"] for event in undisturbed.events("checkpoint_saved"))
    killed = make_job(
        "killed", **changes, drill={"kill": [{"rank": 0, "step": 5}, {"rank": 1, "step": 6}, {"rank": 0, "step": 9}]}
    )
    shorten_data(killed, 61)
    run = killed.run(timeout_s=300)
    assert run.process.returncode == 0, run.log
    assert digests(killed.checkpoint(last)) == digests(undisturbed.checkpoint(last))
    counts = Counter(index for ids in effective_samples(read_samples(killed.output_dir)).values() for index in ids)
    assert counts == dict.fromkeys(range(61), 2)


def shorten_data(job: Job, num_records: int) -> None:
    source = job.config["data"]["train"]
    target = job.path.parent / "short.jsonl"
    with open(source, encoding="utf-8") as stream:
        target.write_text("".join(stream.readlines()[:num_records]), "utf-8")
    job.configure({**job.config, "data": {**job.config["data"], "train": str(target)}})


def assert_samples_are_exact(job: Job) -> None:
    """What the ranks say they were given is the order itself: each sample of 12 steps x 4 places once, none twice."""
    order = SampleOrder(num_samples=NUM_RECORDS, batch_size=2, world_size=2, global_batch_size=4, seed=42)
    expected = order.permutation(0)[: STEPS * order.places_per_batch].tolist()
    steps = effective_samples(read_samples(job.output_dir))
    assert sorted(steps) == list(range(1, STEPS + 1))
    for step, ids in steps.items():
        places = expected[(step - 1) * 4 : step * 4]
        assert sorted(ids) == sorted(places), f"step {step}"
    assert json.loads((job.output_dir / "final" / "MANIFEST.json").read_text())["samples_seen"] == STEPS * 4
