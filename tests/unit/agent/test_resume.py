"""Before an attempt: choose, set aside, say so."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from launcher.agent.events import EventLog, events_path, read_json_lines
from launcher.agent.resume import LookAgain, Resume, look_for_resume, newest_step, take_resume
from launcher.checkpoint.choose import Choice
from launcher.checkpoint.commit import commit_folder, staging_root
from launcher.checkpoint.manifest import MANIFEST_NAME
from launcher.errors import Cancelled, UserError
from tests.unit.checkpoint.checkpoint_folders import IDENTITY, contents, manifest_of, save, stage


def resume(output_dir: Path, said: list[str], generation: int = 2) -> Resume:
    choice = look_for_resume(output_dir, IDENTITY, cancelled=lambda: False)
    return take_resume(output_dir, choice, generation, EventLog(output_dir, "n0"), said.append)


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
    assert len(said) == 3
    assert said[-1].startswith("none of the checkpoints is whole: training begins at step 0")
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


# -- between looking and taking ----------------------------------------------------------------------------------------


def look(output_dir: Path) -> Choice:
    return look_for_resume(output_dir, IDENTITY, cancelled=lambda: False)


def take(output_dir: Path, choice: Choice, generation: int = 2) -> Resume:
    return take_resume(output_dir, choice, generation, EventLog(output_dir, "n0"), lambda _: None)


def test_looking_changes_nothing(tmp_path: Path) -> None:
    save(tmp_path, 10)
    (save(tmp_path, 20) / MANIFEST_NAME).unlink()
    stage(tmp_path, 30)
    before = contents(tmp_path)
    assert [refused.step for refused in look(tmp_path).refused] == [20]
    assert contents(tmp_path) == before


def test_looking_ends_when_nobody_wants_the_answer(tmp_path: Path) -> None:
    save(tmp_path, 10)
    with pytest.raises(Cancelled):
        look_for_resume(tmp_path, IDENTITY, cancelled=lambda: True)


def test_a_commit_of_an_earlier_generation_between_looking_and_taking_is_not_passed_over(tmp_path: Path) -> None:
    """Its rank 0 had the permission. After the staging is cleared it cannot commit any more."""
    save(tmp_path, 10)
    choice = look(tmp_path)
    save(tmp_path, 20)
    with pytest.raises(LookAgain, match=r"checkpoint-20 is the newest checkpoint now, .*checkpoint-10 was chosen"):
        take(tmp_path, choice)
    assert take(tmp_path, look(tmp_path)).step == 20


def test_a_leader_that_was_cut_off_leaves_alone_what_the_next_one_has_saved(tmp_path: Path) -> None:
    save(tmp_path, 10)
    (save(tmp_path, 20) / "scheduler.pt").write_bytes(b"bit rot")
    late = look(tmp_path)
    assert take(tmp_path, look(tmp_path), generation=4).step == 10
    newer = stage(tmp_path, 20, generation=4)
    commit_folder(newer, tmp_path / "checkpoint-20", manifest_of(newer, 20))
    with pytest.raises(LookAgain):
        take(tmp_path, late, generation=3)
    assert look(tmp_path).refused == ()
    assert look(tmp_path).taken is not None
    assert [path.name for path in tmp_path.glob("*.rejected*")] == ["checkpoint-20.rejected"]
    assert len(rejections(tmp_path)) == 1


def test_the_chosen_one_was_pruned_meanwhile(tmp_path: Path) -> None:
    for step in (10, 20):
        save(tmp_path, step)
    choice = look(tmp_path)
    shutil.rmtree(tmp_path / "checkpoint-20")
    with pytest.raises(LookAgain):
        take(tmp_path, choice)


def test_what_another_node_has_set_aside_already_is_no_trouble(tmp_path: Path) -> None:
    save(tmp_path, 10)
    (save(tmp_path, 20) / MANIFEST_NAME).unlink()
    choice = look(tmp_path)
    assert take(tmp_path, choice) == take(tmp_path, choice)
    assert len(rejections(tmp_path)) == 1
