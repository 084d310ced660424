"""Every way in which a checkpoint on disk can be damaged, done to a real one. docs/checkpoint-faults.md lists them.

What a start makes of each is asked of the very functions that it calls; one whole run shows that they are called.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from launcher.agent.resume import look_for_resume
from launcher.checkpoint.manifest import MANIFEST_NAME, FileRecord, read_manifest, record_files
from launcher.checkpoint.verify import verify_checkpoint
from launcher.errors import UserError
from tests.fault.harness import Job
from tests.fault.judging import (
    assert_refused,
    assert_taken,
    copy_checkpoints,
    files_of,
    identity_of,
    rewrite_manifest,
    start_looks,
)
from tests.fault.weights import digests

Damage = Callable[[Path], object]  # of the folder checkpoint-6
NUM_TRUNCATIONS = 50
PAGE_BYTES = 4096
SHARD = "global_step6/zero_pp_rank_1_mp_rank_00_optim_states.pt"


@pytest.fixture
def out(trained: Job, tmp_path: Path) -> Path:
    """A copy of real checkpoints 3 and 6 of two ranks."""
    return copy_checkpoints(trained.output_dir, tmp_path / "out")


def name_of(file: Path, folder: Path) -> str:
    return file.relative_to(folder).as_posix()


# -- content -----------------------------------------------------------------------------------------------------------


def cuts(folder: Path) -> list[tuple[Path, int]]:
    """Nothing left and a byte missing of every file; the others at page borders and beside them, drawn once for all."""
    ends = [(file, size) for file in files_of(folder) for size in {0, file.stat().st_size - 1}]
    borders = [
        (file, size)
        for file in files_of(folder)
        for border in range(PAGE_BYTES, file.stat().st_size, PAGE_BYTES)
        for size in (border - 1, border, border + 1)
        if size < file.stat().st_size - 1
    ]
    return (ends + random.Random(7).sample(borders, NUM_TRUNCATIONS))[:NUM_TRUNCATIONS]


@pytest.mark.parametrize("number", range(NUM_TRUNCATIONS))
def test_truncated_at_each_of_50_positions(out: Path, number: int) -> None:
    file, size = cuts(out / "checkpoint-6")[number]
    os.truncate(file, size)
    name = name_of(file, out / "checkpoint-6")
    assert_refused(out, f"{name} has {size} bytes" if name != MANIFEST_NAME else f"{MANIFEST_NAME} cannot be read")


def test_the_50_positions_are_spread_over_all_files(out: Path) -> None:
    chosen = cuts(out / "checkpoint-6")
    assert len(set(chosen)) == NUM_TRUNCATIONS
    assert {file for file, _ in chosen} == set(files_of(out / "checkpoint-6"))


def test_a_flipped_bit_in_any_file(out: Path) -> None:
    """At three positions of each file, the manifest among them: it says what a run resumes with."""
    folder = out / "checkpoint-6"
    draw = random.Random(11)
    for file in files_of(folder):
        content = file.read_bytes()
        for _ in range(3):
            position, bit = draw.randrange(len(content)), draw.randrange(8)
            flip(file, position, bit)
            reason = verify_checkpoint(folder, 6).reason
            assert name_of(file, folder) in reason, f"{file}, bit {bit} of byte {position}: {reason or 'not noticed'}"
            file.write_bytes(content)
    assert verify_checkpoint(folder, 6).whole, "the damage was undone"
    flip(folder / SHARD, 12_345, 3)
    assert_refused(out, f"{SHARD} does not have the content that was written")


def flip(file: Path, position: int, bit: int) -> None:
    content = bytearray(file.read_bytes())
    content[position] ^= 1 << bit
    file.write_bytes(content)


def test_every_bit_of_the_manifest_counts(out: Path) -> None:
    """Sizes alone are compared here, so that nothing but the manifest can refuse it."""
    manifest = out / "checkpoint-6" / MANIFEST_NAME
    content = manifest.read_bytes()
    for position in range(0, len(content), 7):
        flip(manifest, position, position % 8)
        assert not verify_checkpoint(out / "checkpoint-6", 6, hashes=False).whole, f"byte {position}"
        manifest.write_bytes(content)


CONTENTS: dict[str, Callable[[bytes], bytes]] = {
    "trailing bytes": lambda content: content + b"\0" * 10,
    "nothing": lambda content: b"",
    "zeros": lambda content: bytes(len(content)),
    "zeros from the last page on": lambda content: (
        content[: (len(content) - 1) // PAGE_BYTES * PAGE_BYTES] + bytes((len(content) - 1) % PAGE_BYTES + 1)
    ),
    "another file's bytes": lambda content: b"\xa5" * len(content),
}


@pytest.mark.parametrize("what", CONTENTS)
def test_a_last_write_that_was_lost_or_is_not_ours(out: Path, what: str) -> None:
    """What a crash leaves of a file whose blocks never reached the disk: nothing, zeros, what lay there before."""
    folder = out / "checkpoint-6"
    for file in files_of(folder):
        content = file.read_bytes()
        file.write_bytes(CONTENTS[what](content))
        reason = verify_checkpoint(folder, 6).reason
        assert name_of(file, folder) in reason, f"{file}: {reason or 'not noticed'}"
        file.write_bytes(content)
    (folder / SHARD).write_bytes(CONTENTS[what]((folder / SHARD).read_bytes()))
    assert_refused(out, SHARD)


def test_a_file_of_the_checkpoint_before(out: Path) -> None:
    """A write that was lost from a file that had been there already."""
    folder, before = out / "checkpoint-6", out / "checkpoint-3"
    noticed = 0
    for file in files_of(folder):
        older = before / name_of(file, folder).replace("global_step6", "global_step3")
        content, old_content = file.read_bytes(), older.read_bytes()
        if content != old_content:
            file.write_bytes(old_content)
            reason = verify_checkpoint(folder, 6).reason
            assert name_of(file, folder) in reason, f"{file}: {reason or 'not noticed'}"
            file.write_bytes(content)
            noticed += 1
    assert noticed >= 8
    shutil.copy(before / "trainer_state.json", folder / "trainer_state.json")
    assert_refused(out, "trainer_state.json has")


# -- files -------------------------------------------------------------------------------------------------------------


def remove(file: Path) -> None:
    file.unlink()


def make_a_folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


def link_to_itself(file: Path) -> None:
    file.unlink()
    file.symlink_to(file.name)


def link_to_nothing(file: Path) -> None:
    file.unlink()
    file.symlink_to("gone")


def make_a_pipe(file: Path) -> None:
    """Whoever opens it to read waits for ever."""
    file.unlink()
    os.mkfifo(file)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("damage", [remove, make_a_folder, link_to_itself, link_to_nothing, make_a_pipe])
def test_a_missing_file_or_something_else_in_its_place(out: Path, damage: Damage) -> None:
    folder = out / "checkpoint-6"
    for file in files_of(folder):
        content = file.read_bytes()
        damage(file)
        reason = verify_checkpoint(folder, 6).reason
        assert name_of(file, folder) in reason, f"{file}: {reason or 'not noticed'}"
        file.rmdir() if file.is_dir() and not file.is_symlink() else file.unlink(missing_ok=True)
        file.write_bytes(content)
    assert verify_checkpoint(folder, 6).whole, "the damage was undone"
    damage(folder / MANIFEST_NAME)
    assert_refused(out, f"no {MANIFEST_NAME}: the save was not finished")


NEVER_WRITTEN = {
    "an optimizer shard": (SHARD, "1 of 2 optimizer shards are there"),
    "the schedule": ("scheduler.pt", "scheduler.pt (the learning-rate schedule) is missing"),
    "random states": ("rng_state_1.pth", "rng_state_1.pth (random state of rank 1) is missing"),
    "the trainer's state": ("trainer_state.json", "trainer_state.json is missing"),
}


@pytest.mark.parametrize("what", NEVER_WRITTEN)
def test_state_that_no_manifest_names(out: Path, what: str) -> None:
    """The manifest agrees with what is there. Transformers would go on without, and say nothing."""
    name, reason = NEVER_WRITTEN[what]
    folder = out / "checkpoint-6"
    (folder / name).unlink()
    rewrite_manifest(folder, files={key: value for key, value in read_manifest(folder).files.items() if key != name})
    assert_refused(out, reason)


def test_two_shards_of_the_same_rank(out: Path) -> None:
    folder = out / "checkpoint-6"
    files = dict(read_manifest(folder).files)
    other = SHARD.replace("rank_1", "rank_4")
    (folder / SHARD).rename(folder / other)
    files[other] = files.pop(SHARD)
    rewrite_manifest(folder, files=files)
    assert_refused(out, "the optimizer shard of rank 1 is missing")


# -- the manifest ------------------------------------------------------------------------------------------------------

NO_MANIFESTS = {
    "not JSON": b"step: 6\n",
    "binary": bytes(range(256)),
    "a list": b"[]",
    "a text": b'"checkpoint"',
    "null": b"null",
    "an empty object": b"{}",
    "nested without end": b"[" * 200_000,
}


@pytest.mark.parametrize("what", NO_MANIFESTS)
def test_something_else_in_the_manifest(out: Path, what: str) -> None:
    (out / "checkpoint-6" / MANIFEST_NAME).write_bytes(NO_MANIFESTS[what])
    assert_refused(out, f"{MANIFEST_NAME} cannot be read")


@pytest.mark.parametrize(
    "edit",
    [
        {"global_batch_size": 8},
        {"samples_seen": 0},
        {"world_size": "2"},
        {"identity": None},
        {"v": 2},
        {"files": {"latest": {"size_bytes": 12, "xxh3_128": "71e2ee1c62dea13282d550de250c7be1"}}},
    ],
    ids=lambda edit: next(iter(edit)),
)
def test_a_manifest_that_somebody_has_edited(out: Path, edit: dict[str, object]) -> None:
    path = out / "checkpoint-6" / MANIFEST_NAME
    path.write_text(json.dumps(json.loads(path.read_text()) | edit))
    assert_refused(out, "it does not have the content that was written (its own hash differs)")


def test_a_manifest_of_a_later_version_is_not_damaged(out: Path) -> None:
    """Set aside, it would cost all progress after a downgrade."""
    rewrite_manifest(out / "checkpoint-6", v=2)
    with pytest.raises(UserError, match="is of a later version of ftlaunch") as caught:
        start_looks(out)
    assert caught.value.exit_code == 2
    assert "Update ftlaunch" in str(caught.value)
    assert (out / "checkpoint-6").is_dir()


def test_a_manifest_of_the_first_version_has_no_hash_of_its_own(out: Path) -> None:
    path = out / "checkpoint-6" / MANIFEST_NAME
    document = json.loads(path.read_text())
    del document["xxh3_128"]
    path.write_text(json.dumps(document))
    assert_taken(out, 6)


def test_the_manifest_of_another_step(out: Path) -> None:
    (out / "checkpoint-6").rename(out / "checkpoint-8")
    assert_refused(out, f"{MANIFEST_NAME} is of step 6, the folder's name says 8", newest=8)


def test_the_manifest_of_another_job_is_wrong_input(out: Path) -> None:
    """Nothing is set aside, and nothing begins anew: only the user knows which of the two is meant."""
    identity = dict(identity_of(out))
    rewrite_manifest(out / "checkpoint-6", identity={**identity, "lora.r": 64, "model.path": "/models/other"})
    with pytest.raises(UserError) as caught:
        start_looks(out, identity)
    message = str(caught.value)
    assert caught.value.exit_code == 2
    assert "lora.r: 64 there, 4 now" in message
    assert "model.path: '/models/other' there" in message
    assert "move it out of that folder" in message
    assert (out / "checkpoint-6").is_dir()


def test_a_checkpoint_of_the_same_job_from_another_run_is_continued_and_said(out: Path) -> None:
    """Whoever copies a checkpoint into a new output folder wants to go on from it."""
    shutil.rmtree(out / "checkpoint-3")
    identity = read_manifest(out / "checkpoint-6").identity
    judged = start_looks(out, identity, run_id="0123456789abcdef")
    assert judged.resume.step == 6
    assert any("was written by run" in line and "this is run 0123456789abcdef" in line for line in judged.said)
    own = read_manifest(out / "checkpoint-6").run_id
    assert start_looks(out, identity, run_id=own).said == ()


@pytest.mark.parametrize(("there", "reason"), [(1, "rng_state.pth (random state of rank 0)"), (3, "rng_state_2.pth")])
def test_another_number_of_ranks_than_the_manifest_says(out: Path, there: int, reason: str) -> None:
    rewrite_manifest(out / "checkpoint-6", world_size=there)
    assert_refused(out, f"{reason}")


def test_shards_of_one_rank_where_the_manifest_says_two(out: Path) -> None:
    folder = out / "checkpoint-6"
    files = dict(read_manifest(folder).files)
    for name in (SHARD, "rng_state_1.pth"):
        (folder / name).unlink()
        del files[name]
    rewrite_manifest(folder, files=files)
    assert_refused(out, "rng_state_1.pth (random state of rank 1) is missing")


def test_a_shard_too_many(out: Path) -> None:
    shard = out / "checkpoint-6" / SHARD
    shutil.copy(shard, shard.with_name(shard.name.replace("rank_1", "rank_2")))
    assert_refused(out, "3 of 2 optimizer shards are there")


def test_a_manifest_never_names_a_file_elsewhere(out: Path) -> None:
    files = dict(read_manifest(out / "checkpoint-6").files)
    rewrite_manifest(out / "checkpoint-6", files={**files, "../checkpoint-3/latest": FileRecord(12, "0" * 32)})
    assert_refused(out, "../checkpoint-3/latest is not within the folder")


# -- folders that only look like one -----------------------------------------------------------------------------------


def rubbish(folder: Path) -> None:
    folder.mkdir()
    (folder / "notes.txt").write_text("do not delete")
    (folder / "global_step99").mkdir()
    (folder / "trainer_state.json").write_text('{"global_step": 99}')


@pytest.mark.parametrize("make", [Path.mkdir, rubbish], ids=["empty", "rubbish"])
def test_a_stray_checkpoint_99(out: Path, make: Damage) -> None:
    make(out / "checkpoint-99")
    assert_refused(out, f"no {MANIFEST_NAME}", newest=99, before=6)


STRAYS: dict[str, Damage] = {
    "a file": lambda path: (path / "checkpoint-99").write_text("a file"),
    "a link to nothing": lambda path: (path / "checkpoint-99").symlink_to("gone"),
    "a link to itself": lambda path: (path / "checkpoint-99").symlink_to("checkpoint-99"),
    "leading zeros": lambda path: shutil.copytree(path / "checkpoint-6", path / "checkpoint-006"),
    "letters": lambda path: (path / "checkpoint-abc").mkdir(),
    "a negative number": lambda path: (path / "checkpoint--99").mkdir(),
    "a number beyond all": lambda path: (path / f"checkpoint-{'9' * 200}").mkdir(),
    "digits of another script": lambda path: (path / "checkpoint-٩٩").mkdir(),
    "a line break": lambda path: (path / "checkpoint-99\n").mkdir(),
    "upper case": lambda path: (path / "Checkpoint-99").mkdir(),
}


@pytest.mark.parametrize("what", STRAYS)
def test_a_stray_name_is_neither_taken_nor_touched(out: Path, what: str) -> None:
    STRAYS[what](out)
    names = sorted(path.name for path in out.iterdir())
    judged = assert_taken(out, 6)
    assert judged.choice.refused == ()
    assert sorted(path.name for path in out.iterdir() if path.name != "ftlaunch") == names


# -- as a whole --------------------------------------------------------------------------------------------------------


def test_after_the_damage_the_run_ends_with_the_weights_of_an_undisturbed_one(trained: Job, tmp_path: Path) -> None:
    """Done when: a flipped bit in a shard, and a stray folder above it."""
    out = copy_checkpoints(trained.output_dir, tmp_path / "out")
    flip(out / "checkpoint-6" / SHARD, 12_345, 3)
    damaged = (out / "checkpoint-6" / SHARD).read_bytes()
    rubbish(out / "checkpoint-99")
    job = Job(tmp_path, {**trained.config, "output_dir": str(out)})
    run = job.run()
    assert run.process.returncode == 0, run.log
    assert [(Path(event["path"]).name, event["kept_as"][-9:]) for event in run.events("checkpoint_rejected")] == [
        ("checkpoint-99", ".rejected"),
        ("checkpoint-6", ".rejected"),
    ]
    assert run.events("resumed")[0]["step"] == 3
    assert digests(job.checkpoint(6)) == digests(trained.checkpoint(6))
    assert (out / "checkpoint-6.rejected" / SHARD).read_bytes() == damaged


def test_a_stray_checkpoint_of_another_job_stops_the_start(trained: Job, tmp_path: Path) -> None:
    out = copy_checkpoints(trained.output_dir, tmp_path / "out")
    (out / "checkpoint-6").rename(out / "checkpoint-99")
    state = out / "checkpoint-99" / "trainer_state.json"
    state.write_text(json.dumps(json.loads(state.read_text()) | {"global_step": 99}))
    (out / "checkpoint-99" / "global_step6").rename(out / "checkpoint-99" / "global_step99")
    other = {**identity_of(out), "method": "full"}
    rewrite_manifest(out / "checkpoint-99", step=99, identity=other, files=record_files(out / "checkpoint-99"))
    job = Job(tmp_path, {**trained.config, "output_dir": str(out)})
    run = job.run()
    assert run.process.returncode == 2, run.log
    assert "its checkpoint-99 was made with" in run.log
    assert "method: 'full' there, 'lora' now" in run.log
    assert not run.events("generation_started")
    assert (out / "checkpoint-99").is_dir()


def test_the_command_shows_the_same(trained: Job, tmp_path: Path) -> None:
    """`ftlaunch checkpoints --verify`, which changes nothing."""
    out = copy_checkpoints(trained.output_dir, tmp_path / "out")
    (out / "checkpoint-6" / "scheduler.pt").unlink()
    command = [sys.executable, "-m", "launcher", "checkpoints", str(out), "--verify"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0
    assert "step 6: refused: scheduler.pt is missing" in done.stdout
    assert "<- a start resumes here" in next(line for line in done.stdout.splitlines() if "step 3" in line)
    assert (out / "checkpoint-6").is_dir()


def test_nothing_is_whole_any_more(out: Path) -> None:
    """It begins at step 0, loudly; what was there is kept."""
    for step in (3, 6):
        (out / f"checkpoint-{step}" / "latest").write_text("")
    identity = identity_of(out)
    choice = look_for_resume(out, identity, cancelled=lambda: False)
    assert [refused.step for refused in choice.refused] == [6, 3]
    judged = start_looks(out, identity)
    assert judged.resume.path is None
    assert "training begins at step 0" in judged.said[-1]
    assert {path.name for path in out.glob("checkpoint-*")} == {"checkpoint-3.rejected", "checkpoint-6.rejected"}
