"""What a rank writes is what its agent reads."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from launcher import progress_record
from launcher.progress_record import Phase, Place, ProgressRecord, create_record, read_record


@pytest.fixture
def fd() -> Iterator[int]:
    fd = create_record("test")
    yield fd
    os.close(fd)


class Clock:
    now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(progress_record, "time", clock)
    return clock


def test_every_change_is_seen(fd: int, clock: Clock) -> None:
    assert read_record(fd).at_s == 0.0
    record = ProgressRecord(fd)
    record.resumed(7)
    record.enter(Phase.TRAINING)
    record.micro_batch_begins()
    clock.now_s = 101.0
    record.collective_begins(b"reduce_scatter_tensor", 49152, of_all_ranks=True)
    inside = read_record(fd)
    assert (inside.phase, inside.place, inside.step, inside.micro_batch) == (Phase.TRAINING, Place.INSIDE, 7, 1)
    assert (inside.kind, inside.elements, inside.collectives, inside.at_s) == ("reduce_scatter_tensor", 49152, 1, 101.0)
    record.goes_on()
    record.collective_begins(b"broadcast", 3, of_all_ranks=False)
    outside = read_record(fd)
    assert (outside.place, outside.kind, outside.collectives) == (Place.IN_GROUP, "broadcast", 1)
    assert outside.changes == inside.changes + 2


def test_a_step_is_measured_without_saves_and_evaluations_and_the_first_is_not_trusted(fd: int, clock: Clock) -> None:
    record = ProgressRecord(fd)
    record.enter(Phase.TRAINING)
    for step, took_s in enumerate((40.0, 9.0, 1.0, 1.0, 3.0), start=1):
        clock.now_s += took_s
        record.step_ended(step)
        with record.within(Phase.SAVING):
            clock.now_s += 50.0
        if step < 3:
            assert read_record(fd).longest_step_s == 0.0
    read = read_record(fd)
    assert (read.typical_step_s, read.longest_step_s, read.first_step_s) == (2.0, 9.0, 40.0)
    assert read.phase == Phase.TRAINING


def test_a_rank_without_a_reader_writes_all_the_same() -> None:
    ProgressRecord(None).step_ended(1)
