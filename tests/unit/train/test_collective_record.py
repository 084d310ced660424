"""Collectives of this process, as its agent sees them: DeepSpeed's way, torch's, and by a name imported before."""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Iterator

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import torch.distributed as dist  # noqa: E402

from launcher.progress_record import Place, ProgressRecord, Reading, create_record, read_record  # noqa: E402
from launcher.train.collective_record import record_collectives  # noqa: E402


class Rank:
    def __init__(self) -> None:
        self.fd = create_record("test")
        self.user = types.ModuleType("user_code")
        self.user.__dict__["all_reduce"] = dist.all_reduce  # from torch.distributed import all_reduce
        sys.modules["user_code"] = self.user
        record_collectives(ProgressRecord(self.fd))

    @property
    def read(self) -> Reading:
        return read_record(self.fd)


@pytest.fixture
def rank(tmp_path: object) -> Iterator[Rank]:
    rank = Rank()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield rank
    dist.destroy_process_group()
    del sys.modules["user_code"]
    os.close(rank.fd)


def test_every_way_is_counted_once(rank: Rank) -> None:
    tensor = torch.ones(6)
    dist.all_reduce(tensor)
    read = rank.read
    assert (read.collectives, read.kind, read.elements, read.place) == (1, "all_reduce", 6, Place.OUTSIDE)
    rank.user.all_reduce(tensor=torch.ones(4))
    assert (rank.read.collectives, rank.read.elements) == (2, 4)
    dist.distributed_c10d.all_gather_into_tensor(torch.ones(6), tensor)  # made of another one
    assert (rank.read.collectives, rank.read.kind) == (3, "all_gather_into_tensor")
    dist.barrier()
    assert (rank.read.collectives, rank.read.kind, rank.read.elements) == (4, "barrier", 0)


def test_the_wait_for_an_asynchronous_one_is_seen(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    work = dist.all_reduce(torch.ones(3), async_op=True)
    before = rank.read
    assert (before.collectives, before.place) == (1, Place.OUTSIDE)
    work.wait()
    assert (rank.read.changes, rank.read.place) == (before.changes + 2, Place.OUTSIDE)


def test_a_group_of_its_own_is_movement_and_no_number(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    group = dist.new_group([0])
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    dist.all_reduce(torch.ones(3), group=group)
    assert (rank.read.collectives, rank.read.kind, rank.read.elements) == (0, "all_reduce", 3)


def test_deepspeed_goes_through_it(rank: Rank) -> None:
    backend = pytest.importorskip("deepspeed.comm.torch", reason="deepspeed is not installed").TorchBackend
    assert backend.get_all_gather_function() is dist.all_gather_into_tensor
    made = backend.__new__(backend)
    made.all_gather_function = backend.get_all_gather_function()
    made.reduce_scatter_function = backend.get_reduce_scatter_function()
    made.all_gather_into_tensor(torch.ones(6), torch.ones(6))
    made.reduce_scatter_tensor(torch.ones(6), torch.ones(6))
    assert rank.read.collectives == 2


def test_an_error_passes_and_leaves_the_rank_outside(rank: Rank) -> None:
    with pytest.raises(Exception, match="tensor"):
        dist.all_reduce(3)
    assert rank.read.place == Place.OUTSIDE
