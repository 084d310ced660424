"""Snapshots through a channel, from slot to slot.

Invariant: a slot is handed on at the far end only when each file has the hash that the sender's index gives, and the
index and every byte came under a good seal.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from launcher.checkpoint.manifest import FileRecord
from launcher.checkpoint.snapshot import (
    FileEntry,
    SlotWriter,
    Snapshot,
    SnapshotIdentity,
    create_memory,
)
from launcher.courier.channel import Channel
from launcher.courier.messages import Cause, Failed

BLOCK_BYTES = 1 << 20

OnBytes = Callable[[int], None]


def send_snapshot(channel: Channel, fd: int, snapshot: Snapshot, on_bytes: OnBytes = lambda num_bytes: None) -> None:
    """Raises Failed."""
    files = [{"name": entry.name, **asdict(entry.record)} for entry in snapshot.files]
    channel.send(identity=asdict(snapshot.identity), files=files, note=dict(snapshot.note))
    buffer = memoryview(bytearray(BLOCK_BYTES))
    for entry in snapshot.files:
        _send_file(channel, fd, entry, buffer, on_bytes)
    channel.send_seal()


def receive_snapshot(
    channel: Channel, identity: SnapshotIdentity, limit_bytes: int, on_bytes: OnBytes = lambda num_bytes: None
) -> int:
    """A new memfd with the snapshot, sealed. `limit_bytes`: of its files.

    Raises Failed where another one comes, or it is not whole; and OSError where the memory is not to be had.
    """
    index = channel.receive()
    records = _records_of(index, identity, channel.who)
    num_bytes = sum(record.size_bytes for record in records.values())
    if num_bytes > limit_bytes:
        raise Failed(Cause.NETWORK, f"{channel.who} sends {num_bytes} bytes, {limit_bytes} were announced")
    fd = create_memory(f"ftlaunch-{identity.run_id}-rank-{identity.rank}-of-another-node")
    try:
        writer = SlotWriter(fd)
        buffer = memoryview(bytearray(BLOCK_BYTES))
        for name, record in records.items():
            _receive_file(channel, writer, name, record, buffer, on_bytes)
        channel.require_seal()
        snapshot = writer.seal(identity, index["note"])
        for entry in snapshot.files:
            if entry.record != records[entry.name]:
                raise Failed(Cause.DAMAGED, f"{entry.name} of rank {identity.rank} is damaged in {channel.who}'s slot")
    except BaseException:
        os.close(fd)
        raise
    return fd


def _send_file(channel: Channel, fd: int, entry: FileEntry, buffer: memoryview, on_bytes: OnBytes) -> None:
    offset, end = entry.offset, entry.offset + entry.record.size_bytes
    while offset < end:
        num_bytes = os.preadv(fd, [buffer[: end - offset]], offset)
        if num_bytes == 0:
            raise Failed(Cause.DAMAGED, f"the slot ends {end - offset} bytes before the end of {entry.name}")
        channel.send_block(buffer[:num_bytes])
        offset += num_bytes
        on_bytes(num_bytes)


def _receive_file(
    channel: Channel, writer: SlotWriter, name: str, record: FileRecord, buffer: memoryview, on_bytes: OnBytes
) -> None:
    left_bytes = record.size_bytes
    with writer.open(name) as stream:
        while left_bytes > 0:
            # Whole blocks: each write is a call into the kernel, and gives up the GIL.
            block = buffer[:left_bytes]
            filled = 0
            while filled < len(block):
                filled += channel.receive_into(block[filled:])
            stream.write(block)
            left_bytes -= filled
            on_bytes(filled)


def _records_of(index: dict[str, Any], identity: SnapshotIdentity, who: str) -> dict[str, FileRecord]:
    try:
        if SnapshotIdentity(**index["identity"]) != identity:
            raise Failed(Cause.NETWORK, f"{who} sends {index['identity']}, not {identity}")
        return {file["name"]: FileRecord(int(file["size_bytes"]), str(file["xxh3_128"])) for file in index["files"]}
    except (KeyError, TypeError, ValueError) as error:
        raise Failed(Cause.NETWORK, f"{who} sends an index that is not understood here: {error!r}") from error
