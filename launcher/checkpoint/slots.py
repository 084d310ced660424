"""Which slot of a rank the next snapshot goes into: a pure function of what lies in them."""

from __future__ import annotations

from collections.abc import Sequence, Set

from launcher.checkpoint.snapshot import Snapshot


def slot_to_write(
    snapshots: Sequence[Snapshot | None], *, generation: int, keep: Set[int] = frozenset(), held: Set[int] = frozenset()
) -> int | None:
    """Index of the slot that is the least loss: an empty one, else the oldest.

    `generation`: the one that writes. `keep`: steps that must stay, such as the one that this generation has resumed
    from until a newer one is whole on all ranks. `held`: slots that somebody still reads (the courier). None where no
    slot is left: then this step has no snapshot.

    What an earlier generation has written above the step that was resumed from belongs to a past that has not come to
    be: it goes before everything that is older by its step.
    """
    resumed_from = max(keep, default=0)

    def worth(slot: int) -> tuple[int, int, int]:
        snapshot = snapshots[slot]
        if snapshot is None:
            return (0, 0, 0)
        identity = snapshot.identity
        if identity.generation < generation and identity.step > resumed_from:
            return (1, identity.generation, identity.step)
        return (2, identity.generation, identity.step)

    def is_free(slot: int) -> bool:
        snapshot = snapshots[slot]
        return slot not in held and (snapshot is None or snapshot.identity.step not in keep)

    return min(filter(is_free, range(len(snapshots))), key=worth, default=None)
