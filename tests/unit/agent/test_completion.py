"""Exit code 0 needs proof, and the proof is what the trainer itself has left on disk."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from launcher.agent.completion import finished_already, proof_of_completion, read_final
from launcher.checkpoint.commit import commit_folder
from launcher.checkpoint.manifest import MANIFEST_NAME, write_manifest
from tests.unit.checkpoint.checkpoint_folders import IDENTITY, contents, manifest_of, save, stage

PLAN = {"max_steps": 100, "num_train_epochs": None}


def write_final(output_dir: Path, step: int, planned: int | None = 100) -> Path:
    folder = output_dir / "final"
    folder.mkdir(parents=True)
    (folder / "adapter_model.safetensors").write_bytes(b"tuned weights")
    (folder / "tokenizer.json").write_bytes(b"{}")
    write_manifest(folder, manifest_of(folder, step, kind="final", planned_steps=planned, plan=PLAN))
    return folder


def finished_run(output_dir: Path) -> Path:
    save(output_dir, 90)
    save(output_dir, 100)
    write_final(output_dir, 100)
    return output_dir


def edit_state(**fields: object) -> Callable[[Path], object]:
    """A last checkpoint, whole by its manifest, whose trainer state says something else."""

    def edit(output_dir: Path) -> None:
        shutil.rmtree(output_dir / "checkpoint-100")
        staged = stage(output_dir, 100)
        state = json.loads((staged / "trainer_state.json").read_text()) | fields
        (staged / "trainer_state.json").write_text(json.dumps(state))
        commit_folder(staged, output_dir / "checkpoint-100", manifest_of(staged, 100))

    return edit


def final_of_step(step: int, planned: int | None) -> Callable[[Path], object]:
    def replace(output_dir: Path) -> None:
        shutil.rmtree(output_dir / "final")
        write_final(output_dir, step, planned)

    return replace


def test_a_finished_run_is_proven(tmp_path: Path) -> None:
    before = contents(finished_run(tmp_path))
    assert proof_of_completion(tmp_path) is None
    assert contents(tmp_path) == before


MISSING: dict[str, tuple[Callable[[Path], object], str]] = {
    "no final": (lambda run: shutil.rmtree(run / "final"), "final is not there or not whole"),
    "final without manifest": (lambda run: (run / "final" / MANIFEST_NAME).unlink(), "final is not there or not whole"),
    "final cut off": (lambda run: os.truncate(run / "final/adapter_model.safetensors", 3), "not whole"),
    "final with another content": (lambda run: (run / "final/tokenizer.json").write_bytes(b"[]"), "not whole"),
    "final lacks a file": (lambda run: (run / "final/tokenizer.json").unlink(), "not whole"),
    "final with a broken manifest": (
        lambda run: (run / "final" / MANIFEST_NAME).write_text('{"v": 1, "files": []}'),
        "not whole",
    ),
    "final of an earlier step": (final_of_step(90, 100), "final/ is of step 90 of 100"),
    "final without a plan": (final_of_step(100, None), "final/ is of step 100 of None"),
    "no checkpoint of the last step": (lambda run: shutil.rmtree(run / "checkpoint-100"), "not of step 100"),
    "a newer stray folder": (lambda run: (run / "checkpoint-200").mkdir(), "not of step 100"),
    "no checkpoint at all": (
        lambda run: [shutil.rmtree(run / f"checkpoint-{step}") for step in (90, 100)],
        "not of step 100",
    ),
    "last checkpoint not whole": (
        lambda run: (run / "checkpoint-100/scheduler.pt").unlink(),
        "scheduler.pt is missing",
    ),
}


@pytest.mark.parametrize("name", MISSING)
def test_what_is_missing_is_named(tmp_path: Path, name: str) -> None:
    spoil, said = MISSING[name]
    spoil(finished_run(tmp_path))
    missing = proof_of_completion(tmp_path)
    assert missing is not None
    assert said in missing


def test_an_empty_folder_proves_nothing(tmp_path: Path) -> None:
    assert proof_of_completion(tmp_path) is not None
    assert read_final(tmp_path) is None


def test_the_same_job_again_has_nothing_left_to_do(tmp_path: Path) -> None:
    finished_run(tmp_path)
    manifest = finished_already(tmp_path, IDENTITY, {"max_steps": 100, "logging_steps": 5})
    assert manifest is not None
    assert manifest.step == 100


@pytest.mark.parametrize(
    "training", [{"max_steps": 200}, {"num_train_epochs": 3}, {}], ids=["longer", "epochs", "default"]
)
def test_another_length_is_work_to_do(tmp_path: Path, training: dict[str, object]) -> None:
    finished_run(tmp_path)
    assert finished_already(tmp_path, IDENTITY, training) is None


@pytest.mark.parametrize("training", [{"max_steps": 60}, {"max_steps": 100, "num_train_epochs": 3}])
def test_a_length_that_is_reached_already_is_no_work(tmp_path: Path, training: dict[str, object]) -> None:
    """max_steps wins over epochs, in Transformers too."""
    finished_run(tmp_path)
    assert finished_already(tmp_path, IDENTITY, training) is not None


def test_another_job_is_not_finished_by_this_result(tmp_path: Path) -> None:
    finished_run(tmp_path)
    assert finished_already(tmp_path, {**IDENTITY, "lora.r": 64}, {"max_steps": 100}) is None


def test_a_result_that_is_not_whole_finishes_nothing(tmp_path: Path) -> None:
    finished_run(tmp_path)
    os.truncate(tmp_path / "final/adapter_model.safetensors", 0)
    assert finished_already(tmp_path, IDENTITY, {"max_steps": 100}) is None
