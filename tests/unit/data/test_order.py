"""Every sample exactly once an epoch, in an order that the number of ranks does not change."""

from __future__ import annotations

import random
import subprocess
import sys
from itertools import product

import pytest

from launcher.data.order import GHOST, SampleOrder

_RANDOM = random.Random(20261130)
# samples, batch size, ranks, global batch
SHAPES = [
    *((n, b, w, b * w * a) for n, b, w, a in product((1, 2, 7, 8, 9, 64), (1, 2, 3), (1, 2, 4), (1, 3))),
    *product((1, 7, 64, 65), (1, 2, 3), (1, 2, 3, 7), (1, 4, 6, 12)),
    *(
        (_RANDOM.randint(1, 3000), _RANDOM.randint(1, 33), _RANDOM.randint(1, 17), _RANDOM.randint(1, 500))
        for _ in range(200)
    ),
]
FROZEN = [[2, 4, 5, 0, 9, 8, 1, 7, 3, 6], [7, 1, 4, 9, 8, 3, 5, 0, 2, 6]]  # seed 42, epochs 0 and 1


def ranks_batches(order: SampleOrder, epoch: int) -> list[list[list[int]]]:
    """[global micro-batch][rank] -> sample indices."""
    permutation = order.permutation(epoch)
    return [[order.batch(permutation, i, r) for r in range(order.world_size)] for i in range(order.num_batches)]


def steps(order: SampleOrder, epoch: int) -> list[list[int]]:
    """The places of each optimizer step in order, cut as the Trainer cuts an epoch: `accumulation` micro-batches each,
    the last step with what is left."""
    batches = [[s for part in batch for s in part] for batch in ranks_batches(order, epoch)]
    a = order.accumulation
    return [[s for batch in batches[i : i + a] for s in batch] for i in range(0, len(batches), a)]


def sequence(order: SampleOrder, epoch: int) -> list[int]:
    """The samples of an epoch in the order in which all ranks together are given them."""
    return [s for step in steps(order, epoch) for s in step if s != GHOST]


def test_every_sample_exactly_once_whatever_the_shape() -> None:
    for shape in SHAPES:
        order = SampleOrder(*shape, seed=3)
        for epoch in (0, 1):
            assert sorted(sequence(order, epoch)) == list(range(order.num_samples)), shape


def test_all_batches_have_the_same_shape_and_ghosts_stand_only_at_the_end_of_a_step() -> None:
    for shape in SHAPES:
        order = SampleOrder(*shape, seed=3)
        batches = ranks_batches(order, 0)
        assert all(len(part) == order.batch_size for batch in batches for part in batch)
        for step in steps(order, 0):
            num_real = sum(s != GHOST for s in step)
            assert all(s != GHOST for s in step[:num_real]), shape
            assert len(step) - num_real < order.places_per_batch, f"{shape}: a micro-batch of ghosts alone"


def test_a_step_holds_the_same_samples_whatever_the_ranks_and_the_batch_size() -> None:
    """Among others 6 ranks for a global batch of 8: two of them have nothing to do."""
    for num_samples, global_batch in [(100, 8), (64, 8), (1, 8), (1001, 12), (5, 1)]:
        for epoch in (0, 3):
            splits = [(1, 1), (8, 1), (1, 8), (2, 4), (2, 2), (2, 3), (1, 6), (3, 5), (16, 2)]
            given = [steps(SampleOrder(num_samples, b, w, global_batch, seed=1), epoch) for b, w in splits]
            expected = [[s for s in step if s != GHOST] for step in given[0]]
            assert len(expected) == -(-num_samples // global_batch)
            assert all([[s for s in step if s != GHOST] for step in one] == expected for one in given)


def test_the_sequence_is_the_permutation_itself() -> None:
    """So that earlier versions, which knew no global batch, have given out the same at full size."""
    for shape in SHAPES[::7]:
        order = SampleOrder(*shape, seed=11)
        assert sequence(order, 2) == order.permutation(2).tolist()


def test_at_full_size_there_are_ghosts_only_at_the_end_of_the_epoch() -> None:
    order = SampleOrder(61, 2, 2, 12, seed=1)
    assert (order.accumulation, order.steps_per_epoch, order.num_batches) == (3, 6, 16)
    places = [s for step in steps(order, 0) for s in step]
    assert places.index(GHOST) == 61


def test_samples_after_a_step_are_those_that_were_given_out() -> None:
    for shape in SHAPES[::5]:
        order = SampleOrder(*shape, seed=3)
        done = [len([s for s in step if s != GHOST]) for epoch in (0, 1) for step in steps(order, epoch)]
        assert [order.samples_after(step) for step in range(len(done) + 1)] == [
            sum(done[:i]) for i in range(len(done) + 1)
        ]


def test_epochs_and_seeds_differ_and_repeat() -> None:
    order = SampleOrder(100, 4, 2, 8, seed=7)
    assert sequence(order, 0) == sequence(SampleOrder(100, 4, 2, 8, seed=7), 0)
    assert sequence(order, 0) != sequence(order, 1)
    assert sequence(order, 0) != sequence(SampleOrder(100, 4, 2, 8, seed=8), 0)
    assert sequence(order, 0) != list(range(100))


def test_without_shuffle_it_is_the_order_of_the_files() -> None:
    order = SampleOrder(10, 2, 2, 4, seed=7, shuffle=False)
    assert sequence(order, 0) == sequence(order, 3) == list(range(10))


def test_the_order_is_the_same_on_every_machine_and_forever() -> None:
    """A resume on another version of this program, of NumPy or on another CPU must find its place again."""
    assert SampleOrder(10, 1, 1, 1, seed=42).permutation(0).tolist() == FROZEN[0]
    assert SampleOrder(10, 1, 1, 1, seed=42).permutation(1).tolist() == FROZEN[1]


def test_another_process_finds_the_same_order() -> None:
    code = "from launcher.data.order import SampleOrder as S; print(S(50, 1, 1, 1, seed=5).permutation(2).tolist())"
    answer = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONHASHSEED": "1", "PYTHONPATH": ":".join(sys.path)},
    )
    assert answer.stdout.strip() == str(SampleOrder(50, 1, 1, 1, seed=5).permutation(2).tolist())


@pytest.mark.parametrize("seed", [2**32, 2**53 + 1, 2**63, -1])
@pytest.mark.filterwarnings("error")
def test_every_64_bit_seed_is_a_seed_of_its_own(seed: int) -> None:
    """Among others -1, which must not fall together with its neighbours."""
    own = SampleOrder(200, 1, 1, 1, seed=seed).permutation(0).tolist()
    for other in (0, seed - 1, seed + 1):
        assert own != SampleOrder(200, 1, 1, 1, seed=other).permutation(0).tolist()
