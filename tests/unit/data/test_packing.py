"""Rows of several samples: none lost, none twice, none too long, and the same rows forever."""

from __future__ import annotations

import random
import time

import numpy as np
import pytest

from launcher.data.packing import Packing, pack

_RANDOM = random.Random(20261130)


def rows(packing: Packing) -> list[list[int]]:
    return [packing.row(index).tolist() for index in range(len(packing))]


@pytest.mark.parametrize("num_samples", [1, 2, 7, 100, 1000])
@pytest.mark.parametrize("longest", [1, 5, 64])
def test_every_sample_is_in_one_row_and_no_row_is_too_long(num_samples: int, longest: int) -> None:
    lengths = [_RANDOM.randint(1, longest) for _ in range(num_samples)]
    packing = pack(lengths, 64)
    assert sorted(sample for row in rows(packing) for sample in row) == list(range(num_samples))
    assert all(0 < sum(lengths[sample] for sample in row) <= 64 for row in rows(packing))


def test_the_rows_are_well_filled() -> None:
    lengths = [_RANDOM.randint(10, 700) for _ in range(2000)]
    assert sum(lengths) / (len(pack(lengths, 1024)) * 1024) > 0.98


def test_the_rows_are_the_same_on_every_machine_and_forever() -> None:
    """A resume on another version of this program must find its place again."""
    assert rows(pack([3, 9, 4, 4, 10, 1, 6, 2, 3], 10)) == [[4], [1, 5], [6, 2], [3, 0, 8], [7]]


def test_samples_of_rows_are_counted() -> None:
    packing = pack([3, 9, 4, 4, 10, 1, 6, 2, 3], 10)
    assert packing.num_samples_of(np.array([3, 0])) == 4
    assert packing.num_samples_of(np.array([], dtype=np.int64)) == 0


def test_a_hundred_thousand_samples_take_a_second_or_so() -> None:
    lengths = np.random.default_rng(1).integers(1, 4096, 100_000)
    started = time.monotonic()
    pack(lengths, 4096)
    assert time.monotonic() - started < 10
