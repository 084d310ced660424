from __future__ import annotations

import ctypes
import os
import random
import signal
import struct
import subprocess
import sys
import time
from array import array
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import xxhash

from launcher.checkpoint.manifest import FileRecord
from launcher.checkpoint.slots import slot_to_write
from launcher.checkpoint.snapshot import (
    FileEntry,
    SlotWriter,
    Snapshot,
    copy_file,
    create_memory,
    read_snapshot,
    verify_snapshot,
)
from launcher.errors import Cancelled
from tests.unit.checkpoint.snapshots import identity, memory, write

HEADER_BYTES = 72  # state word, header, its hash


@pytest.fixture
def slot() -> Iterator[int]:
    with memory(1) as fds:
        yield fds[0]


def content(fd: int, entry: FileEntry) -> bytes:
    return os.pread(fd, entry.record.size_bytes, entry.offset) if entry.record.size_bytes else b""


def test_a_sealed_snapshot_is_read_back_as_it_was_written(slot: int) -> None:
    files = {"global_step7/shard.pt": os.urandom(100_001), "rng.pth": b"", "模型/权重": b"x" * 4096, "a": b"1"}
    note = {"versions": {"torch": "2.11"}, "名": [1, None, 2.5]}
    sealed = write(slot, files, identity(7, 1, 2, 3), note)
    found = read_snapshot(slot)
    assert found == sealed
    assert found is not None
    assert found.identity == identity(7, 1, 2, 3)
    assert found.note == note
    assert {entry.name: content(slot, entry) for entry in found.files} == files
    assert found.num_bytes == sum(map(len, files.values()))
    assert all(entry.offset % 4096 == 0 for entry in found.files)
    assert [entry.record.xxh3_128 for entry in found.files] == [
        xxhash.xxh3_128_hexdigest(data) for data in files.values()
    ]
    assert verify_snapshot(slot, found) == ""


def test_a_slot_reads_as_nothing_from_the_first_moment_of_the_next_write_until_it_is_sealed(slot: int) -> None:
    assert read_snapshot(slot) is None
    write(slot, {"a": b"1"}, identity(1))
    writer = SlotWriter(slot)
    assert read_snapshot(slot) is None
    with writer.open("a") as stream:
        assert read_snapshot(slot) is None
        stream.write(b"2" * 200_000)
        assert read_snapshot(slot) is None
    assert read_snapshot(slot) is None
    writer.seal(identity(2), {})
    found = read_snapshot(slot)
    assert found is not None
    assert found.identity.step == 2


def test_another_process_reads_it_through_the_descriptor_it_was_given(slot: int) -> None:
    write(slot, {"a": b"1"}, identity(41))
    code = f"from launcher.checkpoint.snapshot import read_snapshot; print(read_snapshot({slot}).identity.step)"
    done = subprocess.run(
        [sys.executable, "-c", code], pass_fds=[slot], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "41"


@pytest.mark.parametrize("num_files", [0, 1, 5_000])
def test_an_index_of_any_size_is_kept(slot: int, num_files: int) -> None:
    files = {f"folder-{n % 7}/file-{n}-{'x' * 100}": str(n).encode() for n in range(num_files)}
    sealed = write(slot, files, identity(1))
    found = read_snapshot(slot)
    assert found == sealed
    assert len(sealed.files) == num_files
    assert verify_snapshot(slot, sealed) == ""


def test_whatever_has_a_buffer_is_written_as_its_bytes_in_order(slot: int) -> None:
    grid = memoryview(bytes(range(24))).cast("B", (2, 3, 4))
    buffers = {
        "bytes": b"abc",
        "bytearray": bytearray(b"abc"),
        "nothing": b"",
        "floats": array("d", [1.0, 2.0]),
        "several dimensions": grid,
        "several dimensions of another type": memoryview(bytes(64)).cast("f", (4, 4)),
        "every second": memoryview(bytes(range(100)))[::2],
        "backwards": memoryview(array("i", range(50)))[::-1],
        "a foreign format": (ctypes.c_float * 3)(1, 2, 3),
        "no elements": memoryview(array("f")),
        "large": memoryview(array("q", range(100_000))),
        "large, every second": memoryview(array("q", range(100_000)))[::2],
    }
    writer = SlotWriter(slot)
    for name, data in buffers.items():
        with writer.open(name) as stream:
            assert stream.write(data) == memoryview(data).nbytes
            assert stream.tell() == memoryview(data).nbytes
    found = writer.seal(identity(1), {})
    assert {entry.name: content(slot, entry) for entry in found.files} == {
        name: memoryview(data).tobytes() for name, data in buffers.items()
    }
    assert verify_snapshot(slot, found) == ""


def test_small_and_large_writes_keep_their_order(slot: int) -> None:
    pieces = [bytes([n % 251]) * size for n, size in enumerate([1, 70_000, 3, 3, 65_536, 65_535, 2_000_000, 1] * 30)]
    writer = SlotWriter(slot)
    with writer.open("a") as stream:
        for number, piece in enumerate(pieces):
            stream.write(piece)
            if number % 17 == 0:
                stream.flush()
            assert stream.tell() == sum(map(len, pieces[: number + 1]))
    found = writer.seal(identity(1), {})
    assert content(slot, found.files[0]) == b"".join(pieces)
    assert found.files[0].record == FileRecord(sum(map(len, pieces)), xxhash.xxh3_128_hexdigest(b"".join(pieces)))


def test_a_write_that_the_kernel_takes_in_parts_is_carried_on(slot: int, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: whole(fd, data[:10_007], offset))
    data = os.urandom(300_000)
    found = write(slot, {"a": data}, identity(1))
    assert content(slot, found.files[0]) == data
    assert read_snapshot(slot) == found


def test_a_file_that_was_not_finished_keeps_the_slot_unsealed(slot: int) -> None:
    write(slot, {"a": b"1"}, identity(1))
    writer = SlotWriter(slot)
    with pytest.raises(TypeError), writer.open("a") as stream:
        stream.write("text has no buffer")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="a is not finished"):
        writer.open("b")
    with pytest.raises(ValueError, match="a is not finished"):
        writer.seal(identity(2), {})
    with pytest.raises(ValueError, match="closed"):
        stream.write(b"more")
    assert read_snapshot(slot) is None


def test_a_writer_takes_one_file_at_a_time_and_nothing_after_the_seal(slot: int) -> None:
    writer = SlotWriter(slot)
    with writer.open("a"), pytest.raises(ValueError, match="a is not finished"):
        writer.open("b")
    with pytest.raises(ValueError, match="in this snapshot already"):
        writer.open("a")
    sealed = writer.seal(identity(1), {})
    with pytest.raises(ValueError, match="sealed"):
        writer.open("b")
    with pytest.raises(ValueError, match="sealed"):
        writer.seal(identity(2), {})
    assert read_snapshot(slot) == sealed


def test_a_note_that_is_not_json_keeps_the_slot_unsealed(slot: int) -> None:
    for note in ({"a": object()}, {"a": float("nan")}):
        with pytest.raises((TypeError, ValueError)):
            write(slot, {"a": b"1"}, identity(1), note)
        assert read_snapshot(slot) is None


@pytest.mark.parametrize(
    "name", ["", ".", "/a", "../a", "a/../../b", "a//b", "./a", "a/", "a\0b", "MANIFEST.json", ".."]
)
def test_a_name_that_leads_out_of_the_folder_is_refused(slot: int, name: str) -> None:
    with pytest.raises(ValueError):
        SlotWriter(slot).open(name)


def test_an_index_with_a_name_that_leads_out_of_the_folder_reads_as_nothing(slot: int) -> None:
    write(slot, {"xx/a": b"1"}, identity(1))
    _change_index(slot, b'"xx/a"', b'"../a"')
    assert read_snapshot(slot) is None


def test_an_index_that_lacks_something_reads_as_nothing_although_its_hashes_agree(slot: int) -> None:
    sealed = write(slot, {"a": b"1"}, identity(1))
    for old, new in ((b'"files"', b'"filez"'), (b'"world_size"', b'"world_sise"'), (b'"note": {}', b'"note": []')):
        write(slot, {"a": b"1"}, identity(1))
        _change_index(slot, old, new)
        assert read_snapshot(slot) is None, old
    assert write(slot, {"a": b"1"}, identity(1)) == sealed == read_snapshot(slot)


def test_every_flipped_bit_of_the_header_and_the_index_is_noticed(slot: int) -> None:
    sealed = write(slot, {"a": os.urandom(5_000), "b": b"b"}, identity(3), {"x": [1, 2]})
    index_offset, index_bytes = struct.unpack_from("<QQ", os.pread(slot, HEADER_BYTES, 0), 24)
    for position in [*range(HEADER_BYTES), *range(index_offset, index_offset + index_bytes)]:
        (byte,) = os.pread(slot, 1, position)
        for bit in range(8):
            os.pwrite(slot, bytes([byte ^ (1 << bit)]), position)
            assert read_snapshot(slot) is None, (position, bit)
        os.pwrite(slot, bytes([byte]), position)
    assert read_snapshot(slot) == sealed


def test_a_flipped_bit_of_a_file_is_noticed_and_the_file_named(slot: int) -> None:
    sealed = write(slot, {"a": os.urandom(9_000_000), "b": os.urandom(10), "c": b""}, identity(3))
    first, second, _ = sealed.files
    for entry, position in ((first, 0), (first, 4_194_304), (first, 8_999_999), (second, 9)):
        (byte,) = os.pread(slot, 1, entry.offset + position)
        os.pwrite(slot, bytes([byte ^ 1]), entry.offset + position)
        assert read_snapshot(slot) == sealed
        assert verify_snapshot(slot, sealed).startswith(f"{entry.name} does not have the content")
        os.pwrite(slot, bytes([byte]), entry.offset + position)
    assert verify_snapshot(slot, sealed) == ""


@pytest.mark.parametrize("kept_bytes", [0, 7, 8, 40, HEADER_BYTES - 1, HEADER_BYTES, 4096, 5_000, 100_000])
def test_a_slot_that_was_cut_short_is_no_snapshot(slot: int, kept_bytes: int) -> None:
    sealed = write(slot, {"a": bytes(200_000)}, identity(3))
    os.ftruncate(slot, kept_bytes)
    assert read_snapshot(slot) is None
    assert "200000 were written" in verify_snapshot(slot, sealed)
    with memory(1) as (target,), pytest.raises(OSError, match="too early"):
        copy_file(slot, sealed.files[0], target)


def test_a_file_is_copied_to_memory_and_to_disk(slot: int, tmp_path: Path) -> None:
    files = {"a": os.urandom(70_000_000), "b": b"", "c": b"c"}
    for entry in write(slot, files, identity(3)).files:
        with memory(1) as (target,):
            copy_file(slot, entry, target)
            assert Path(f"/proc/self/fd/{target}").read_bytes() == files[entry.name]
        with (tmp_path / entry.name).open("wb", buffering=0) as stream:
            copy_file(slot, entry, stream.fileno())
        assert (tmp_path / entry.name).read_bytes() == files[entry.name]


def test_copying_and_verifying_end_when_nobody_wants_the_result(slot: int) -> None:
    sealed = write(slot, {"a": b"1"}, identity(3))
    with pytest.raises(Cancelled):
        verify_snapshot(slot, sealed, lambda: True)
    with memory(1) as (target,), pytest.raises(Cancelled):
        copy_file(slot, sealed.files[0], target, lambda: True)


def test_memory_stays_what_the_largest_snapshot_needed_over_2000_saves() -> None:
    sizes = [1_000, 1_500_000, 70_000, 0, 400_000]
    data = os.urandom(max(sizes))
    with memory() as fds:
        after_first: tuple[list[int], int] | None = None
        for step in range(2_000):
            files = {f"file-{n}": memoryview(data)[: sizes[(step + n) % len(sizes)]] for n in range(2)}
            write(fds[step % 3], files, identity(step))  # type: ignore[arg-type]
            if step == 20:
                after_first = [os.fstat(fd).st_blocks for fd in fds], _resident_bytes()
        assert after_first is not None
        assert [os.fstat(fd).st_blocks for fd in fds] == after_first[0]
        assert all(os.fstat(fd).st_size < 2_000_000 for fd in fds)
        assert _resident_bytes() - after_first[1] < 4_000_000


@pytest.mark.slow
def test_a_rank_killed_at_any_moment_leaves_the_last_snapshot_that_it_reported() -> None:
    """A child writes snapshots as fast as it can and is killed, again and again, with the same slots."""
    chance = random.Random(4)
    reported, num_torn = -1, 0
    with memory() as fds:
        for _ in range(200):
            said = _save_until_killed(fds, chance)
            reported = reported if said is None else said
            whole = {fd: snapshot for fd in fds if (snapshot := read_snapshot(fd)) is not None}
            for fd, snapshot in whole.items():
                assert verify_snapshot(fd, snapshot) == ""
                assert content(fd, snapshot.files[0])[:8] == struct.pack("<q", snapshot.identity.step)
            newest = max((snapshot.identity.step for snapshot in whole.values()), default=-1)
            assert newest in (reported, reported + 1)  # +1: sealed, and killed before it was said
            num_torn += reported > 3 and len(whole) < len(fds)
            reported = newest
    assert num_torn > 20, "the kills have not met the writing"


@pytest.mark.slow
@pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed")
def test_torch_saves_into_a_slot_what_it_would_save_into_a_file(tmp_path: Path) -> None:
    code = """
import io, sys, torch
from launcher.checkpoint.snapshot import *
from launcher.checkpoint.snapshot import create_memory
slot, target = create_memory("slot"), create_memory("copy")
types = (torch.float32, torch.bfloat16)
state = {f"layer.{n}": torch.randn(1 + 1000 * (n % 5), 3).to(types[n % 2]) for n in range(200)}
state |= {"large": torch.randn(3_000_000), "none": torch.empty(0, 4), "step": 3, "view": torch.arange(10)[2:5]}
for number, crc in enumerate((True, False)):
    torch.serialization.set_crc32_options(crc)
    for legacy in (False, True):
        save = lambda to: torch.save(state, to, _use_new_zipfile_serialization=not legacy)
        writer = SlotWriter(slot)
        with writer.open("state.pt") as stream:
            save(stream)
        with writer.open("large.bin") as stream:
            stream.write(state["large"].numpy())
        with writer.open("columns.bin") as stream:
            stream.write(state["layer.2"].numpy().T)
        sealed = writer.seal(SnapshotIdentity("r", "c", 1, number, 0, 1), {})
        assert verify_snapshot(slot, sealed) == ""
        plain = io.BytesIO()
        save(plain)
        assert sealed.files[0].record.size_bytes == len(plain.getvalue())
        assert sealed.files[2].record.size_bytes == state["layer.2"].nbytes
        import os
        os.ftruncate(target, 0), os.lseek(target, 0, 0)
        copy_file(slot, sealed.files[0], target)
        for options in ({}, {} if legacy else {"mmap": True}):
            loaded = torch.load(f"/proc/self/fd/{target}", weights_only=True, **options)
            assert loaded.keys() == state.keys()
            assert all(torch.equal(torch.as_tensor(loaded[key]), torch.as_tensor(state[key])) for key in state)
print("equal")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=180)
    assert done.stdout.strip() == "equal", done.stderr


def _change_index(fd: int, old: bytes, new: bytes) -> None:
    """With hashes that agree: as somebody else's program would write it."""
    start = os.pread(fd, HEADER_BYTES, 0)
    offset, size_bytes = struct.unpack_from("<QQ", start, 24)
    index = os.pread(fd, size_bytes, offset)
    assert old in index
    changed = index.replace(old, new)
    os.pwrite(fd, changed, offset)
    header = start[8:32] + struct.pack("<Q", len(changed)) + xxhash.xxh3_128_digest(changed)
    os.pwrite(fd, header + xxhash.xxh3_128_digest(header), 8)


def _resident_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.split("VmRSS:")[1].split()[0])


def _save_until_killed(fds: list[int], chance: random.Random) -> int | None:
    """Fork a rank that goes on after the newest snapshot, and kill it a moment after it has reported some; returns the
    last step that it reported."""
    reads, writes = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            _save_for_ever(fds, writes)
        finally:
            os._exit(1)
    os.close(writes)
    said = b"".join(os.read(reads, 8) for _ in range(chance.randrange(3)))
    time.sleep(chance.uniform(0, 0.003))
    os.kill(pid, signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    with os.fdopen(reads, "rb") as stream:
        said += stream.read()
    return struct.unpack("<q", said[-8:])[0] if said else None


def _save_for_ever(fds: list[int], report_to: int) -> None:
    snapshots: list[Snapshot | None] = [read_snapshot(fd) for fd in fds]
    step = max((snapshot.identity.step for snapshot in snapshots if snapshot), default=-1)
    while True:
        step += 1
        slot = slot_to_write(snapshots, generation=1)
        assert slot is not None
        files = {"a": struct.pack("<q", step) * 20_000, "b": bytes(step % 100_000), "c": b"c"}
        snapshots[slot] = write(fds[slot], files, identity(step))
        os.write(report_to, struct.pack("<q", step))


@pytest.mark.parametrize(("flag_known", "expected"), [(True, 0o666), (False, 0o777)])
def test_memory_cannot_be_executed_where_the_kernel_knows_that(
    monkeypatch: pytest.MonkeyPatch, flag_known: bool, expected: int
) -> None:
    real = os.memfd_create

    def memfd_create(name: str, flags: int) -> int:
        if not flag_known and flags & 0x0008:
            raise OSError(22, "Invalid argument")
        return real(name, flags)

    monkeypatch.setattr(os, "memfd_create", memfd_create)
    fd = create_memory("ftlaunch-test")
    try:
        assert not os.get_inheritable(fd)
        if not flag_known:
            assert os.fstat(fd).st_mode & 0o777 == expected
    finally:
        os.close(fd)
