"""A run goes on with more or fewer ranks: the samples of every step stay the same, and so do its losses, up to the last
bits of the sums."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from launcher.agent.ledger import effective_samples, read_samples
from launcher.data.order import SampleOrder
from tests.fault.harness import Job
from tests.fault.tiny_model import NUM_RECORDS

MakeJob = Callable[..., Job]
STEPS = 14  # two epochs of seven steps: 64 samples, ten a step, the last one shorter
GLOBAL_BATCH = 10

# Weight decay makes the two parameter groups of full training differ.
TRAINING = {"max_steps": STEPS, "gradient_accumulation_steps": 5, "per_device_train_batch_size": 1, "weight_decay": 0.1}
METHODS: dict[str, dict[str, Any]] = {
    "lora-zero2": {"method": "lora", "lora": {"dropout": 0.0}, "deepspeed": {"stage": 2}},
    "full-zero3": {"method": "full", "lora": None, "deepspeed": {"stage": 3}},
    "full-zero1-bf16": {"method": "full", "lora": None, "deepspeed": {"stage": 1}, "precision": "bf16"},
    "lora-zero0": {"method": "lora", "lora": {"dropout": 0.0}, "deepspeed": {"stage": 0}},
}
# Of loss and gradient norm. Sums in another order: the last bits of fp32; bf16 adds up rounded gradients.
TOLERANCE = {"fp32": (2e-6, 2e-6), "bf16": (2e-3, 5e-2)}


@pytest.fixture(scope="module")
def without_dropout(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model without the dropout that draws other masks on other ranks."""
    model = tmp_path_factory.mktemp("still") / "model"
    shutil.copytree(tiny / "model", model)
    config = json.loads((model / "config.json").read_text("utf-8"))
    (model / "config.json").write_text(json.dumps({**config, "attention_dropout": 0.0}), "utf-8")
    return model


@pytest.fixture
def make_still_job(make_job: MakeJob, without_dropout: Path) -> MakeJob:
    def make(name: str, method: str, **changes: Any) -> Job:
        model = {"path": str(without_dropout)}
        return make_job(name, model=model, training=TRAINING, **METHODS[method], **changes)

    return make


def logged(job: Job, step: int) -> dict[int, tuple[float, float]]:
    """step -> loss and gradient norm (0 without ZeRO, which measures none), from the trainer's own state."""
    state = json.loads((job.checkpoint(step) / "trainer_state.json").read_text("utf-8"))
    return {e["step"]: (e["loss"], e.get("grad_norm", 0.0)) for e in state["log_history"] if "loss" in e}


@pytest.mark.parametrize("method", METHODS)
def test_killed_and_continued_with_one_then_three_ranks(make_still_job: MakeJob, method: str) -> None:
    undisturbed = make_still_job("undisturbed", method)
    assert undisturbed.run().process.returncode == 0
    expected = logged(undisturbed, STEPS)

    stops = [{"rank": 0, "step": step, "signal": "SIGSTOP"} for step in (5, 10)]
    job = make_still_job("job", method, drill={"kill": stops})
    for world_size, killed_at in ((2, 5), (1, 10)):
        with job.start("--set", f"cluster.nproc_per_node={world_size}") as run:
            run.until_event("drill", step=killed_at)  # rank 0 hangs there, so that nothing happens after it
            run.process.kill()
            run.process.wait()
    run = job.run("--set", "cluster.nproc_per_node=3")
    assert run.process.returncode == 0, run.log

    resumed = [(event["step"], event["samples_seen"]) for event in job.events("resumed")]
    assert resumed == [(3, 30), (9, 64 + 20)]
    assert [event["world_size"] for event in job.events("generation_started")] == [2, 1, 3]
    found = logged(job, STEPS)
    assert sorted(found) == sorted(expected) == list(range(1, STEPS + 1))
    for step, figures in expected.items():
        for this, that, relative in zip(found[step], figures, TOLERANCE[job.config["precision"]], strict=True):
            assert this == pytest.approx(that, rel=relative), f"step {step}"
    assert_steps_hold_their_samples(job)
    manifests = [json.loads((job.checkpoint(step) / "MANIFEST.json").read_text()) for step in (3, 6, 9, 12, STEPS)]
    assert [manifest["world_size"] for manifest in manifests] == [2, 1, 1, 3, 3]
    assert {manifest["global_batch_size"] for manifest in manifests} == {GLOBAL_BATCH}


def assert_steps_hold_their_samples(job: Job) -> None:
    """Every step was given its part of the permutation by whoever did it; every sample once an epoch."""
    order = SampleOrder(NUM_RECORDS, 1, 1, GLOBAL_BATCH, seed=42)
    steps = effective_samples(read_samples(job.output_dir))
    assert sorted(steps) == list(range(1, STEPS + 1))
    for step, ids in steps.items():
        epoch, place = divmod(step - 1, order.steps_per_epoch)
        expected = order.permutation(epoch)[place * GLOBAL_BATCH : (place + 1) * GLOBAL_BATCH].tolist()
        assert sorted(ids) == sorted(expected), f"step {step}"
    counts = Counter(index for ids in steps.values() for index in ids)
    assert counts == dict.fromkeys(range(NUM_RECORDS), 2)


def test_a_change_there_and_back_is_the_same_every_time(make_job: MakeJob) -> None:
    """With dropout the ranks of another number draw new masks: from the seed, so that a repetition draws them again."""
    first = make_job("first", training={"max_steps": 3})
    assert first.run().process.returncode == 0
    weights = []
    for name in ("once", "again"):
        job = make_job(name, training={"max_steps": 6})
        shutil.copytree(first.output_dir, job.output_dir, dirs_exist_ok=True)
        run = job.run("--set", "cluster.nproc_per_node=3")
        assert run.process.returncode == 0, run.log
        weights.append((job.checkpoint(6) / "adapter_model.safetensors").read_bytes())
    assert weights[0] == weights[1]


def test_numbers_in_the_users_own_deepspeed_json_follow_the_ranks(make_job: MakeJob, tmp_path: Path) -> None:
    own = {
        "train_batch_size": 12,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 3,
        "zero_optimization": {"stage": 2, "round_robin_gradients": True},
        "zero_allow_untested_optimizer": True,
    }
    path = tmp_path / "own.json"
    path.write_text(json.dumps(own), "utf-8")
    training = {"gradient_accumulation_steps": 3, "max_steps": 3}
    job = make_job(training=training, deepspeed={"stage": None, "config": str(path)})
    assert job.run().process.returncode == 0
    run = job.run("--set", "cluster.nproc_per_node=3", "--set", "training.max_steps=4")
    assert run.process.returncode == 0, run.log
    assert run.events("resumed")[0]["step"] == 3

    path.write_text(json.dumps({**own, "train_batch_size": 16}), "utf-8")
    run = job.run("--set", "training.max_steps=5")
    assert run.process.returncode == 2, run.log
    assert "train_batch_size is 16, but an optimizer step of this run takes 12 samples" in run.log
