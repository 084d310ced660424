from __future__ import annotations

import pytest

from launcher.checkpoint.slots import slot_to_write
from launcher.checkpoint.snapshot import Snapshot
from tests.unit.checkpoint.snapshots import identity


def at(step: int, generation: int = 1) -> Snapshot:
    return Snapshot(identity(step, generation=generation), (), {})


def test_empty_slots_come_first_then_the_oldest() -> None:
    slots: list[Snapshot | None] = [None, None, None]
    taken = []
    for step in range(1, 8):
        slot = slot_to_write(slots, generation=1)
        assert slot is not None
        slots[slot] = at(step)
        taken.append(slot)
    assert taken == [0, 1, 2, 0, 1, 2, 0]


@pytest.mark.parametrize(
    ("snapshots", "keep", "held", "expected"),
    [
        # Generation 2 has resumed from step 10: rank 0 had got one further, its neighbour had not.
        ([at(10), at(11), at(9)], {10}, set(), 1),
        ([at(10), at(11, 2), at(9)], {10}, set(), 2),
        ([at(10), at(11, 2), at(12, 2)], {10}, set(), 1),  # until the caller says that step 11 is whole everywhere
        ([at(10), at(11, 2), at(12, 2)], set(), set(), 0),
        # It has resumed from step 4, on disk: none of what is left in memory has come to be.
        ([at(10), at(11), at(9)], {4}, set(), 2),
        ([at(10), at(5, 2), at(11)], {4}, set(), 0),
        ([at(6, 2), at(5, 2), at(11)], {4}, set(), 2),
        # Or from step 0.
        ([at(1, 2), at(7), at(8)], set(), set(), 1),
        # The courier reads.
        ([at(10), at(11), at(12)], set(), {0}, 1),
        ([at(10), at(11), at(12)], {10}, {1}, 2),
        ([None, at(11), at(12)], set(), {0}, 1),
        ([at(10), at(11), at(12)], {12}, {0, 1}, None),
        ([at(10), at(11), at(12)], set(), {0, 1, 2}, None),
    ],
)
def test_what_is_the_least_loss_is_written_over(
    snapshots: list[Snapshot | None], keep: set[int], held: set[int], expected: int | None
) -> None:
    generation = 2 if any(s and s.identity.generation == 2 for s in snapshots) or keep else 1
    assert slot_to_write(snapshots, generation=generation, keep=keep, held=held) == expected
