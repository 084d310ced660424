"""Done when 4: a newest checkpoint that is not whole is refused with its reason, the one before is taken, nothing is
deleted."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.fault.harness import Job


def truncate_a_shard(folder: Path) -> None:
    shard = next(folder.glob("global_step*/*_optim_states.pt"))
    shard.write_bytes(shard.read_bytes()[:-100])


def empty_it(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()


def leave_it_half_written(folder: Path) -> None:
    (folder / "MANIFEST.json").unlink()
    (folder / "trainer_state.json").unlink()


def lose_a_shard(folder: Path) -> None:
    next(folder.glob("global_step*/*_optim_states.pt")).unlink()


def flip_a_bit(folder: Path) -> None:
    path = folder / "adapter_model.safetensors"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def copy_of(job: Job, folder: Path, max_steps: int) -> Job:
    shutil.copytree(job.output_dir, folder / "out")
    config = {
        **job.config,
        "output_dir": str(folder / "out"),
        "training": {**job.config["training"], "max_steps": max_steps},
    }
    return Job(folder, config)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (truncate_a_shard, "bytes were written"),
        (empty_it, "no MANIFEST.json"),
        (leave_it_half_written, "no MANIFEST.json"),
        (lose_a_shard, "is missing"),
        (flip_a_bit, "does not have the content that was written"),
    ],
)
def test_a_damaged_newest_checkpoint_is_refused(
    trained: Job, tmp_path: Path, damage: Callable[[Path], None], reason: str
) -> None:
    job = copy_of(trained, tmp_path, max_steps=8)
    damage(job.checkpoint(6))
    left_of_6 = sorted(path.name for path in job.checkpoint(6).rglob("*"))
    run = job.run()
    assert run.process.returncode == 0, run.log
    (rejected,) = run.events("checkpoint_rejected")
    assert rejected["path"].endswith("checkpoint-6")
    assert reason.replace("bytes were written", "were written") in rejected["reason"]
    assert rejected["reason"] in run.log
    assert run.events("resumed")[0]["step"] == 3
    # Nothing is deleted: neither the good one nor what is left of the bad one.
    assert job.checkpoint(3).joinpath("MANIFEST.json").is_file()
    kept = job.output_dir / "checkpoint-6.rejected"
    assert sorted(path.name for path in kept.rglob("*")) == left_of_6
    assert job.checkpoint(6).joinpath("MANIFEST.json").is_file()  # saved again on the way to step 8


def test_a_stray_folder_with_a_high_number_is_refused(trained: Job, tmp_path: Path) -> None:
    job = copy_of(trained, tmp_path, max_steps=8)
    job.checkpoint(99).mkdir()
    run = job.run()
    assert run.process.returncode == 0, run.log
    assert run.events("resumed")[0]["step"] == 6


def test_a_finished_run_says_so_and_trains_nothing(trained: Job) -> None:
    run = trained.run()
    assert run.process.returncode == 0
    assert "nothing left to do" in run.log
    assert not run.events("generation_started")


def test_another_job_on_the_same_folder_is_refused(trained: Job, tmp_path: Path) -> None:
    job = copy_of(trained, tmp_path, max_steps=8)
    job.configure({**job.config, "lora": {**job.config["lora"], "r": 8}})
    run = job.run()
    assert run.process.returncode == 2
    assert "lora.r: 4 there, 8 now" in run.log
