from __future__ import annotations

import gc
import json
import os
import random
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

import pytest

from launcher.agent.memory_tier import MemoryTier
from launcher.agent.resume_folder import HeldSnapshot, Job, ResumeFolder
from launcher.checkpoint.manifest import read_manifest
from launcher.checkpoint.slots import slot_to_write
from launcher.checkpoint.snapshot import NUM_SLOTS, Snapshot, read_snapshot
from launcher.checkpoint.verify import verify_checkpoint
from launcher.errors import Cancelled
from tests.unit.checkpoint.checkpoint_folders import IDENTITY, contents, state_files
from tests.unit.checkpoint.snapshots import RUN_ID, files_of, flip_a_byte, identity, memory, note_of, save, write

JOB = Job(RUN_ID, IDENTITY)


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Whatever a test does: no descriptor and no folder stays after it."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    gc.collect()  # what other tests have dropped is not closed yet
    before = _descriptors()
    yield
    assert _descriptors() == before
    assert list(tmp_path.glob("ftlaunch-*")) == []


@pytest.fixture
def tier(nothing_is_left: None) -> Iterator[MemoryTier]:
    tier = MemoryTier(RUN_ID)
    yield tier
    tier.forget()


def test_each_rank_gets_slots_with_names_that_tell_whose_they_are(tier: MemoryTier) -> None:
    slots = tier.begin(1, [2, 3])
    assert set(slots) == {2, 3}
    assert len({fd for fds in slots.values() for fd in fds}) == 2 * NUM_SLOTS
    assert os.readlink(f"/proc/self/fd/{slots[3][1]}") == f"/memfd:ftlaunch-{RUN_ID}-rank-3-slot-1 (deleted)"
    assert not any(os.get_inheritable(fd) for fds in slots.values() for fd in fds)
    assert tier.begin(2, [3, 2]) == slots


def test_the_newest_whole_step_becomes_a_folder_like_the_one_on_disk(tier: MemoryTier) -> None:
    _train(tier, 1, 2, steps=[5, 6])
    save(tier.begin(1, [0, 1])[0][2], 7, 0, 2)  # rank 1 has not come so far
    choice = tier.resume(JOB)
    assert choice.refused == ()
    assert choice.taken is not None
    with choice.taken as folder:
        assert folder.path.name == "checkpoint-6"
        assert folder.tier == "memory"
        found = contents(folder.path)
        assert json.loads(found.pop("MANIFEST.json"))["samples_seen"] == 48
        assert found == state_files(6, 2)
        verification = verify_checkpoint(folder.path, 6)
        assert verification.whole, verification.reason
        assert verification.manifest == folder.manifest == read_manifest(folder.path)
        assert not (folder.path / "MANIFEST.json").is_symlink()
    assert not folder.path.exists()


def test_what_is_written_to_a_slot_afterwards_does_not_reach_the_folder(tier: MemoryTier) -> None:
    slots = _train(tier, 1, 1, steps=[5])
    folder = tier.resume(JOB).taken
    assert folder is not None
    mapped = os.open(folder.path / "trainer_state.json", os.O_RDONLY)
    try:
        for fd in slots[0]:
            os.pwrite(fd, b"\xff" * 100_000, 0)
        assert verify_checkpoint(folder.path, 5).whole
        folder.release()
        folder.release()
        state = state_files(5, 1)["trainer_state.json"]
        assert os.pread(mapped, 1000, 0) == state  # a rank keeps what it has opened
    finally:
        os.close(mapped)


def test_other_processes_read_the_folder_while_the_agent_lives(tier: MemoryTier) -> None:
    _train(tier, 1, 2, steps=[5])
    folder = tier.resume(JOB).taken
    assert folder is not None
    code = (
        "import sys; from pathlib import Path; from launcher.checkpoint.verify import verify_checkpoint\n"
        "print(verify_checkpoint(Path(sys.argv[1]), 5))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder.path)], capture_output=True, text=True, check=True, timeout=60
    )
    assert "reason=''" in done.stdout


@pytest.mark.parametrize("damaged_rank", [0, 1])
def test_a_damaged_snapshot_is_refused_and_the_step_before_it_taken(tier: MemoryTier, damaged_rank: int) -> None:
    slots = _train(tier, 1, 2, steps=[5, 6, 7])
    flip_a_byte(slots[damaged_rank][2])
    flip_a_byte(slots[0][1])
    choice = tier.resume(JOB)
    assert choice.taken is not None
    assert choice.taken.manifest.step == 5
    assert [(refused.whole.generation, refused.whole.step) for refused in choice.refused] == [(1, 7), (1, 6)]
    assert choice.refused[0].reason.startswith(f"memory of rank {damaged_rank}: ")
    assert "does not have the content that was written" in choice.refused[0].reason


def test_a_step_without_a_whole_state_is_refused(tier: MemoryTier) -> None:
    (fds,) = tier.begin(1, [0]).values()
    save(fds[0], 4, 0, 1)
    save(fds[1], 5, 0, 1, without=["rng_state.pth"])
    save(fds[2], 6, 0, 1, without=["trainer_state.json"])
    choice = tier.resume(JOB)
    assert choice.taken is not None
    assert choice.taken.manifest.step == 4
    assert [refused.reason for refused in choice.refused] == [
        "trainer_state.json is missing or not readable",
        "rng_state.pth (random state of rank 0) is missing",
    ]


@pytest.mark.parametrize(
    ("note", "reason"),
    [
        ({"run_id": "another"}, "it is of run another"),
        ({"identity": {"lora.r": 8}}, "other settings (lora.r: 8 there, 16 now)"),
        ({"data_digest": "aa"}, "other data"),
        ({"step": 4}, "of step 4 and 1 ranks"),
        ({"world_size": 2}, "of step 5 and 2 ranks"),
        ({"surprise": 1}, "makes no MANIFEST.json"),
        ({"v": 2}, "makes no MANIFEST.json"),
    ],
)
def test_a_step_of_another_job_is_refused(tier: MemoryTier, note: dict[str, object], reason: str) -> None:
    write(tier.begin(1, [0])[0][0], files_of(0, 5, 1), identity(5), note_of(5, 1) | note)
    choice = tier.resume(Job(RUN_ID, IDENTITY, "bb"))
    assert choice.taken is None
    (refused,) = choice.refused
    assert reason in refused.reason


def test_two_ranks_with_different_content_under_one_name_are_refused(tier: MemoryTier) -> None:
    slots = tier.begin(1, [0, 1])
    save(slots[0][0], 5, 0, 2)
    write(slots[1][0], files_of(1, 5, 2) | {"latest": b"global_step4"}, identity(5, 1, 2))
    assert [refused.reason for refused in tier.resume(JOB).refused] == [
        "two ranks have written latest, and not the same"
    ]
    write(slots[1][0], files_of(1, 5, 2) | {"latest": b"global_step5"}, identity(5, 1, 2))
    folder = tier.resume(JOB).taken
    assert folder is not None
    assert verify_checkpoint(folder.path, 5).whole


def test_a_file_where_another_rank_has_a_folder_is_refused(tier: MemoryTier) -> None:
    slots = tier.begin(1, [0, 1])
    save(slots[0][0], 5, 0, 2)
    write(slots[1][0], {"global_step5": b"", **files_of(1, 5, 2)}, identity(5, 1, 2))
    (refused,) = tier.resume(JOB).refused
    assert refused.reason.startswith("its folder cannot be made: ")


def test_snapshots_of_another_run_or_in_a_slot_of_another_rank_are_not_looked_at(tier: MemoryTier) -> None:
    fds = tier.begin(1, [0])[0]
    write(fds[0], files_of(0, 5, 1), identity(5, run_id="another"), note_of(5, 1) | {"run_id": "another"})
    write(fds[1], files_of(1, 5, 2), identity(5, 1, 2))
    assert tier.inventory() == []
    assert tier.resume(JOB).taken is None


def test_a_step_below_the_one_on_disk_is_not_copied(tier: MemoryTier) -> None:
    _train(tier, 1, 1, steps=[5, 6])
    assert tier.resume(JOB, not_below=7).taken is None
    folder = tier.resume(JOB, not_below=6).taken
    assert folder is not None


def test_what_peers_have_completes_a_step_and_stands_in_for_a_damaged_copy(tier: MemoryTier) -> None:
    slots = tier.begin(1, [0])
    save(slots[0][0], 5, 0, 2)
    with memory(2) as (other, again):
        peers = [
            HeldSnapshot(save(other, 5, 1, 2), other, "peer"),
            HeldSnapshot(save(again, 5, 0, 2), again, "peer"),
        ]
        assert tier.resume(JOB, elsewhere=peers[1:]).taken is None
        with _taken(tier, peers) as folder:
            assert (folder.tier, folder.skipped) == ("peer", ())
            assert verify_checkpoint(folder.path, 5).whole
        flip_a_byte(slots[0][0])
        choice = tier.resume(JOB, elsewhere=peers)
        assert choice.taken is not None
        assert verify_checkpoint(choice.taken.path, 5).whole
        assert [refused.reason.split(":")[0] for refused in choice.refused] == ["memory of rank 0"]
        choice.taken.release()


def test_slots_of_ranks_that_went_elsewhere_stay_until_something_newer_is_whole(tier: MemoryTier) -> None:
    """Four ranks, then two: what all four had can be resumed from until the two have a step of their own."""
    _train(tier, 1, 4, steps=[5])
    slots = tier.begin(2, [0, 1])
    assert tier.retire() == frozenset()
    save(slots[0][1], 6, 0, 2, generation=2)
    assert tier.retire() == frozenset()
    with _taken(tier) as folder:
        assert (folder.manifest.step, folder.manifest.world_size) == (5, 4)
    save(slots[1][1], 6, 1, 2, generation=2)
    held_bytes = tier.held_bytes
    assert tier.retire() == {2, 3}
    assert tier.retire() == frozenset()
    assert tier.held_bytes < held_bytes
    with _taken(tier) as folder:
        assert (folder.manifest.step, folder.manifest.world_size) == (6, 2)


def test_another_node_may_have_the_ranks_that_make_the_new_step_whole(tier: MemoryTier) -> None:
    _train(tier, 1, 2, steps=[5])
    slots = tier.begin(2, [2, 3])
    for rank in (2, 3):
        save(slots[rank][0], 6, rank, 4, generation=2)
    assert tier.retire() == frozenset()
    assert tier.retire(identity(6, rank, 4, generation=2) for rank in (0, 1)) == {0, 1}


def test_an_old_step_that_is_whole_with_a_peer_s_copy_is_nothing_newer(tier: MemoryTier) -> None:
    _train(tier, 1, 2, steps=[5])
    tier.begin(2, [0])
    assert tier.retire([identity(5, 1, 2)]) == frozenset()


def test_a_generation_that_saves_nothing_leaves_the_step_before_it(tier: MemoryTier) -> None:
    _train(tier, 1, 2, steps=[5, 6])
    for generation, ranks in ((2, [0]), (3, [0, 1, 2]), (4, [1])):
        tier.begin(generation, ranks)
        tier.retire()
        with _taken(tier) as folder:
            assert (folder.manifest.step, folder.manifest.world_size) == (6, 2)


def test_nothing_to_resume_from_is_no_error(tier: MemoryTier) -> None:
    assert tier.resume(JOB).taken is None
    tier.begin(1, [0, 1])
    assert tier.resume(JOB).taken is None
    assert tier.inventory() == []
    assert tier.held_bytes == 0


def test_all_memory_is_counted_and_given_back(tier: MemoryTier) -> None:
    before = _descriptors()
    (fds,) = tier.begin(1, [0]).values()
    assert tier.held_bytes == 0
    write(fds[0], files_of(0, 5, 1) | {"large": bytes(10_000_000)}, identity(5), note_of(5, 1))
    assert 10_000_000 < tier.held_bytes < 10_200_000
    folder = tier.resume(JOB).taken
    assert folder is not None
    assert 20_000_000 < tier.held_bytes < 20_400_000
    folder.release()
    assert 10_000_000 < tier.held_bytes < 10_200_000
    folder = tier.resume(JOB).taken
    tier.forget()
    tier.forget()
    assert tier.held_bytes == 0
    assert _descriptors() == before
    assert folder is not None
    assert not folder.path.exists()


def test_a_resume_that_is_cancelled_leaves_nothing_behind(tier: MemoryTier) -> None:
    _train(tier, 1, 2, steps=[5])
    before = _descriptors()
    for asked in range(12):
        left = iter(range(asked))
        with pytest.raises(Cancelled):
            tier.resume(JOB, cancelled=lambda left=left: next(left, None) is None)
        assert _descriptors() == before


def test_without_room_for_the_copies_the_run_resumes_from_disk(
    tier: MemoryTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    _train(tier, 1, 2, steps=[5])
    before = _descriptors()
    real = os.memfd_create
    for possible in range(5):
        left = iter(range(possible))

        def memfd_create(name: str, flags: int, left: Iterator[int] = left) -> int:
            if next(left, None) is None:
                raise OSError(24, "Too many open files")
            return real(name, flags)

        monkeypatch.setattr(os, "memfd_create", memfd_create)
        choice = tier.resume(JOB)
        assert choice.taken is None
        assert "Too many open files" in choice.refused[0].reason
        with pytest.raises(OSError, match="Too many"):
            tier.begin(2, [0, 1, 2, 3])
        assert _descriptors() == before
    monkeypatch.undo()


@pytest.mark.slow
def test_ranks_killed_together_at_any_moment_have_a_whole_step_in_common(tier: MemoryTier) -> None:
    """Two ranks that wait for each other in each step, as training does, are killed; then the next generation goes on
    from the folder that they are given."""
    chance = random.Random(7)
    resumed = 0
    apart = 0
    for generation in range(1, 81):
        slots = tier.begin(generation, [0, 1])
        sealed = _train_until_killed(slots, generation, resumed, chance)
        choice = tier.resume(JOB)
        assert choice.refused == ()
        if not sealed and choice.taken is None:
            continue
        assert choice.taken is not None
        with choice.taken as folder:
            step = folder.manifest.step
            assert step >= resumed
            assert step >= max(sealed, default=0) - 1
            assert contents(folder.path).keys() - {"MANIFEST.json"} == state_files(step, 2).keys()
            assert verify_checkpoint(folder.path, step).whole
        apart += step < max(sealed, default=0)
        resumed = step
    assert resumed > 100
    assert apart > 0, "the kills have not met ranks a step apart"


@pytest.mark.slow
@pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed")
def test_torch_and_safetensors_load_from_the_folder_in_another_process(tier: MemoryTier) -> None:
    fds = tier.begin(1, [0])[0]
    writes = """
import sys, torch, safetensors.torch
from launcher.checkpoint.snapshot import SlotWriter
from tests.unit.checkpoint.snapshots import files_of, identity, note_of
state = {"a": torch.arange(300_000).reshape(3, -1), "b": torch.ones(5, dtype=torch.bfloat16)}
writer = SlotWriter(int(sys.argv[1]))
for name, content in files_of(0, 5, 1).items():
    with writer.open(name) as stream:
        if name.endswith(".pt"):
            torch.save(state, stream)
        else:
            stream.write(safetensors.torch.save(state) if name.endswith(".safetensors") else content)
writer.seal(identity(5), note_of(5, 1))
"""
    reads = """
import sys, torch, safetensors.torch
from pathlib import Path
folder = Path(sys.argv[1])
names = sorted(folder.rglob("*.pt"))
loaded = [torch.load(name, weights_only=True, mmap=mmap) for name in names for mmap in (False, True)]
loaded.append(safetensors.torch.load_file(folder / "adapter_model.safetensors"))
print(len(names), all(torch.equal(state["a"], torch.arange(300_000).reshape(3, -1)) for state in loaded))
"""
    subprocess.run([sys.executable, "-c", writes, str(fds[0])], pass_fds=[fds[0]], check=True, timeout=180)
    folder = tier.resume(JOB).taken
    assert folder is not None
    done = subprocess.run(
        [sys.executable, "-c", reads, str(folder.path)], capture_output=True, text=True, check=False, timeout=180
    )
    assert done.stdout.strip() == "3 True", done.stderr


def _descriptors() -> set[tuple[str, str]]:
    names = [name for name in os.listdir("/proc/self/fd") if os.path.lexists(f"/proc/self/fd/{name}")]
    return {(name, os.readlink(f"/proc/self/fd/{name}")) for name in names if int(name) > 2}


def _train(tier: MemoryTier, generation: int, world_size: int, steps: list[int]) -> dict[int, tuple[int, ...]]:
    slots = dict(tier.begin(generation, range(world_size)))
    for rank, fds in slots.items():
        for fd, step in zip(fds, steps, strict=False):
            save(fd, step, rank, world_size, generation)
    return slots


def _taken(tier: MemoryTier, peers: Sequence[HeldSnapshot] = ()) -> ResumeFolder:
    folder = tier.resume(JOB, elsewhere=peers).taken
    assert folder is not None
    return folder


def _train_until_killed(
    slots: dict[int, tuple[int, ...]], generation: int, resumed: int, chance: random.Random
) -> list[int]:
    """Fork the ranks, kill them a moment after rank 0 has reported some steps; returns the last step that each has
    reported, of those that have."""
    meet = socket.socketpair()
    pids, reports = [], []
    for rank, fds in slots.items():
        reads, writes = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                _save_for_ever(fds, rank, generation, resumed, meet[rank], writes)
            finally:
                os._exit(1)
        os.close(writes)
        pids.append(pid)
        reports.append(reads)
    said = [os.read(reports[0], 8) for _ in range(chance.randrange(6))]
    time.sleep(chance.uniform(0, 0.003))
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    for pid in pids:
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    for end in meet:
        end.close()
    for reads in reports:
        with os.fdopen(reads, "rb") as stream:
            said.append(stream.read()[-8:])
    return [step for (step,) in struct.iter_unpack("<q", b"".join(said))]


def _save_for_ever(
    fds: tuple[int, ...], rank: int, generation: int, resumed: int, meet: socket.socket, report_to: int
) -> None:
    snapshots: list[Snapshot | None] = [read_snapshot(fd) for fd in fds]
    keep = {resumed}
    step = resumed
    while True:
        step += 1
        meet.sendall(b"g")
        meet.recv(1)  # the gradients of this step: all have sealed the one before
        if step > resumed + 1:
            keep = set()
        slot = slot_to_write(snapshots, generation=generation, keep=keep)
        assert slot is not None
        snapshots[slot] = None
        snapshots[slot] = save(fds[slot], step, rank, 2, generation)
        os.write(report_to, struct.pack("<q", step))
