"""A checkpoint that is not whole is refused with its reason, and never costs the one before it."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from launcher.checkpoint import verify
from launcher.checkpoint.choose import choose_checkpoint, set_aside, set_judged_aside
from launcher.checkpoint.commit import commit_folder
from launcher.checkpoint.manifest import MANIFEST_NAME, FileRecord
from launcher.checkpoint.verify import Verification, list_checkpoints, verify_checkpoint
from launcher.errors import Cancelled, UserError
from tests.unit.checkpoint.checkpoint_folders import IDENTITY, contents, manifest_of, save, stage, state_files

Damage = Callable[[Path], object]
SHARD = "global_step20/bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"


def truncate(name: str) -> Damage:
    return lambda folder: os.truncate(folder / name, (folder / name).stat().st_size // 2)


def empty(name: str) -> Damage:
    return lambda folder: os.truncate(folder / name, 0)


def remove(name: str) -> Damage:
    return lambda folder: (folder / name).unlink()


def flip_a_bit(name: str) -> Damage:
    def flip(folder: Path) -> None:
        content = bytearray((folder / name).read_bytes())
        content[len(content) // 2] ^= 1
        (folder / name).write_bytes(content)

    return flip


def rewrite_manifest(**fields: object) -> Damage:
    def rewrite(folder: Path) -> None:
        path = folder / MANIFEST_NAME
        path.write_text(json.dumps(json.loads(path.read_text()) | fields))

    return rewrite


def manifest_of_step_10(folder: Path) -> None:
    shutil.copy(folder.parent / "checkpoint-10" / MANIFEST_NAME, folder / MANIFEST_NAME)


DAMAGES: dict[str, tuple[Damage, str]] = {
    "truncated weights": (
        truncate("adapter_model.safetensors"),
        "adapter_model.safetensors has 450 bytes, 900 were written",
    ),
    "truncated shard": (truncate(SHARD), f"{SHARD} has"),
    "empty weights": (empty("adapter_model.safetensors"), "adapter_model.safetensors has 0 bytes"),
    "empty shard": (empty(SHARD), f"{SHARD} has 0 bytes"),
    "no manifest": (remove(MANIFEST_NAME), "no MANIFEST.json: the save was not finished"),
    "empty manifest": (empty(MANIFEST_NAME), "MANIFEST.json cannot be read"),
    "truncated manifest": (truncate(MANIFEST_NAME), "MANIFEST.json cannot be read"),
    "manifest of another version": (rewrite_manifest(v=2), "MANIFEST.json cannot be read"),
    "manifest of a later program": (rewrite_manifest(new_field=1), "MANIFEST.json cannot be read"),
    "manifest with a wrong list of files": (rewrite_manifest(files=[]), "MANIFEST.json cannot be read"),
    "manifest of another step": (manifest_of_step_10, "MANIFEST.json is of step 10, the folder's name says 20"),
    "missing shard": (remove(SHARD), f"{SHARD} is missing"),
    "missing weights": (remove("adapter_model.safetensors"), "adapter_model.safetensors is missing"),
    "missing scheduler": (remove("scheduler.pt"), "scheduler.pt is missing"),
    "missing rng": (remove("rng_state_1.pth"), "rng_state_1.pth is missing"),
    "missing trainer state": (remove("trainer_state.json"), "trainer_state.json is missing"),
    "folder where a file was": (
        lambda folder: ((folder / "scheduler.pt").unlink(), (folder / "scheduler.pt").mkdir()),
        "scheduler.pt is not a file",
    ),
    "all files gone": (lambda folder: (shutil.rmtree(folder), folder.mkdir()), "no MANIFEST.json"),
    **{
        f"bit flip in {name}": (flip_a_bit(name), f"{name} does not have the content that was written")
        for name in state_files(20, 2)
    },
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_checkpoint_is_refused_and_the_one_before_is_taken(tmp_path: Path, name: str) -> None:
    damage, reason = DAMAGES[name]
    save(tmp_path, 10)
    newest = save(tmp_path, 20)
    damage(newest)
    before = contents(tmp_path)
    choice = choose_checkpoint(tmp_path, IDENTITY)
    assert choice.taken is not None
    assert (choice.taken.step, choice.taken.path.name) == (10, "checkpoint-10")
    assert choice.manifest is not None
    assert choice.manifest.samples_seen == 80
    (refused,) = choice.refused
    assert refused.path == newest
    assert refused.reason.startswith(reason)
    assert contents(tmp_path) == before, "looking changes nothing"


NEVER_SAVED = {
    "scheduler.pt": "scheduler.pt (the learning-rate schedule) is missing",
    "rng_state_0.pth": "rng_state_0.pth (random state of rank 0) is missing",
    "rng_state_1.pth": "rng_state_1.pth (random state of rank 1) is missing",
    "trainer_state.json": "trainer_state.json is missing or not readable",
    SHARD: "1 of 2 optimizer shards are there",
}


@pytest.mark.parametrize("name", NEVER_SAVED)
def test_state_that_was_never_saved_is_refused_though_the_manifest_agrees(tmp_path: Path, name: str) -> None:
    """Transformers would train on with a fresh optimizer, scheduler or random state."""
    save(tmp_path, 10)
    save(tmp_path, 20, without=[name])
    choice = choose_checkpoint(tmp_path, IDENTITY)
    assert choice.taken is not None
    assert choice.taken.step == 10
    assert choice.refused[0].reason.startswith(NEVER_SAVED[name])


def test_a_trainer_state_of_another_step_is_refused(tmp_path: Path) -> None:
    staged = stage(tmp_path, 20)
    (staged / "trainer_state.json").write_text('{"global_step": 19, "max_steps": 100}')
    folder = commit_folder(staged, tmp_path / staged.name, manifest_of(staged, 20)).path
    assert verify_checkpoint(folder, 20).reason == "trainer_state.json is of step 19, not 20"


def test_a_stray_newer_folder_hides_nothing(tmp_path: Path) -> None:
    save(tmp_path, 10)
    (tmp_path / "checkpoint-99").mkdir()
    choice = choose_checkpoint(tmp_path, IDENTITY)
    assert choice.taken is not None
    assert choice.taken.step == 10
    assert [(v.step, v.reason) for v in choice.refused] == [(99, "no MANIFEST.json: the save was not finished")]


def test_only_folders_with_the_right_name_are_checkpoints(tmp_path: Path) -> None:
    save(tmp_path, 10)
    (tmp_path / "checkpoint-98").write_text("a file")
    for name in ("checkpoint-99.rejected", "checkpoint-x", "checkpoint-", "my-checkpoint-99", "checkpoint-99-old"):
        (tmp_path / name).mkdir()
    assert [step for step, _ in list_checkpoints(tmp_path)] == [10]


def test_a_whole_stray_folder_of_another_run_is_an_error_not_a_resume(tmp_path: Path) -> None:
    save(tmp_path, 10)
    save(tmp_path, 99, identity={**IDENTITY, "model.path": "/models/other"})
    with pytest.raises(UserError, match=r"model\.path: '/models/other' there, '/models/base' now"):
        choose_checkpoint(tmp_path, IDENTITY)


def test_several_damaged_ones_are_all_told_newest_first(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        save(tmp_path, step)
    truncate("scheduler.pt")(tmp_path / "checkpoint-20")
    remove(MANIFEST_NAME)(tmp_path / "checkpoint-30")
    choice = choose_checkpoint(tmp_path, IDENTITY)
    assert choice.taken is not None
    assert choice.taken.step == 10
    assert [v.step for v in choice.refused] == [30, 20]


def test_steps_come_from_names_never_from_mtimes_or_the_alphabet(tmp_path: Path) -> None:
    for age, step in enumerate((1000, 200, 90)):
        os.utime(save(tmp_path, step), (age, age))
    assert [step for step, _ in list_checkpoints(tmp_path)] == [1000, 200, 90]
    choice = choose_checkpoint(tmp_path, IDENTITY)
    assert choice.taken is not None
    assert choice.taken.step == 1000


@pytest.mark.parametrize("make", [lambda folder: None, lambda folder: folder.rmdir()], ids=["empty", "not there"])
def test_nothing_there_means_from_the_beginning(tmp_path: Path, make: Damage) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    make(folder)
    choice = choose_checkpoint(folder, IDENTITY)
    assert (choice.taken, choice.manifest, choice.refused) == (None, None, ())


def test_another_job_in_the_same_folder_names_every_key_that_differs(tmp_path: Path) -> None:
    save(tmp_path, 10)
    now = {**IDENTITY, "lora.r": 32, "method": "full"}
    with pytest.raises(UserError) as caught:
        choose_checkpoint(tmp_path, now)
    message = str(caught.value)
    assert "lora.r: 16 there, 32 now" in message
    assert "method: 'lora' there, 'full' now" in message
    assert "model.path" not in message
    assert "output_dir" in message, "the way out"
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("world_size", [1, 2, 7])
def test_any_number_of_ranks_may_have_written_it(tmp_path: Path, world_size: int) -> None:
    save(tmp_path, 10, world_size=world_size)
    manifest = choose_checkpoint(tmp_path, IDENTITY).manifest
    assert manifest is not None
    assert manifest.world_size == world_size


def test_a_single_rank_has_its_own_name_for_the_random_state(tmp_path: Path) -> None:
    assert verify_checkpoint(save(tmp_path, 10, world_size=1), 10).whole


def test_without_zero_the_optimizer_is_in_the_model_states(tmp_path: Path) -> None:
    identity = {**IDENTITY, "deepspeed.stage": 0}
    shards = [name for name in state_files(10, 2) if name.endswith("_optim_states.pt")]
    assert verify_checkpoint(save(tmp_path, 10, without=shards, identity=identity), 10).whole
    name = "global_step20/mp_rank_00_model_states.pt"
    broken = save(tmp_path, 20, without=[name], identity=identity)
    assert verify_checkpoint(broken, 20).reason.startswith(name)


def test_files_that_others_add_do_not_spoil_a_checkpoint(tmp_path: Path) -> None:
    folder = save(tmp_path, 10)
    (folder / "README.txt").write_text("best so far")
    assert verify_checkpoint(folder, 10).whole


def test_set_aside_counts_up_and_overwrites_nothing(tmp_path: Path) -> None:
    names = []
    for content in ("first", "second", "third"):
        folder = tmp_path / "checkpoint-20"
        folder.mkdir()
        (folder / "weights").write_text(content)
        names.append(set_aside(folder).name)
        assert not folder.exists()
    assert names == ["checkpoint-20.rejected", "checkpoint-20.rejected-2", "checkpoint-20.rejected-3"]
    assert [(tmp_path / name / "weights").read_text() for name in names] == ["first", "second", "third"]
    assert list_checkpoints(tmp_path) == []


# -- several nodes share the folder ------------------------------------------------------------------------------------


def while_hashing(monkeypatch: pytest.MonkeyPatch, file_name: str, act: Callable[[Path], None]) -> None:
    """`act(folder)` once, right before the file of that name is read."""
    hash_file = verify.hash_file

    def acted_on(path: Path, cancelled: Callable[[], bool] = lambda: False) -> FileRecord:
        if path.name == file_name:
            monkeypatch.undo()
            act(path.parent)
        return hash_file(path, cancelled)

    monkeypatch.setattr(verify, "hash_file", acted_on)


@pytest.mark.parametrize("file_name", ["adapter_config.json", "trainer_state.json"])
def test_a_checkpoint_that_is_pruned_while_it_is_read_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file_name: str
) -> None:
    for step in (10, 20):
        save(tmp_path, step)
    while_hashing(monkeypatch, file_name, shutil.rmtree)
    choice = choose_checkpoint(tmp_path, IDENTITY)
    assert choice.taken is not None
    assert (choice.taken.step, choice.refused) == (10, ())


def test_a_broken_one_that_is_set_aside_and_saved_anew_while_it_is_read_is_looked_at_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 10)
    (save(tmp_path, 20) / "scheduler.pt").write_bytes(b"bit rot")

    def by_another_node(folder: Path) -> None:
        set_aside(folder)
        save(tmp_path, 20, run_id="newer")

    while_hashing(monkeypatch, "adapter_config.json", by_another_node)
    choice = choose_checkpoint(tmp_path, IDENTITY)
    assert choice.manifest is not None
    assert (choice.manifest.run_id, choice.refused) == ("newer", ())


def test_a_folder_that_changes_for_ever_is_an_error_at_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 10)
    monkeypatch.setattr(verify.Verification, "is_still_there", lambda _: False)
    with pytest.raises(OSError, match="change each time they are read"):
        choose_checkpoint(tmp_path, IDENTITY)


def test_it_ends_within_a_block_once_nobody_wants_the_answer(tmp_path: Path) -> None:
    staged = stage(tmp_path, 20)
    with (staged / "big").open("wb") as stream:
        stream.truncate(40 << 20)
    commit_folder(staged, tmp_path / staged.name, manifest_of(staged, 20))
    asked = 0

    def never() -> bool:
        nonlocal asked
        asked += 1
        return False

    choose_checkpoint(tmp_path, IDENTITY, cancelled=never)
    assert asked > 10 + len(state_files(20, 2)), "at each block of 4 MiB"
    for number in (1, asked // 2, asked):
        left = iter([False] * (number - 1))
        with pytest.raises(Cancelled):
            choose_checkpoint(tmp_path, IDENTITY, cancelled=lambda left=left: next(left, True))


def refused_one(output_dir: Path) -> Verification:
    (save(output_dir, 20) / "scheduler.pt").write_bytes(b"bit rot")
    (refused,) = choose_checkpoint(output_dir, IDENTITY).refused
    return refused


def test_what_was_judged_is_set_aside_once(tmp_path: Path) -> None:
    refused = refused_one(tmp_path)
    assert set_judged_aside(refused) == tmp_path / "checkpoint-20.rejected"
    assert set_judged_aside(refused) is None, "gone"
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == ["checkpoint-20.rejected"]


def test_what_was_not_judged_is_not_touched(tmp_path: Path) -> None:
    refused = refused_one(tmp_path)
    set_aside(refused.path)
    save(tmp_path, 20, run_id="newer")
    assert set_judged_aside(refused) is None
    assert verify_checkpoint(tmp_path / "checkpoint-20", 20).whole


def test_what_was_not_judged_gets_its_name_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other node was faster in the moment between the question and the rename."""
    refused = refused_one(tmp_path)
    is_still_there = Verification.is_still_there

    def a_moment_ago(judged: Verification) -> bool:
        monkeypatch.undo()
        there = is_still_there(judged)
        set_aside(judged.path)
        save(tmp_path, 20, run_id="newer")
        return there

    monkeypatch.setattr(Verification, "is_still_there", a_moment_ago)
    assert set_judged_aside(refused) is None
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == ["checkpoint-20", "checkpoint-20.rejected"]
    assert verify_checkpoint(tmp_path / "checkpoint-20", 20).whole


def test_a_name_that_another_node_takes_first_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save(tmp_path, 20)
    rename = Path.rename

    def late(path: Path, target: Path) -> Path:
        monkeypatch.undo()
        target.mkdir()
        (target / "weights").write_text("of the other node")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", late)
    assert set_aside(folder).name == "checkpoint-20.rejected-2"
    assert (tmp_path / "checkpoint-20.rejected" / "weights").read_text() == "of the other node"


# -- blocks that cannot be read ----------------------------------------------------------------------------------------


def fail_reading(monkeypatch: pytest.MonkeyPatch, of: Callable[[Path], bool], times: int) -> None:
    """The first `times` reads of these files end with EIO."""
    hash_file = verify.hash_file
    left = times

    def failing(path: Path, cancelled: Callable[[], bool] = lambda: False) -> FileRecord:
        nonlocal left
        if of(path) and left:
            left -= 1
            raise OSError(errno.EIO, "Input/output error", str(path))
        return hash_file(path, cancelled)

    monkeypatch.setattr(verify, "hash_file", failing)


def test_what_can_be_read_at_a_second_look_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (10, 20):
        save(tmp_path, step)
    fail_reading(monkeypatch, lambda path: path.name == "latest" and "20" in path.parent.name, times=1)
    choice = choose_checkpoint(tmp_path, IDENTITY)
    assert choice.taken is not None
    assert (choice.taken.step, choice.refused) == (20, ())


def test_what_cannot_be_read_is_refused_only_where_all_of_another_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (10, 20):
        save(tmp_path, step)
    with monkeypatch.context() as lost:
        fail_reading(lost, lambda path: "checkpoint-20" in path.parts, times=10**6)
        choice = choose_checkpoint(tmp_path, IDENTITY)
        assert choice.taken is not None
        assert choice.taken.step == 10
        (refused,) = choice.refused
        assert refused.reason.endswith("cannot be read (Input/output error), while all of checkpoint-10 can")
    fail_reading(monkeypatch, lambda path: True, times=10**6)
    with pytest.raises(OSError, match="Input/output error"):
        choose_checkpoint(tmp_path, IDENTITY)


def test_a_permission_is_not_a_lost_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (10, 20):
        save(tmp_path, step)

    def forbidden(path: Path, cancelled: Callable[[], bool] = lambda: False) -> FileRecord:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(verify, "hash_file", forbidden)
    with pytest.raises(PermissionError):
        choose_checkpoint(tmp_path, IDENTITY)
