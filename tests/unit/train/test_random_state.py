"""Random states that a rank keeps, and those that it begins with where it has no predecessor."""

from __future__ import annotations

import random

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import numpy as np  # noqa: E402

from launcher.train.random_state import random_state_kept, seed_anew  # noqa: E402


def draws() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def test_new_states_repeat_and_differ_in_everything_that_they_are_made_of() -> None:
    places = [(42, 10, 3, 0), (42, 10, 3, 1), (42, 10, 4, 1), (42, 11, 3, 1), (43, 10, 3, 1), (-1, 10, 3, 1)]
    found = []
    for place in places:
        seed_anew(*place)
        found.append(draws())
        draws()
        seed_anew(*place)
        assert draws() == found[-1]
    for of_one_library in zip(*found, strict=True):
        assert len(set(of_one_library)) == len(places)


def test_what_is_drawn_meanwhile_is_not_noticed_afterwards() -> None:
    seed_anew(1, 2, 3, 0)
    expected = draws()
    seed_anew(1, 2, 3, 0)
    with random_state_kept():
        draws()
    assert draws() == expected
