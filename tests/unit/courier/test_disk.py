"""From slots to a published checkpoint, by a real courier and in real folders."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from launcher.agent.courier_client import Permit
from launcher.checkpoint import object_file
from launcher.checkpoint.choose import choose_checkpoint
from launcher.checkpoint.commit import clear_staging, staging_root
from launcher.checkpoint.verify import list_checkpoints, verify_checkpoint
from launcher.courier import disk
from launcher.courier.messages import Cause, Failed, Failure, Published, Written
from launcher.host.storage import StorageKind
from tests.unit.checkpoint.checkpoint_folders import IDENTITY, save, state_files
from tests.unit.courier.conftest import Agent, Made
from tests.unit.courier.snapshots import (
    damage,
    files_of_rank,
    fill_slot,
    identity_of,
    manifest_for,
    slots_of_step,
)

MIB = 1 << 20


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != "ftlaunch") if folder.exists() else []


def test_snapshots_of_all_ranks_become_a_checkpoint_that_a_resume_takes(agent: Agent, tmp_path: Path) -> None:
    output_dir = tmp_path / "run"
    written = agent.write(slots_of_step(5), output_dir)
    assert isinstance(written, Written)
    expected = state_files(5, 2)
    assert {name: record.size_bytes for name, record in written.files.items()} == {
        name: len(content) for name, content in expected.items()
    }
    assert written.num_bytes == sum(map(len, expected.values()))
    assert names_in(output_dir) == [], "nothing has a name yet"

    published = agent.publish(manifest_for(written.files, 5), output_dir)
    assert isinstance(published, Published)
    assert (published.path, published.num_bytes) == (output_dir / "checkpoint-5", written.num_bytes)
    choice = choose_checkpoint(output_dir, IDENTITY)
    assert choice.taken is not None
    assert choice.taken.path == output_dir / "checkpoint-5"
    assert all((published.path / name).read_bytes() == content for name, content in expected.items())


def test_two_nodes_write_into_one_checkpoint(make_agent: Made, tmp_path: Path) -> None:
    output_dir = tmp_path / "run"
    one, other = make_agent(), make_agent()
    first = one.write(slots_of_step(5, ranks=[0]), output_dir)
    second = other.write(slots_of_step(5, ranks=[1]), output_dir)
    assert isinstance(first, Written)
    assert isinstance(second, Written)
    assert not first.files.keys() & second.files.keys()
    published = one.publish(manifest_for({**first.files, **second.files}, 5), output_dir)
    assert isinstance(published, Published)
    assert verify_checkpoint(published.path, 5).whole


def test_a_file_that_two_ranks_hold_alike_is_written_once(agent: Agent, tmp_path: Path) -> None:
    slots = [fill_slot(identity_of(5, rank), {"latest": b"global_step5"}) for rank in range(2)]
    written = agent.write(slots, tmp_path / "run")
    assert isinstance(written, Written)
    assert list(written.files) == ["latest"]


def test_a_file_that_two_ranks_hold_differently_fails(agent: Agent, tmp_path: Path) -> None:
    slots = [fill_slot(identity_of(5, rank), {"latest": f"global_step{rank}".encode()}) for rank in range(2)]
    outcome = agent.write(slots, tmp_path / "run")
    assert isinstance(outcome, Failure)
    assert outcome.cause is Cause.DAMAGED
    assert "ranks 0 and 1 both have latest" in outcome.reason


@pytest.mark.parametrize("rank", [0, 1])
def test_one_bit_that_differs_in_a_slot_fails_the_checkpoint_and_names_file_and_rank(
    agent: Agent, tmp_path: Path, rank: int
) -> None:
    output_dir = tmp_path / "run"
    save(output_dir, 4)
    slots = slots_of_step(5)
    damaged = f"global_step5/bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
    damage(slots[rank], damaged)
    outcome = agent.write(slots, output_dir)
    assert isinstance(outcome, Failure)
    assert outcome.cause is Cause.DAMAGED
    assert f"slot of rank {rank}" in outcome.reason
    assert Path(damaged).name in outcome.reason
    assert names_in(output_dir) == ["checkpoint-4"], "the one before is not touched"
    assert isinstance(agent.write(slots_of_step(6), output_dir, "checkpoint-6"), Written), "and it goes on"


def test_a_slot_with_another_snapshot_or_none_is_not_taken(agent: Agent, tmp_path: Path) -> None:
    _, other_step = fill_slot(identity_of(6, 0), files_of_rank(6, 0))
    outcome = agent.write([(identity_of(5, 0), other_step)], tmp_path / "run")
    assert isinstance(outcome, Failure)
    assert "step=6" in outcome.reason
    outcome = agent.write([(identity_of(5, 0), os.memfd_create("empty"))], tmp_path / "run")
    assert isinstance(outcome, Failure)
    assert "no whole snapshot" in outcome.reason


def test_older_checkpoints_beyond_keep_are_removed_and_named(agent: Agent, tmp_path: Path) -> None:
    output_dir = tmp_path / "run"
    for step in (1, 2, 3):
        save(output_dir, step)
    written = agent.write(slots_of_step(5), output_dir)
    assert isinstance(written, Written)
    published = agent.publish(manifest_for(written.files, 5), output_dir, keep=2)
    assert isinstance(published, Published)
    assert published.pruned == (output_dir / "checkpoint-2", output_dir / "checkpoint-1")
    assert names_in(output_dir) == ["checkpoint-3", "checkpoint-5"]


def test_without_permission_nothing_gets_a_name(agent: Agent, tmp_path: Path) -> None:
    output_dir = tmp_path / "run"
    save(output_dir, 4)
    written = agent.write(slots_of_step(5), output_dir)
    assert isinstance(written, Written)
    outcome = agent.publish(
        manifest_for(written.files, 5), output_dir, may_publish=lambda permit: permit(False, "generation 2 has begun")
    )
    assert outcome == Failure(Cause.REFUSED, "generation 2 has begun")
    assert names_in(output_dir) == ["checkpoint-4"]
    assert isinstance(agent.publish(manifest_for(written.files, 5), output_dir), Published), "it may be asked again"


def test_permission_may_come_later_and_everything_else_goes_on(agent: Agent, tmp_path: Path) -> None:
    output_dir = tmp_path / "run"
    written = agent.write(slots_of_step(5), output_dir)
    assert isinstance(written, Written)

    def later(permit: Permit) -> None:
        assert names_in(output_dir) == [], "asked before any name is given"
        agent.loop.set_bound("permit", 0.3, lambda: permit(True, ""))

    assert isinstance(agent.publish(manifest_for(written.files, 5), output_dir, may_publish=later), Published)


@pytest.mark.slow
def test_no_word_on_the_permission_counts_as_no_after_30_s(agent: Agent, tmp_path: Path) -> None:
    output_dir = tmp_path / "run"
    written = agent.write(slots_of_step(5), output_dir)
    assert isinstance(written, Written)
    outcome = agent.publish(manifest_for(written.files, 5), output_dir, may_publish=lambda permit: None)
    assert isinstance(outcome, Failure)
    assert outcome.cause is Cause.REFUSED
    assert "30 s" in outcome.reason
    assert names_in(output_dir) == []


@pytest.mark.parametrize("lacking", ["rng_state_1.pth", "scheduler.pt", "trainer_state.json"])
def test_what_could_not_be_resumed_from_is_not_published(agent: Agent, tmp_path: Path, lacking: str) -> None:
    slots = []
    for rank in range(2):
        files = {name: content for name, content in files_of_rank(5, rank).items() if name != lacking}
        slots.append(fill_slot(identity_of(5, rank), files))
    written = agent.write(slots, tmp_path / "run")
    assert isinstance(written, Written)
    outcome = agent.publish(manifest_for(written.files, 5), tmp_path / "run")
    assert isinstance(outcome, Failure)
    assert outcome.cause is Cause.INCOMPLETE
    assert lacking in outcome.reason
    assert names_in(tmp_path / "run") == []


def test_a_file_of_the_manifest_that_does_not_come_or_is_too_short_stops_it(
    agent: Agent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_file, "VISIBLE_WITHIN_S", 0.1)  # so in this process, and not through the courier
    output_dir = tmp_path / "run"
    written = agent.write(slots_of_step(5), output_dir)
    assert isinstance(written, Written)
    os.truncate(staging_root(output_dir, 1) / "checkpoint-5" / "adapter_model.safetensors", 3)
    place = disk.Place(output_dir, StorageKind.POSIX, 1, "checkpoint-5")
    text = manifest_for(written.files, 5).to_json()
    with pytest.raises(Failed, match=r"adapter_model\.safetensors"):
        disk.publish(place, text, 2, replace=False, ask_permission=lambda: pytest.fail("asked too early"))
    assert names_in(output_dir) == []


def test_a_generation_that_was_cleared_away_publishes_nothing(agent: Agent, tmp_path: Path) -> None:
    output_dir = tmp_path / "run"
    save(output_dir, 4)
    written = agent.write(slots_of_step(5), output_dir)
    assert isinstance(written, Written)
    clear_staging(output_dir, below=2)
    outcome = agent.publish(manifest_for(written.files, 5), output_dir)
    assert isinstance(outcome, Failure)
    assert outcome.cause is Cause.STORAGE
    assert names_in(output_dir) == ["checkpoint-4"]


def test_publishing_again_what_has_its_name_is_success(agent: Agent, tmp_path: Path) -> None:
    """As after the death of the courier between rename and answer."""
    output_dir = tmp_path / "run"
    written = agent.write(slots_of_step(5), output_dir)
    assert isinstance(written, Written)
    manifest = manifest_for(written.files, 5)
    assert isinstance(agent.publish(manifest, output_dir), Published)
    again = agent.publish(manifest, output_dir)
    assert isinstance(again, Published)
    assert again.path == output_dir / "checkpoint-5"
    assert names_in(output_dir) == ["checkpoint-5"]
    other = agent.publish(manifest_for(written.files, 5), output_dir)
    assert isinstance(other, Failure), "another checkpoint of this name is not the same"


def test_a_mount_without_rename_gets_the_files_and_then_the_manifest(agent: Agent, tmp_path: Path) -> None:
    output_dir = tmp_path / "run"
    written = agent.write(slots_of_step(5), output_dir, storage=StorageKind.OBJECT)
    assert isinstance(written, Written)
    assert list_checkpoints(output_dir) == [], "not one yet, though its folder has the name"
    published = agent.publish(manifest_for(written.files, 5), output_dir, storage=StorageKind.OBJECT)
    assert isinstance(published, Published)
    assert verify_checkpoint(output_dir / "checkpoint-5", 5).whole
    agent.discard(output_dir, storage=StorageKind.OBJECT)
    assert verify_checkpoint(output_dir / "checkpoint-5", 5).whole, "what has been published is not given up"


def test_on_a_mount_without_rename_an_old_generation_discards_nothing_of_the_next(agent: Agent, tmp_path: Path) -> None:
    output_dir = tmp_path / "run"
    assert isinstance(agent.write(slots_of_step(5), output_dir, storage=StorageKind.OBJECT), Written)
    clear_staging(output_dir, below=2)
    slots = slots_of_step(5, generation=2)
    written = agent.write(slots, output_dir, generation=2, storage=StorageKind.OBJECT)
    assert isinstance(written, Written)
    agent.discard(output_dir, generation=1, storage=StorageKind.OBJECT)
    manifest = manifest_for(written.files, 5)
    assert isinstance(agent.publish(manifest, output_dir, generation=2, storage=StorageKind.OBJECT), Published)


def test_a_checkpoint_that_is_given_up_leaves_no_bytes(agent: Agent, tmp_path: Path) -> None:
    output_dir = tmp_path / "run"
    assert isinstance(agent.write(slots_of_step(5), output_dir), Written)
    agent.discard(output_dir)
    assert not (staging_root(output_dir, 1) / "checkpoint-5").exists()
    agent.discard(output_dir)  # harmless where there is nothing


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A folder with room for 8 MiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(folder)], capture_output=True, text=True, check=False
    )
    if mounted.returncode != 0:
        pytest.skip(f"needs the right to mount: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.root
def test_a_full_disk_fails_the_checkpoint_says_so_and_the_next_one_has_room(agent: Agent, small_disk: Path) -> None:
    save(small_disk, 4)
    outcome = agent.write(slots_of_step(5, ballast_bytes=6 * MIB), small_disk)
    assert isinstance(outcome, Failure)
    assert outcome.cause is Cause.STORAGE
    assert "No space left on device" in outcome.reason
    assert names_in(small_disk) == ["checkpoint-4"]
    agent.discard(small_disk)
    written = agent.write(slots_of_step(6, ballast_bytes=2 * MIB), small_disk, "checkpoint-6")
    assert isinstance(written, Written)
    assert isinstance(agent.publish(manifest_for(written.files, 6), small_disk, "checkpoint-6"), Published)
    assert [step for step, _ in list_checkpoints(small_disk)] == [6, 4]


def test_an_output_folder_that_is_a_file_is_said(agent: Agent, tmp_path: Path) -> None:
    (tmp_path / "run").write_text("")
    outcome = agent.write(slots_of_step(5), tmp_path / "run")
    assert isinstance(outcome, Failure)
    assert outcome.cause is Cause.STORAGE
    assert "Not a directory" in outcome.reason


def test_the_manifest_of_thousands_of_ranks_is_published_too(agent: Agent, tmp_path: Path) -> None:
    """It does not fit into one packet: nor does this one."""
    many = {f"part-{number:05}-with-a-name-of-the-usual-length.bin": b"%d" % number for number in range(400)}
    slots = [*slots_of_step(5), fill_slot(identity_of(5, 2), many)]
    written = agent.write(slots, tmp_path / "run")
    assert isinstance(written, Written)
    assert isinstance(agent.publish(manifest_for(written.files, 5), tmp_path / "run"), Published)
    assert verify_checkpoint(tmp_path / "run" / "checkpoint-5", 5).whole
