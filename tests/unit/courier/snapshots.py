"""Slots with snapshots in them, as the ranks of a training leave them, but small or of any size."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from launcher.checkpoint.manifest import FileRecord, Manifest
from launcher.checkpoint.snapshot import SlotWriter, SnapshotIdentity, read_snapshot
from tests.unit.checkpoint.checkpoint_folders import IDENTITY, state_files

Slot = tuple[SnapshotIdentity, int]
BLOCK_BYTES = 1 << 20


def identity_of(step: int, rank: int, world_size: int = 2, generation: int = 1) -> SnapshotIdentity:
    return SnapshotIdentity("feedface", "0123456789abcdef", generation, step, rank, world_size)


def fill_slot(identity: SnapshotIdentity, files: Mapping[str, bytes | int], fd: int | None = None) -> Slot:
    """A new slot, or `fd`. Files are given by content, or by size in bytes (then of random bytes)."""
    fd = os.memfd_create("slot") if fd is None else fd
    writer = SlotWriter(fd)
    for name, content in files.items():
        with writer.open(name) as stream:
            if isinstance(content, bytes):
                stream.write(content)
                continue
            while stream.tell() < content:
                stream.write(os.urandom(min(BLOCK_BYTES, content - stream.tell())))
    writer.seal(identity, {"samples_seen": identity.step * 8})
    return identity, fd


def files_of_rank(step: int, rank: int, world_size: int = 2) -> dict[str, bytes]:
    """Each rank its own optimizer shard and random state, rank 0 all that there is once."""

    def owner(name: str) -> int:
        owners = [r for r in range(world_size) if f"rank_{r}_" in name or f"rng_state_{r}." in name]
        return owners[0] if owners else 0

    return {name: content for name, content in state_files(step, world_size).items() if owner(name) == rank}


def slots_of_step(
    step: int, world_size: int = 2, *, generation: int = 1, ballast_bytes: int = 0, ranks: Sequence[int] | None = None
) -> list[Slot]:
    """`ballast_bytes`: of a further file of each rank."""
    slots = []
    for rank in range(world_size) if ranks is None else ranks:
        files: dict[str, bytes | int] = dict(files_of_rank(step, rank, world_size))
        if ballast_bytes:
            files[f"ballast_{rank}.bin"] = ballast_bytes
        slots.append(fill_slot(identity_of(step, rank, world_size, generation), files))
    return slots


def damage(slot: Slot, name: str) -> None:
    """One bit of a file is another one."""
    snapshot = read_snapshot(slot[1])
    assert snapshot is not None
    entry = next(entry for entry in snapshot.files if entry.name == name)
    at = entry.offset + entry.record.size_bytes // 2
    os.pwrite(slot[1], bytes([os.pread(slot[1], 1, at)[0] ^ 1]), at)


def manifest_for(files: Mapping[str, FileRecord], step: int, world_size: int = 2) -> Manifest:
    return Manifest(
        step=step,
        world_size=world_size,
        num_nodes=1,
        precision="bf16",
        run_id="feedface",
        config_sha="0123456789abcdef",
        identity=IDENTITY,
        samples_seen=step * 8,
        versions={"torch": "2.11"},
        files=files,
        global_batch_size=8,
    )
