"""Every sample exactly once an epoch, in an order that the number of ranks does not change."""

from __future__ import annotations

import random
import subprocess
import sys
from itertools import product

import pytest

from launcher.data.order import GHOST, SampleOrder

_RANDOM = random.Random(20261130)
SHAPES = [
    *product((1, 2, 7, 8, 9, 64), (1, 2, 3), (1, 2, 4)),
    *((_RANDOM.randint(1, 3000), _RANDOM.randint(1, 33), _RANDOM.randint(1, 17)) for _ in range(200)),
]
FROZEN = [[2, 4, 5, 0, 9, 8, 1, 7, 3, 6], [7, 1, 4, 9, 8, 3, 5, 0, 2, 6]]  # seed 42, epochs 0 and 1


def ranks_batches(order: SampleOrder, epoch: int) -> list[list[list[int]]]:
    """[global micro-batch][rank] -> sample indices."""
    permutation = order.permutation(epoch)
    return [[order.batch(permutation, i, r) for r in range(order.world_size)] for i in range(order.num_batches)]


def sequence(order: SampleOrder, epoch: int) -> list[int]:
    """The samples of an epoch in the order in which all ranks together are given them."""
    return [s for batch in ranks_batches(order, epoch) for part in batch for s in part if s != GHOST]


def test_every_sample_exactly_once_whatever_the_shape() -> None:
    for num_samples, batch_size, world_size in SHAPES:
        order = SampleOrder(num_samples, batch_size, world_size, seed=3)
        for epoch in (0, 1):
            assert sorted(sequence(order, epoch)) == list(range(num_samples)), (num_samples, batch_size, world_size)


def test_all_batches_have_the_same_shape_and_ghosts_stand_only_at_the_end() -> None:
    for num_samples, batch_size, world_size in SHAPES:
        order = SampleOrder(num_samples, batch_size, world_size, seed=3)
        batches = ranks_batches(order, 0)
        assert all(len(part) == batch_size for batch in batches for part in batch)
        places = [s for batch in batches for part in batch for s in part]
        assert all(s != GHOST for s in places[:num_samples])
        assert all(s == GHOST for s in places[num_samples:])
        assert len(places) - num_samples < order.places_per_batch, "no batch of ghosts alone"


@pytest.mark.parametrize("num_samples", [1, 5, 64, 1001])
def test_the_sequence_does_not_depend_on_ranks_or_batch_size(num_samples: int) -> None:
    for epoch in (0, 1, 5):
        sequences = {
            tuple(sequence(SampleOrder(num_samples, batch, world, seed=11), epoch))
            for batch, world in [(1, 1), (4, 1), (1, 4), (3, 5), (8, 8)]
        }
        assert len(sequences) == 1


def test_a_global_batch_holds_the_same_samples_however_it_is_split() -> None:
    """8 places as 1 x 8, 2 x 4 and 8 x 1: the optimizer sees the same samples at every step."""

    def sets(batch: int, world: int) -> list[set[int]]:
        return [{s for part in b for s in part} for b in ranks_batches(SampleOrder(100, batch, world, seed=1), 0)]

    assert sets(8, 1) == sets(4, 2) == sets(1, 8)


def test_epochs_and_seeds_differ_and_repeat() -> None:
    order = SampleOrder(100, 4, 2, seed=7)
    assert sequence(order, 0) == sequence(SampleOrder(100, 4, 2, seed=7), 0)
    assert sequence(order, 0) != sequence(order, 1)
    assert sequence(order, 0) != sequence(SampleOrder(100, 4, 2, seed=8), 0)
    assert sequence(order, 0) != list(range(100))


def test_without_shuffle_it_is_the_order_of_the_files() -> None:
    order = SampleOrder(10, 2, 2, seed=7, shuffle=False)
    assert sequence(order, 0) == sequence(order, 3) == list(range(10))


def test_the_order_is_the_same_on_every_machine_and_forever() -> None:
    """A resume on another version of this program, of NumPy or on another CPU must find its place again."""
    assert SampleOrder(10, 1, 1, seed=42).permutation(0).tolist() == FROZEN[0]
    assert SampleOrder(10, 1, 1, seed=42).permutation(1).tolist() == FROZEN[1]


def test_another_process_finds_the_same_order() -> None:
    code = "from launcher.data.order import SampleOrder as S; print(S(50, 1, 1, seed=5).permutation(2).tolist())"
    answer = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONHASHSEED": "1", "PYTHONPATH": ":".join(sys.path)},
    )
    assert answer.stdout.strip() == str(SampleOrder(50, 1, 1, seed=5).permutation(2).tolist())


@pytest.mark.parametrize("seed", [2**32, 2**53 + 1, 2**63, -1])
@pytest.mark.filterwarnings("error")
def test_every_64_bit_seed_is_a_seed_of_its_own(seed: int) -> None:
    """Among others -1, which must not fall together with its neighbours."""
    own = SampleOrder(200, 1, 1, seed=seed).permutation(0).tolist()
    for other in (0, seed - 1, seed + 1):
        assert own != SampleOrder(200, 1, 1, seed=other).permutation(0).tolist()
