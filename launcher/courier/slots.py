"""What the agent says lies in a slot, and what does."""

from __future__ import annotations

from launcher.checkpoint.snapshot import Snapshot, SnapshotIdentity, read_snapshot
from launcher.courier.messages import Cause, Failed


def expected_snapshot(fd: int, identity: SnapshotIdentity) -> Snapshot:
    """Raises Failed where the slot holds another snapshot or none."""
    snapshot = read_snapshot(fd)
    if snapshot is None:
        raise Failed(Cause.DAMAGED, f"the slot of rank {identity.rank} holds no whole snapshot of step {identity.step}")
    if snapshot.identity != identity:
        raise Failed(Cause.DAMAGED, f"the slot of rank {identity.rank} holds {snapshot.identity}, not {identity}")
    return snapshot
