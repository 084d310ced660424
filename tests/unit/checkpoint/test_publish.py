"""On its way to its name a checkpoint is whole or it is none, on both kinds of storage, whenever its writer dies."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from launcher.checkpoint import object_file
from launcher.checkpoint.commit import STAGING_NAME, clear_staging, highest_staged
from launcher.checkpoint.in_place import REJECTED_NAME, UNFINISHED_NAME
from launcher.checkpoint.manifest import MANIFEST_NAME, FileRecord, Manifest, hash_file
from launcher.checkpoint.publish import (
    DamagedSource,
    prune_published,
    publication,
    raise_fence,
    set_judged_apart,
)
from launcher.checkpoint.verify import list_checkpoints, verify_checkpoint
from launcher.host.storage import StorageKind
from tests.unit.checkpoint.checkpoint_folders import contents, manifest_of, save, state_files

BOTH = pytest.mark.parametrize("kind", list(StorageKind), ids=lambda kind: kind.value)
OBJECT = StorageKind.OBJECT


@pytest.fixture(autouse=True)
def visible_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_file, "VISIBLE_WITHIN_S", 0.3)


def put_all(
    kind: StorageKind, output_dir: Path, step: int, *, generation: int = 1, without: str = ""
) -> tuple[Any, Manifest]:
    target = publication(kind, output_dir, generation, f"checkpoint-{step}")
    files = {
        name: target.put(name, [content[:5], memoryview(content[5:])])
        for name, content in state_files(step, 2).items()
        if name != without
    }
    return target, manifest_of(output_dir / "nowhere", step, files=files)


def publish(kind: StorageKind, output_dir: Path, step: int, *, generation: int = 1) -> Path:
    target, manifest = put_all(kind, output_dir, step, generation=generation)
    path: Path = target.publish(manifest).path
    return path


def whole_steps(output_dir: Path) -> list[int]:
    return [step for step, path in list_checkpoints(output_dir) if verify_checkpoint(path, step).whole]


@BOTH
def test_what_was_put_is_there_under_its_name(kind: StorageKind, tmp_path: Path) -> None:
    target, manifest = put_all(kind, tmp_path, 20)
    assert whole_steps(tmp_path) == []
    committed = target.publish(manifest)
    after = contents(committed.path)
    assert after.pop(MANIFEST_NAME)
    assert after == state_files(20, 2)
    assert committed.total_bytes == sum(map(len, after.values()))
    assert whole_steps(tmp_path) == [20]


@BOTH
def test_a_source_that_is_not_what_was_announced(kind: StorageKind, tmp_path: Path) -> None:
    target = publication(kind, tmp_path, 1, "checkpoint-20")
    announced = target.put("a", [b"abc"])
    with pytest.raises(DamagedSource, match="announced were 3 bytes"):
        target.put("b", [b"ab", b"d"], announced)
    assert not list(tmp_path.rglob("b"))


@BOTH
@pytest.mark.parametrize("name", ["", "/etc/passwd", "../x", MANIFEST_NAME, UNFINISHED_NAME])
def test_a_name_that_is_none(kind: StorageKind, name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not a file of a checkpoint"):
        publication(kind, tmp_path, 1, "checkpoint-20").put(name, [b""])


@BOTH
def test_a_file_that_was_never_put(kind: StorageKind, tmp_path: Path) -> None:
    target, manifest = put_all(kind, tmp_path, 20)
    files = {**manifest.files, "more": FileRecord(3, "0" * 32)}
    with pytest.raises(OSError, match=r"1 of .* files have not come.*more"):
        target.publish(manifest_of(tmp_path / "nowhere", 20, files=files))
    assert whole_steps(tmp_path) == []


@BOTH
def test_what_a_dead_writer_has_left_in_the_folder_goes(kind: StorageKind, tmp_path: Path) -> None:
    first = publication(kind, tmp_path, 1, "checkpoint-20")
    first.put("global_step20/bf16_zero_pp_rank_9_mp_rank_00_optim_states.pt", [b"of a larger world"])
    first.put("trainer_state.json", [b"half"])
    assert verify_checkpoint(publish(kind, tmp_path, 20), 20).whole


@BOTH
def test_the_permission_is_asked_last_and_its_refusal_leaves_no_checkpoint(kind: StorageKind, tmp_path: Path) -> None:
    def refuse() -> None:
        raise Refused

    target, manifest = put_all(kind, tmp_path, 20)
    with pytest.raises(Refused):
        target.publish(manifest, may_commit=refuse)
    assert list_checkpoints(tmp_path) == []


@BOTH
def test_a_later_generation_ends_the_puts_of_an_earlier_one(kind: StorageKind, tmp_path: Path) -> None:
    target, manifest = put_all(kind, tmp_path, 20)
    clear_staging(tmp_path, below=2)
    if kind is OBJECT:
        raise_fence(tmp_path, 2)
    with pytest.raises(FileNotFoundError):
        target.put("more", [b"late"])
    with pytest.raises(FileNotFoundError):
        target.publish(manifest)
    assert list_checkpoints(tmp_path) == []


def test_an_earlier_generation_cannot_begin_anew(tmp_path: Path) -> None:
    """Its node was cut off and trains on: at its next save it finds that a later one has begun."""
    publish(OBJECT, tmp_path, 10)
    clear_staging(tmp_path, below=2)
    raise_fence(tmp_path, 2)
    with pytest.raises(FileNotFoundError, match="generation 1 is over, 2 has begun"):
        put_all(OBJECT, tmp_path, 20)
    assert highest_staged(tmp_path) == 2


def test_a_generation_that_is_over_the_moment_its_marker_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next one has begun without this checkpoint: it must not come up later."""
    target, manifest = put_all(OBJECT, tmp_path, 20)
    put = object_file.put_object

    def late(path: Path, *args: Any) -> FileRecord:
        record = put(path, *args)
        clear_staging(tmp_path, below=2)
        return record

    monkeypatch.setattr("launcher.checkpoint.publish.put_object", late)
    with pytest.raises(FileNotFoundError, match="generation 1 is over"):
        target.publish(manifest)
    assert list_checkpoints(tmp_path) == []


def test_a_whole_checkpoint_of_the_same_name_is_not_written_over(tmp_path: Path) -> None:
    publish(OBJECT, tmp_path, 20)
    with pytest.raises(FileExistsError, match="published meanwhile"):
        publish(OBJECT, tmp_path, 20, generation=2)
    assert whole_steps(tmp_path) == [20]


def test_final_of_a_shorter_plan_gives_way(tmp_path: Path) -> None:
    for generation, name in ((1, "old"), (2, "new")):
        target = publication(OBJECT, tmp_path, generation, "final")
        files = {name: target.put(name, [b"weights"])}
        target.publish(manifest_of(tmp_path / "nowhere", 20, files=files, kind="final"), replace=True)
    assert sorted(contents(tmp_path / "final")) == [MANIFEST_NAME, "new"]


# ---- a mount that does not keep what it was given ----


def test_content_that_comes_back_different(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def spoil(path: Path, *_: object, **__: object) -> FileRecord:
        if path.name == "a":
            path.write_bytes(path.read_bytes()[:2])
        return hash_file(path)

    monkeypatch.setattr(object_file, "hash_file", spoil)
    with pytest.raises(OSError, match=r"2 bytes .* came back within .* written were 3 bytes"):
        publication(OBJECT, tmp_path, 1, "checkpoint-20").put("a", [b"abc"])


def test_content_that_comes_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looked = 0

    def late(path: Path, *_: object, **__: object) -> FileRecord:
        nonlocal looked
        looked += 1
        if looked % 3:
            raise FileNotFoundError(2, "not there yet")
        return hash_file(path)

    monkeypatch.setattr(object_file, "hash_file", late)
    assert publication(OBJECT, tmp_path, 1, "checkpoint-20").put("a", [b"abc"]).size_bytes == 3


# ---- a kill at any moment ----


class Refused(Exception):  # noqa: N818
    pass


class Killed(BaseException):
    """Stands for SIGKILL: nothing may catch it."""


@pytest.fixture
def kill_at() -> Iterator[Callable[[int], Callable[[], int]]]:
    """`kill_at(n)` ends the process right before its n-th change to the storage, for good; the answer tells how many
    there were."""
    with pytest.MonkeyPatch.context() as patch:

        def arm(number: int) -> Callable[[], int]:
            patch.undo()
            calls = 0

            def counted(original: Callable[..., Any]) -> Callable[..., Any]:
                def call(*args: Any, **kwargs: Any) -> Any:
                    nonlocal calls
                    calls += 1
                    if 0 < number <= calls:
                        raise Killed
                    return original(*args, **kwargs)

                return call

            if number:
                for owner, name in ((os, "write"), (os, "open"), (os, "rmdir"), (os, "unlink"), (os, "mkdir")):
                    patch.setattr(owner, name, counted(getattr(owner, name)))
                for name in ("unlink", "mkdir", "rename", "write_bytes", "write_text"):
                    patch.setattr(Path, name, counted(getattr(Path, name)))
            return lambda: calls

        yield arm


def set_refused_apart(folder: Path) -> None:
    """As the next start does."""
    for step, path in list_checkpoints(folder):
        judged = verify_checkpoint(path, step)
        if not judged.whole:
            assert MANIFEST_NAME in judged.reason, "killed over it, or before all; anything else is not even listed"
            set_judged_apart(judged)


def test_a_kill_at_any_moment_on_an_object_mount(tmp_path: Path, kill_at: Callable[[int], Callable[[], int]]) -> None:
    number = 1
    while True:
        folder = tmp_path / str(number)
        publish(OBJECT, folder, 10)
        (folder / "checkpoint-20").mkdir()
        (folder / "checkpoint-20" / UNFINISHED_NAME).write_text("{}")  # of an attempt before
        num_calls = kill_at(number)
        with suppress(Killed):
            publish(OBJECT, folder, 20)
        made = num_calls()
        kill_at(0)
        assert 10 in whole_steps(folder)
        set_refused_apart(folder)
        listed = [step for step, _ in list_checkpoints(folder)]
        assert listed == whole_steps(folder)
        # The next generation gets there again.
        clear_staging(folder, below=2)
        raise_fence(folder, 2)
        if 20 not in listed:
            publish(OBJECT, folder, 20, generation=2)
        assert whole_steps(folder) == [20, 10]
        if made < number:
            break
        number += 1
    assert number > 3 * len(state_files(20, 2)), "every moment was tried"


def test_a_kill_at_any_moment_of_pruning(tmp_path: Path, kill_at: Callable[[int], Callable[[], int]]) -> None:
    number = 1
    while True:
        folder = tmp_path / str(number)
        for step in (10, 20, 30):
            publish(OBJECT, folder, step)
        num_calls = kill_at(number)
        with suppress(Killed):
            prune_published(OBJECT, folder, keep=1, generation=1)
        made = num_calls()
        kill_at(0)
        assert whole_steps(folder)[:2] == [30, 20]
        set_refused_apart(folder)
        assert [step for step, _ in list_checkpoints(folder)] == whole_steps(folder)
        prune_published(OBJECT, folder, keep=1, generation=1)
        assert sorted(path.name for path in folder.glob("checkpoint-*")) == ["checkpoint-20", "checkpoint-30"]
        if made < number:
            break
        number += 1
    assert number > len(state_files(10, 2)), "every moment was tried"


# ---- pruning, and what is no checkpoint ----


def test_two_stay_on_an_object_mount_and_the_dead_go(tmp_path: Path) -> None:
    put_all(OBJECT, tmp_path, 5)  # its writer died
    for step in (10, 20, 30):
        publish(OBJECT, tmp_path, step)
    put_all(OBJECT, tmp_path, 40)  # being written now
    assert [path.name for path in prune_published(OBJECT, tmp_path, keep=1, generation=1)] == ["checkpoint-10"]
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == [
        "checkpoint-20",
        "checkpoint-30",
        "checkpoint-40",
    ]


def test_a_generation_that_is_over_prunes_nothing(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        publish(OBJECT, tmp_path, step)
    clear_staging(tmp_path, below=2)
    with pytest.raises(FileNotFoundError, match="generation 1 is over"):
        prune_published(OBJECT, tmp_path, keep=1, generation=1)
    assert whole_steps(tmp_path) == [30, 20, 10]


def test_a_damaged_one_is_set_apart_without_a_rename(tmp_path: Path) -> None:
    publish(OBJECT, tmp_path, 10)
    damaged = publish(OBJECT, tmp_path, 20)
    (damaged / "scheduler.pt").write_bytes(b"?")
    judged = verify_checkpoint(damaged, 20)
    assert set_judged_apart(judged) == damaged
    assert [step for step, _ in list_checkpoints(tmp_path)] == [10]
    assert "scheduler.pt" in (damaged / REJECTED_NAME).read_text()
    assert set_judged_apart(judged) is None, "it is not what was judged any more"
    # It stays for people to look at, until the run saves this step again.
    for step in (30, 40):
        publish(OBJECT, tmp_path, step)
    prune_published(OBJECT, tmp_path, keep=2, generation=1)
    assert damaged.is_dir()
    publish(OBJECT, tmp_path, 20)
    assert not (damaged / REJECTED_NAME).exists()
    assert 20 in whole_steps(tmp_path)


def test_a_folder_of_another_tool_is_still_looked_at(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-30").mkdir()
    assert [step for step, _ in list_checkpoints(tmp_path)] == [30]


def test_staging_of_both_kinds_is_cleared(tmp_path: Path) -> None:
    """The folder was moved from a NAS to an object mount, or back."""
    save(tmp_path, 10)
    publish(OBJECT, tmp_path, 20, generation=2)
    put_all(StorageKind.POSIX, tmp_path, 30, generation=3)
    clear_staging(tmp_path, below=4)
    assert list((tmp_path / STAGING_NAME).iterdir()) == []
    assert whole_steps(tmp_path) == [20, 10]
