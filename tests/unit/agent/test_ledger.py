"""What a run has done, counted over all its attempts."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import pytest

from launcher.agent.ledger import Progress, SampleCount, count_samples, effective_samples, read_samples, samples_path
from launcher.data.order import GHOST, SampleOrder

Given = tuple[int, int, int, list[int]]


def records(*given: Given) -> list[dict[str, object]]:
    """(generation, rank, step, ids)"""
    return [{"gen": gen, "rank": rank, "step": step, "ids": ids} for gen, rank, step, ids in given]


def count(given: Iterable[Given], steps_per_epoch: int, up_to_step: int | None = None) -> SampleCount:
    return count_samples(effective_samples(records(*given), up_to_step=up_to_step), steps_per_epoch)


def epochs(num_epochs: int, *, num_samples: int = 10, first_step: int = 1) -> list[Given]:
    """What two ranks record over whole epochs in one generation."""
    order = SampleOrder(num_samples, 2, 2, 4, seed=3)
    step, given = first_step, []
    for epoch in range(num_epochs):
        permutation = order.permutation(epoch)
        for index in range(order.num_batches):
            for rank in range(2):
                ids = [s for s in order.batch(permutation, index, rank) if s != GHOST]
                given.append((1, rank, step, ids))
            step += 1
    return given


def test_a_run_without_faults() -> None:
    assert count(epochs(1), 3) == SampleCount(seen=10, twice=0)
    assert count(epochs(3), 3) == SampleCount(seen=30, twice=0), "the same sample in another epoch is not twice"
    assert count([], 3) == SampleCount(0, 0)


def test_all_ranks_of_a_step_are_put_together() -> None:
    assert effective_samples(records((1, 0, 1, [4, 5]), (1, 1, 1, [6]), (1, 0, 2, [7]))) == {1: [4, 5, 6], 2: [7]}


def test_a_step_that_was_done_again_counts_once_as_the_weights_know_it() -> None:
    given = [(1, 0, 1, [0, 1]), (1, 0, 2, [2, 3]), (1, 0, 3, [4, 5]), (2, 0, 2, [2, 3]), (2, 0, 3, [4, 5])]
    assert count(given, 3) == SampleCount(seen=6, twice=0)


def test_the_latest_time_counts_whatever_the_order_of_the_records() -> None:
    given = [(2, 0, 2, [8, 9]), (1, 0, 1, [0, 1]), (1, 0, 2, [2, 3])]
    assert effective_samples(records(*given)) == {1: [0, 1], 2: [8, 9]}


def test_a_rank_that_died_within_the_step_adds_nothing_to_its_repetition() -> None:
    given = [(1, 0, 1, [0, 1]), (1, 0, 2, [2]), (2, 0, 2, [2]), (2, 1, 2, [3])]
    assert effective_samples(records(*given)) == {1: [0, 1], 2: [2, 3]}


def test_steps_beyond_the_last_checkpoint_can_be_left_out() -> None:
    given = epochs(1)
    assert count(given, 3, up_to_step=2) == SampleCount(seen=8, twice=0)


def test_a_long_step_in_several_messages_is_one_step() -> None:
    assert effective_samples(records((1, 0, 1, [0, 1]), (1, 0, 1, [2, 3]))) == {1: [0, 1, 2, 3]}


def test_a_sample_given_twice_in_an_epoch_is_found() -> None:
    assert count([(1, 0, 1, [0, 1]), (1, 0, 2, [1, 2])], 10).twice == 1
    assert count([(1, 0, 1, [0, 0])], 10).twice == 1
    assert count([(1, 0, 1, [0]), (1, 1, 1, [0])], 10).twice == 1, "by two ranks"
    assert count([(1, 0, 1, [0, 0]), (1, 0, 2, [0])], 10).twice == 2


def test_a_resume_one_step_too_early_shows_as_twice() -> None:
    given = [(1, 0, 1, [0, 1]), (1, 0, 2, [2, 3]), (2, 0, 3, [2, 3]), (2, 0, 4, [4, 5])]
    assert count(given, 30) == SampleCount(seen=6, twice=2)


def test_a_lost_sample_shows_as_one_fewer_seen() -> None:
    given = [(gen, rank, step, [s for s in ids if s != 7]) for gen, rank, step, ids in epochs(1)]
    assert count(given, 3) == SampleCount(seen=9, twice=0)


def test_a_lost_sample_does_not_make_the_next_epoch_look_doubled() -> None:
    first, second = epochs(1), epochs(1, first_step=4)
    given = [(gen, rank, step, [s for s in ids if s != 7]) for gen, rank, step, ids in first] + second
    assert count(given, 3) == SampleCount(seen=19, twice=0)


def test_a_doubled_sample_does_not_hide_in_the_next_epoch() -> None:
    """In place of sample 7 sample 1 was given again: as many were seen as planned, and yet it is found."""
    first, second = epochs(1), epochs(1, first_step=4)
    doubled = [(gen, rank, step, [1 if s == 7 else s for s in ids]) for gen, rank, step, ids in first]
    counted = count(doubled + second, 3)
    assert counted.seen == 19, "sample 7 is missing"
    assert counted.twice >= 1


def test_samples_of_all_nodes_are_read_and_a_cut_off_line_is_left_out(tmp_path: Path) -> None:
    for node, step in (("n0", 1), ("n1", 2)):
        path = samples_path(tmp_path, node)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"gen": 1, "rank": 0, "step": step, "ids": [step]}) + '\n{"gen": 1, "ra')
    assert [record["step"] for record in read_samples(tmp_path)] == [1, 2]
    assert read_samples(tmp_path / "elsewhere") == []


# -- progress of one start ---------------------------------------------------------------------------------------------


def attempt(progress: Progress, steps: Iterable[int], now_s: float, step_s: float = 1.0) -> float:
    progress.attempt_begins()
    for step in steps:
        now_s += step_s
        progress.step(step, now_s)
    return now_s


def test_steps_done_again_are_counted_once_each() -> None:
    progress = Progress(started_at_s=0.0)
    now = attempt(progress, range(1, 9), 0.0)
    attempt(progress, range(6, 13), now)
    assert (progress.best_step, progress.steps_done) == (12, 15)
    assert progress.redone(0) == 3


def test_a_resumed_start_has_redone_nothing() -> None:
    progress = Progress(started_at_s=0.0, best_step=100)
    attempt(progress, range(101, 111), 0.0)
    assert progress.redone(100) == 0


def test_goodput_is_the_share_of_time_in_new_steps() -> None:
    progress = Progress(started_at_s=0.0)
    now = attempt(progress, range(1, 11), 10.0)  # 10 s of starting, then 10 steps of 1 s
    assert progress.goodput(now) == pytest.approx(9 / 20)
    now = attempt(progress, range(6, 11), now + 5.0)  # nothing new
    assert progress.goodput(now) == pytest.approx(9 / 30)
    assert Progress(started_at_s=5.0).goodput(5.0) == 0.0


def test_the_pause_between_two_attempts_is_no_step_time() -> None:
    progress = Progress(started_at_s=0.0)
    assert progress.seconds_per_step() is None
    now = attempt(progress, range(1, 5), 0.0, step_s=2.0)
    attempt(progress, range(5, 9), now + 600.0, step_s=2.0)
    assert progress.seconds_per_step() == pytest.approx(2.0)


def test_first_and_last_loss() -> None:
    progress = Progress(started_at_s=0.0)
    for loss in (3.0, 0.0, 1.5):
        progress.log(loss)
    assert (progress.first_loss, progress.last_loss) == (3.0, 1.5)
