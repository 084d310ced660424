"""Before an attempt: choose, set aside, say so."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from launcher.agent.events import EventLog, events_path, read_json_lines
from launcher.agent.resume import Resume, newest_step, prepare_resume
from launcher.checkpoint.commit import staging_root
from launcher.checkpoint.manifest import MANIFEST_NAME
from launcher.errors import UserError
from tests.unit.checkpoint.checkpoint_folders import IDENTITY, contents, save, stage


def resume(output_dir: Path, said: list[str], generation: int = 2) -> Resume:
    return prepare_resume(output_dir, IDENTITY, generation, EventLog(output_dir, "n0"), said.append)


def rejections(output_dir: Path) -> list[dict[str, str]]:
    return [
        event for event in read_json_lines(events_path(output_dir, "n0")) if event["event"] == "checkpoint_rejected"
    ]


def test_from_the_beginning(tmp_path: Path) -> None:
    said: list[str] = []
    assert resume(tmp_path, said) == Resume(None, 0, 0)
    assert said == []


def test_the_newest_whole_one(tmp_path: Path) -> None:
    said: list[str] = []
    for step in (10, 20):
        save(tmp_path, step)
    assert resume(tmp_path, said) == Resume(str(tmp_path / "checkpoint-20"), 20, 160, 2, 8)
    assert said == []
    assert rejections(tmp_path) == []


def test_a_refused_one_is_kept_under_another_name_and_told(tmp_path: Path) -> None:
    said: list[str] = []
    save(tmp_path, 10)
    os.truncate(save(tmp_path, 20) / "scheduler.pt", 0)
    good, bad = contents(tmp_path / "checkpoint-10"), contents(tmp_path / "checkpoint-20")
    assert resume(tmp_path, said).step == 10
    assert contents(tmp_path / "checkpoint-10") == good
    assert not (tmp_path / "checkpoint-20").exists()
    assert contents(tmp_path / "checkpoint-20.rejected") == bad
    (event,) = rejections(tmp_path)
    assert (event["path"], event["kept_as"]) == (
        str(tmp_path / "checkpoint-20"),
        str(tmp_path / "checkpoint-20.rejected"),
    )
    assert event["reason"].startswith("scheduler.pt has 0 bytes")
    (line,) = said
    assert "checkpoint-20 is refused: scheduler.pt has 0 bytes" in line
    assert "checkpoint-20.rejected" in line


def test_when_none_is_whole_it_begins_anew_and_deletes_nothing(tmp_path: Path) -> None:
    said: list[str] = []
    for step in (10, 20):
        (save(tmp_path, step) / MANIFEST_NAME).unlink()
    num_files = len(contents(tmp_path))
    assert resume(tmp_path, said) == Resume(None, 0, 0)
    assert len(said) == 2
    assert sorted(path.name for path in tmp_path.glob("*.rejected")) == [
        "checkpoint-10.rejected",
        "checkpoint-20.rejected",
    ]
    kept = {name for name in contents(tmp_path) if not name.startswith("ftlaunch/events/")}
    assert len(kept) == num_files


def test_what_was_half_written_is_cleared(tmp_path: Path) -> None:
    save(tmp_path, 10)
    stage(tmp_path, 20)
    current = stage(tmp_path, 20, generation=2)
    assert resume(tmp_path, []).step == 10
    assert not staging_root(tmp_path, 1).exists()
    assert current.is_dir(), "of the generation that is about to start"


def test_the_run_keeps_its_global_batch_whatever_version_wrote_the_checkpoint(tmp_path: Path) -> None:
    save(tmp_path, 10, world_size=3, global_batch_size=48)
    assert (resume(tmp_path, []).world_size, resume(tmp_path, []).global_batch_size) == (3, 48)
    sizes = {"training.per_device_train_batch_size": 4, "training.gradient_accumulation_steps": 5}
    save(tmp_path, 20, world_size=3, global_batch_size=0, identity={**IDENTITY, **sizes})
    assert resume(tmp_path, []).global_batch_size == 60


def test_another_job_is_refused_before_anything_is_moved(tmp_path: Path) -> None:
    save(tmp_path, 10, identity={**IDENTITY, "lora.r": 64})
    (tmp_path / "checkpoint-20").mkdir()
    with pytest.raises(UserError, match=r"lora\.r: 64 there, 16 now"):
        resume(tmp_path, [])
    assert (tmp_path / "checkpoint-20").is_dir()


def test_newest_step(tmp_path: Path) -> None:
    assert newest_step(tmp_path) == 0
    save(tmp_path, 90)
    save(tmp_path, 100)
    assert newest_step(tmp_path) == 100
