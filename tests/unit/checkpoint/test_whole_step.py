from __future__ import annotations

import random

from launcher.checkpoint.snapshot import SnapshotIdentity
from launcher.checkpoint.whole_step import newest_whole_step, whole_steps
from tests.unit.checkpoint.snapshots import identity


def found(*had: SnapshotIdentity) -> list[tuple[int, int]]:
    shuffled = list(had)
    random.Random(1).shuffle(shuffled)
    return [(whole.generation, whole.step) for whole in whole_steps(shuffled)]


def of(generation: int, step: int, world_size: int, *ranks: int) -> list[SnapshotIdentity]:
    return [identity(step, rank, world_size, generation) for rank in ranks]


def test_a_step_is_whole_when_every_rank_has_it() -> None:
    assert found() == []
    assert newest_whole_step([]) is None
    assert found(*of(1, 5, 3, 0, 1)) == []
    assert found(*of(1, 5, 3, 0, 1, 2), *of(1, 6, 3, 0, 2), *of(1, 4, 3, 1, 2)) == [(1, 5)]
    assert found(*of(1, 5, 3, 0, 1, 2), *of(1, 6, 3, 0, 1, 2)) == [(1, 6), (1, 5)]


def test_what_several_nodes_have_counts_together_and_twice_is_once() -> None:
    assert found(*of(1, 5, 4, 0, 1), *of(1, 5, 4, 2, 3)) == [(1, 5)]
    assert found(*of(1, 5, 3, 0, 1), *of(1, 5, 3, 0, 1)) == []
    assert found(*of(1, 5, 2, 0, 1), *of(1, 5, 2, 0, 1)) == [(1, 5)]


def test_ranks_of_two_generations_or_sizes_make_no_whole_together() -> None:
    assert found(*of(1, 5, 2, 0), *of(2, 5, 2, 1)) == []
    assert found(*of(1, 5, 2, 0), *of(1, 5, 3, 1, 2)) == []
    assert found(*of(1, 5, 2, 0, 2)) == []
    assert found(*of(1, 5, 1, 1), *of(1, 5, 0, 0)) == []


def test_ranks_of_two_runs_or_configurations_make_no_whole_together() -> None:
    assert found(identity(5, 0, 2), identity(5, 1, 2, run_id="another")) == []
    assert found(identity(5, 0, 2), identity(5, 1, 2, config_sha="another")) == []


def test_a_later_generation_counts_more_than_a_higher_step() -> None:
    assert found(*of(1, 50, 2, 0, 1), *of(2, 45, 3, 0, 1, 2), *of(2, 46, 3, 0, 1)) == [(2, 45), (1, 50)]
