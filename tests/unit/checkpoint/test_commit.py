"""Under its final name a checkpoint is whole or not there, whenever the process is killed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from launcher.checkpoint.commit import (
    STAGING_NAME,
    clear_staging,
    commit_folder,
    highest_staged,
    prune,
    staging_root,
)
from launcher.checkpoint.manifest import MANIFEST_NAME, read_manifest
from launcher.checkpoint.verify import list_checkpoints, verify_checkpoint
from tests.unit.checkpoint.checkpoint_folders import contents, manifest_of, save, stage, state_files


class Killed(BaseException):
    """Stands for SIGKILL: nothing may catch it."""


def kill_at(monkeypatch: pytest.MonkeyPatch, number: int) -> Callable[[], int]:
    """End the process right before its `number`-th change to the disk; the answer tells how many there were."""
    calls = 0

    def counted(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == number:
                raise Killed
            return original(*args, **kwargs)

        return call

    monkeypatch.setattr(os, "fsync", counted(os.fsync))
    monkeypatch.setattr(Path, "rename", counted(Path.rename))
    return lambda: calls


def whole_steps(output_dir: Path) -> list[int]:
    return [step for step, path in list_checkpoints(output_dir) if verify_checkpoint(path, step).whole]


def test_a_commit_moves_the_folder_and_makes_it_whole(tmp_path: Path) -> None:
    staged = stage(tmp_path, 20)
    before = contents(staged)
    committed = commit_folder(staged, tmp_path / "checkpoint-20", manifest_of(staged, 20))
    assert not staged.exists()
    after = contents(committed.path)
    assert after.pop(MANIFEST_NAME)
    assert after == before
    assert committed.total_bytes == sum(map(len, before.values()))
    assert whole_steps(tmp_path) == [20]


def test_every_file_and_folder_is_synced_before_the_name_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    staged = stage(tmp_path, 20)
    synced: list[str] = []
    fsync = os.fsync

    def note(fd: int) -> None:
        if not (tmp_path / "checkpoint-20").exists():
            synced.append(os.readlink(f"/proc/self/fd/{fd}"))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", note)
    commit_folder(staged, tmp_path / "checkpoint-20", manifest_of(staged, 20))
    assert {str(staged / name) for name in state_files(20, 2)} < set(synced)
    assert synced[-2:] == [str(staged / (MANIFEST_NAME + ".tmp")), str(staged)], "the manifest last, then its folder"


def test_folders_inside_are_synced_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On ext4 and XFS a file is found again after a power loss only when its folder was synced."""
    staged = stage(tmp_path, 20)
    synced: set[str] = set()
    fsync = os.fsync

    def note(fd: int) -> None:
        synced.add(os.readlink(f"/proc/self/fd/{fd}"))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", note)
    commit_folder(staged, tmp_path / "checkpoint-20", manifest_of(staged, 20))
    assert str(staged / "global_step20") in synced


@pytest.mark.parametrize("in_the_way", ["", "half", "whole"], ids=["free name", "name is taken", "by a whole one"])
def test_a_kill_at_any_moment_leaves_it_whole_or_not_there(tmp_path: Path, in_the_way: str) -> None:
    number = 1
    while True:
        folder = tmp_path / str(number)
        save(folder, 10)
        if in_the_way:
            (folder / "checkpoint-20").mkdir() if in_the_way == "half" else save(folder, 20)
            (folder / "checkpoint-20" / "precious").write_text("x")
        staged = stage(folder, 20)
        manifest = manifest_of(staged, 20)
        with pytest.MonkeyPatch.context() as patch:
            num_calls = kill_at(patch, number)
            with suppress(Killed):
                commit_folder(staged, folder / "checkpoint-20", manifest)
        final = folder / "checkpoint-20"
        if (final / MANIFEST_NAME).exists() or (final.exists() and not in_the_way):
            assert verify_checkpoint(final, 20).whole
        assert 10 in whole_steps(folder)
        if in_the_way:
            assert len(list(folder.rglob("precious"))) == 1, "what had the name is kept"
        clear_staging(folder, below=2)
        if in_the_way:
            (kept,) = folder.rglob("precious")
            assert kept.parent in (final, folder / "checkpoint-20.rejected"), "and found again by the next generation"
        if in_the_way == "whole":
            assert whole_steps(folder) == [20, 10]
        if num_calls() < number:
            break
        number += 1
    assert number > len(state_files(20, 2)), "every moment was tried"
    assert whole_steps(folder) == [20, 10]


def test_a_kill_at_any_moment_of_a_replacement_leaves_one_of_the_two(tmp_path: Path) -> None:
    """After the next generation has begun; only final/ is replaced."""
    number, seen = 1, set()
    while True:
        folder = tmp_path / str(number)
        final = folder / "final"
        commit_final(folder, b"old")
        staged = stage_final(folder, b"new")
        manifest = manifest_of(staged, 20)
        with pytest.MonkeyPatch.context() as patch:
            num_calls = kill_at(patch, number)
            with suppress(Killed):
                commit_folder(staged, final, manifest, replace=True)
        clear_staging(folder, below=2)
        assert sorted(path.name for path in final.iterdir()) == [MANIFEST_NAME, "weights"]
        assert sorted(path.name for path in folder.iterdir()) == ["final", "ftlaunch"], "nothing is kept beside it"
        seen.add((final / "weights").read_bytes())
        if num_calls() < number:
            break
        number += 1
    assert seen == {b"old", b"new"}
    assert (final / "weights").read_bytes() == b"new"


def stage_final(output_dir: Path, weights: bytes) -> Path:
    staged = staging_root(output_dir, 1) / "final"
    staged.mkdir(parents=True)
    (staged / "weights").write_bytes(weights)
    return staged


def commit_final(output_dir: Path, weights: bytes) -> None:
    staged = stage_final(output_dir, weights)
    commit_folder(staged, output_dir / "final", manifest_of(staged, 20), replace=True)


@pytest.mark.parametrize("replace", [False, True])
def test_a_late_rank_0_of_a_lost_generation_takes_nothing_from_the_next_one(tmp_path: Path, replace: bool) -> None:
    """It was allowed to commit, stalled, and wakes up when another generation has committed the same step."""
    late = stage(tmp_path, 20, generation=3)

    def stall() -> None:
        clear_staging(tmp_path, below=4)
        newer = stage(tmp_path, 20, generation=4)
        commit_folder(newer, tmp_path / "checkpoint-20", manifest_of(newer, 20, run_id="newer"))

    manifest = manifest_of(late, 20, run_id="late")
    with pytest.raises(FileNotFoundError):
        commit_folder(late, tmp_path / "checkpoint-20", manifest, replace=replace, may_commit=stall)
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-20"]
    assert read_manifest(tmp_path / "checkpoint-20").run_id == "newer"
    assert whole_steps(tmp_path) == [20]


def test_staging_cleared_between_two_renames_gives_the_name_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 20, run_id="first")
    staged = stage(tmp_path, 20, generation=3)
    rename = Path.rename

    def cleared_before(path: Path, target: Path) -> Path:
        if path == staged:
            monkeypatch.undo()
            clear_staging(tmp_path, below=4)
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", cleared_before)
    with pytest.raises(FileNotFoundError):
        commit_folder(staged, tmp_path / "checkpoint-20", manifest_of(staged, 20, run_id="late"))
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-20"]
    assert read_manifest(tmp_path / "checkpoint-20").run_id == "first"
    assert whole_steps(tmp_path) == [20]


def test_a_commit_that_the_storage_refuses_gives_the_name_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 20, run_id="first")
    staged = stage(tmp_path, 20, generation=1)
    rename = Path.rename

    def broken(path: Path, target: Path) -> Path:
        if path == staged:
            raise OSError(5, "Input/output error")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", broken)
    with pytest.raises(OSError, match="Input/output"):
        commit_folder(staged, tmp_path / "checkpoint-20", manifest_of(staged, 20))
    assert read_manifest(tmp_path / "checkpoint-20").run_id == "first"
    assert whole_steps(tmp_path) == [20]


def test_the_highest_number_that_has_staged(tmp_path: Path) -> None:
    assert highest_staged(tmp_path) == 0
    for generation in (9, 11, 10):
        stage(tmp_path, 20, generation=generation)
    assert highest_staged(tmp_path) == 11
    (tmp_path / STAGING_NAME / "cleared-0123abcd-gen-12").mkdir()  # somebody was killed while clearing
    (tmp_path / STAGING_NAME / "generation-99").mkdir()
    assert highest_staged(tmp_path) == 12


def test_a_folder_that_has_the_name_is_kept_beside(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-20").mkdir()
    (tmp_path / "checkpoint-20" / "precious").write_text("x")
    save(tmp_path, 20)
    assert (tmp_path / "checkpoint-20.rejected" / "precious").read_text() == "x"
    assert whole_steps(tmp_path) == [20]


def test_a_file_system_without_fsync_of_folders_is_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fsync = os.fsync

    def files_only(fd: int) -> None:
        if os.path.isdir(f"/proc/self/fd/{fd}"):
            raise OSError(22, "Invalid argument")
        fsync(fd)

    monkeypatch.setattr(os, "fsync", files_only)
    save(tmp_path, 20)
    assert whole_steps(tmp_path) == [20]


def test_a_file_that_cannot_be_made_durable_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        save(tmp_path, 20)
    assert list_checkpoints(tmp_path) == []


def test_staging_lies_on_the_same_file_system_and_is_no_checkpoint(tmp_path: Path) -> None:
    stage(tmp_path, 20)
    assert staging_root(tmp_path, 1).is_relative_to(tmp_path)
    assert list_checkpoints(tmp_path) == []


def test_clearing_the_staging_removes_earlier_generations_only(tmp_path: Path) -> None:
    save(tmp_path, 10)
    mine, later = stage(tmp_path, 20, generation=10), stage(tmp_path, 30, generation=11)
    stage(tmp_path, 20, generation=9)
    stage(tmp_path, 20, generation=2)
    before = contents(mine) | contents(later)
    clear_staging(tmp_path, below=10)
    clear_staging(tmp_path, below=10)
    assert sorted(path.name for path in (tmp_path / STAGING_NAME).iterdir()) == ["gen-10", "gen-11"]
    assert contents(mine) | contents(later) == before
    assert whole_steps(tmp_path) == [10]


def test_clearing_removes_what_a_version_without_generations_has_left(tmp_path: Path) -> None:
    legacy = tmp_path / STAGING_NAME
    (legacy / "checkpoint-20").mkdir(parents=True)
    (legacy / "checkpoint-20" / "weights").write_text("x")
    (legacy / "stray").write_text("x")
    clear_staging(tmp_path, below=1)
    assert list(legacy.iterdir()) == []
    clear_staging(tmp_path / "nothing there", below=1)


def test_a_cut_off_generation_cannot_commit_what_was_cleared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its folder loses its name before the first file goes: half a folder never gets a final name."""
    staged = stage(tmp_path, 20, generation=1)
    manifest = manifest_of(staged, 20)
    rmtree = shutil.rmtree

    def commit_meanwhile(path: Path, **options: bool) -> None:
        with pytest.raises(FileNotFoundError):
            staged.rename(tmp_path / "checkpoint-20")
        rmtree(path, **options)

    monkeypatch.setattr(shutil, "rmtree", commit_meanwhile)
    clear_staging(tmp_path, below=2)
    with pytest.raises(FileNotFoundError):
        commit_folder(staged, tmp_path / "checkpoint-20", manifest)
    assert list_checkpoints(tmp_path) == []


@pytest.mark.parametrize("replace", [False, True])
def test_a_generation_that_is_over_changes_no_name(tmp_path: Path, replace: bool) -> None:
    """The question comes last, when everything is durable; a refusal leaves all names as they are."""
    save(tmp_path, 20)
    staged = stage(tmp_path, 20, generation=1)
    before = contents(tmp_path / "checkpoint-20")

    def refused() -> None:
        assert (staged / MANIFEST_NAME).is_file()
        raise RuntimeError("this generation is over")

    with pytest.raises(RuntimeError, match="over"):
        commit_folder(staged, tmp_path / "checkpoint-20", manifest_of(staged, 20), replace=replace, may_commit=refused)
    assert contents(tmp_path / "checkpoint-20") == before
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-20"]
    assert staged.is_dir()


# -- pruning -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("keep", "kept"), [(1, [50]), (2, [50, 40]), (3, [50, 40, 30]), (9, [50, 40, 30, 20, 10])])
def test_the_newest_whole_ones_are_kept(tmp_path: Path, keep: int, kept: list[int]) -> None:
    for step in (10, 20, 30, 40, 50):
        save(tmp_path, step)
    deleted = prune(tmp_path, keep, generation=1)
    assert whole_steps(tmp_path) == kept
    assert sorted(path.name for path in deleted) == [f"checkpoint-{s}" for s in (10, 20, 30, 40, 50) if s not in kept]
    assert not any(path.exists() for path in deleted)


def test_age_is_the_step_never_the_mtime(tmp_path: Path) -> None:
    for step in (100, 90, 1000):
        save(tmp_path, step)
    for age, step in enumerate((1000, 100, 90)):
        os.utime(tmp_path / f"checkpoint-{step}", (age, age))
    prune(tmp_path, 2, generation=1)
    assert whole_steps(tmp_path) == [1000, 100]


def test_keep_counts_only_whole_ones_and_the_others_stay(tmp_path: Path) -> None:
    for step in (10, 20, 30, 40):
        save(tmp_path, step)
    (tmp_path / "checkpoint-40" / MANIFEST_NAME).unlink()
    os.truncate(tmp_path / "checkpoint-30" / "scheduler.pt", 1)
    (tmp_path / "checkpoint-99").mkdir()
    assert [path.name for path in prune(tmp_path, 1, generation=1)] == ["checkpoint-10"]
    assert [step for step, _ in list_checkpoints(tmp_path)] == [99, 40, 30, 20]
    assert whole_steps(tmp_path) == [20], "the only good one was not deleted"


def test_a_lost_generation_prunes_nothing(tmp_path: Path) -> None:
    """The next one has found the newer checkpoint damaged, say, and goes on from the older."""
    for step in (10, 20):
        save(tmp_path, step)
    clear_staging(tmp_path, below=2)
    assert prune(tmp_path, 1, generation=1) == []
    assert whole_steps(tmp_path) == [20, 10]
    clear_staging(tmp_path, below=2)


def test_a_kill_while_pruning_leaves_nothing_that_looks_like_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (10, 20):
        save(tmp_path, step)

    def half(path: Path, **_: object) -> None:
        next(child for child in sorted(path.iterdir()) if child.is_file()).unlink()
        raise Killed

    monkeypatch.setattr(shutil, "rmtree", half)
    with pytest.raises(Killed):
        prune(tmp_path, 1, generation=1)
    assert [step for step, _ in list_checkpoints(tmp_path)] == [20]
    monkeypatch.undo()
    clear_staging(tmp_path, below=2)
    assert not list(tmp_path.rglob("pruned-*"))


@pytest.mark.parametrize("make", [lambda path: path.symlink_to("gone"), lambda path: path.write_text("a file")])
def test_what_has_the_name_and_is_no_folder_is_set_aside(tmp_path: Path, make: Callable[[Path], Any]) -> None:
    """A link to nothing has been mistaken for no name at all: no checkpoint of that step could be saved."""
    make(tmp_path / "checkpoint-20")
    save(tmp_path, 20)
    assert whole_steps(tmp_path) == [20]
    assert os.path.lexists(tmp_path / "checkpoint-20.rejected")
    assert not os.path.lexists(tmp_path / "checkpoint-20" / ".displaced")
