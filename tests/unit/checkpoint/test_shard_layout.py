"""The state of any number of ranks becomes that of any other, element for element."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from launcher.checkpoint.shard_layout import (
    FlatLayout,
    Groups,
    LayoutMismatch,
    PartitionedLayout,
    ShardLayout,
    transfers,
)

_RANDOM = random.Random(20261130)
ALIGNMENT = 2
Cut = Callable[[Groups, int], ShardLayout]


def flat(groups: Groups, world_size: int) -> FlatLayout:
    return FlatLayout(groups, world_size, ALIGNMENT, [[0] * len(group) for group in groups])


def flat_with_gaps(groups: Groups, world_size: int) -> FlatLayout:
    """As with zero_optimization.parameter_alignment: parameters begin at multiples of 8 elements."""
    paddings = []
    for group in groups:
        offset, of_group = 0, []
        for numel in group.values():
            of_group.append(-(offset + numel) % 8)
            offset += numel + of_group[-1]
        of_group[-1] = 0
        paddings.append(of_group)
    return FlatLayout(groups, world_size, ALIGNMENT, paddings)


CUTS: dict[str, Cut] = {"flat": flat, "flat with gaps": flat_with_gaps, "partitioned": PartitionedLayout}
GROUPS: list[Groups] = [
    [{"a": 1}],
    [{"a": 7, "b": 1, "c": 64}, {"d": 3, "e": 2}],
    [{f"p{i}": _RANDOM.randint(1, 500) for i in range(40)}, {f"q{i}": _RANDOM.randint(1, 9) for i in range(20)}],
]
WORLDS = [1, 2, 3, 4, 7, 16]


def shards_of(layout: ShardLayout) -> list[list[list[str]]]:
    """[rank][group] -> vector; element k of parameter p is "p:k", padding is ""."""
    shards = []
    for rank in range(layout.world_size):
        vectors = [[""] * layout.partition_numel(group) for group in range(len(layout.groups))]
        for name, piece in layout.held_by(rank):
            for k in range(piece.numel):
                assert vectors[piece.group][piece.start + k] == "", "two elements in one place"
                vectors[piece.group][piece.start + k] = f"{name}:{piece.param_start + k}"
        shards.append(vectors)
    return shards


def moved(old: ShardLayout, new: ShardLayout) -> list[list[list[str]]]:
    before = shards_of(old)
    after = []
    for rank in range(new.world_size):
        vectors = [[""] * new.partition_numel(group) for group in range(len(new.groups))]
        for move in transfers(old, new, rank):
            source = before[move.source.rank][move.source.group][move.source.start :][: move.source.numel]
            vectors[move.group][move.start : move.start + move.source.numel] = source
        after.append(vectors)
    return after


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("groups", GROUPS, ids=["one element", "few", "many"])
def test_every_shard_is_what_the_new_ranks_would_have_saved_themselves(cut: str, groups: Groups) -> None:
    for there in WORLDS:
        for here in WORLDS:
            old, new = CUTS[cut](groups, there), CUTS[cut](groups, here)
            assert moved(old, new) == shards_of(new), (there, here)


@pytest.mark.parametrize("cut", CUTS)
def test_every_element_lies_in_exactly_one_place_and_is_found_there(cut: str) -> None:
    for world_size in WORLDS:
        layout = CUTS[cut](GROUPS[2], world_size)
        shards = shards_of(layout)
        held = sorted(element for vectors in shards for vector in vectors for element in vector if element)
        assert held == sorted(f"{n}:{k}" for group in GROUPS[2] for n, numel in group.items() for k in range(numel))
        for group, parameters in enumerate(GROUPS[2]):
            for name, numel in parameters.items():
                found = [
                    shards[p.rank][p.group][p.start + k]
                    for p in layout.pieces(group, name, 0, numel)
                    for k in range(p.numel)
                ]
                assert found == [f"{name}:{k}" for k in range(numel)]


def test_other_groups_and_another_order_of_the_same_parameters() -> None:
    """ZeRO 3 makes sub-groups by the size of a rank's part; round_robin_gradients orders by the number of ranks."""
    few, many = [{"a": 5, "b": 9, "c": 4}], [{"c": 4}, {"b": 9, "a": 5}]
    for cut in CUTS.values():
        assert moved(cut(few, 2), cut(many, 3)) == shards_of(cut(many, 3))


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ([{"a": 5}], "b: 9 elements there, no in the model"),
        ([{"a": 5, "b": 8}], "b: 9 elements there, 8 in the model"),
        ([{"a": 5, "b": 9, "c": 1}], "c: no elements there, 1 in the model"),
    ],
)
def test_another_model_is_named_not_read(model: Groups, said: str) -> None:
    with pytest.raises(LayoutMismatch, match=said):
        transfers(flat([{"a": 5, "b": 9}], 2), flat(model, 2), 0)


def test_sizes_are_deepspeeds() -> None:
    """Hand-made from stage_1_and_2.py and stage3.py: 72 elements over 5 ranks are padded to 80 (2 x 5), or each
    parameter to a multiple of 5."""
    groups = GROUPS[1][:1]
    assert [flat(groups, n).partition_numel(0) for n in (1, 2, 5)] == [72, 36, 16]
    assert PartitionedLayout(groups, 5).partition_numel(0) == 2 + 1 + 13
