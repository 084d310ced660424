"""Snapshots as the ranks of a training leave them, made of small files."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from launcher.checkpoint.manifest import Manifest
from launcher.checkpoint.snapshot import NUM_SLOTS, SlotWriter, Snapshot, SnapshotIdentity, create_memory, read_snapshot
from tests.unit.checkpoint.checkpoint_folders import IDENTITY, state_files

RUN_ID = "feedface"


def identity(step: int, rank: int = 0, world_size: int = 1, generation: int = 1, **fields: Any) -> SnapshotIdentity:
    given = {"run_id": RUN_ID, "config_sha": "0123456789abcdef"} | fields
    return SnapshotIdentity(generation=generation, step=step, rank=rank, world_size=world_size, **given)


def write(
    fd: int, files: Mapping[str, bytes], whose: SnapshotIdentity, note: Mapping[str, Any] | None = None
) -> Snapshot:
    writer = SlotWriter(fd)
    for name, content in files.items():
        with writer.open(name) as stream:
            stream.write(content)
    return writer.seal(whose, note or {})


def files_of(rank: int, step: int, world_size: int) -> dict[str, bytes]:
    """A rank has its random state and its optimizer shard; rank 0 has all that there is one of."""
    others = [f"rng_state_{other}.pth" for other in range(world_size) if other != rank]
    others += [f"global_step{step}/{shard_name(other)}" for other in range(world_size) if other != rank]
    files = {name: content for name, content in state_files(step, world_size).items() if name not in others}
    own = (f"rng_state_{rank}.pth", f"global_step{step}/{shard_name(rank)}")
    return files if rank == 0 else {name: files[name] for name in own}


def shard_name(rank: int) -> str:
    return f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"


def note_of(step: int, world_size: int) -> dict[str, Any]:
    manifest = Manifest(
        step=step,
        world_size=world_size,
        num_nodes=1,
        precision="bf16",
        run_id=RUN_ID,
        config_sha="0123456789abcdef",
        identity=IDENTITY,
        samples_seen=step * 8,
        versions={"torch": "2.11"},
        files={},
    )
    return {key: value for key, value in asdict(manifest).items() if key != "files"}


def save(
    fd: int, step: int, rank: int, world_size: int, generation: int = 1, *, without: Collection[str] = ()
) -> Snapshot:
    """What a rank does after a step."""
    files = {name: content for name, content in files_of(rank, step, world_size).items() if name not in without}
    whose = identity(step, rank, world_size, generation)
    return write(fd, files, whose, note_of(step, world_size) if rank == 0 else {})


def flip_a_byte(fd: int) -> None:
    """The last one of the first file."""
    snapshot = read_snapshot(fd)
    assert snapshot is not None
    entry = snapshot.files[0]
    position = entry.offset + entry.record.size_bytes - 1
    os.pwrite(fd, bytes([os.pread(fd, 1, position)[0] ^ 0x10]), position)


@contextmanager
def memory(count: int = NUM_SLOTS) -> Iterator[list[int]]:
    fds = [create_memory("ftlaunch-test") for _ in range(count)]
    try:
        yield fds
    finally:
        for fd in fds:
            os.close(fd)
