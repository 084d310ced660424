"""Batches of a rank: what the Trainer iterates over, from any position."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from launcher.data.batches import (  # noqa: E402
    SAMPLE_KEY,
    Collator,
    PackedDataset,
    RankBatchSampler,
    RankLoader,
    SampleDataset,
)
from launcher.data.encode import EncodedDataset  # noqa: E402
from launcher.data.order import GHOST, SampleOrder  # noqa: E402
from launcher.data.packing import pack  # noqa: E402
from launcher.data.records import IGNORED_LABEL  # noqa: E402

PAD = 99


def encoded(num_samples: int) -> EncodedDataset:
    """Sample i has i % 5 + 1 tokens, all of them 100 + i."""
    parts = [np.full(i % 5 + 1, 100 + i, dtype=np.int32) for i in range(num_samples)]
    offsets = np.concatenate([[0], np.cumsum([len(part) for part in parts])]).astype(np.int64)
    flat = np.concatenate(parts)
    return EncodedDataset(flat, flat.copy(), offsets, 0)


def loader(num_samples: int, batch_size: int, world_size: int, rank: int, **options: Any) -> RankLoader:
    order = SampleOrder(num_samples, batch_size, world_size, batch_size * world_size, seed=5)
    return RankLoader(SampleDataset(encoded(num_samples)), RankBatchSampler(order, rank), Collator(PAD), **options)


def ids(batches: Any) -> list[list[int]]:
    return [batch[SAMPLE_KEY].tolist() for batch in batches]


def test_all_ranks_together_see_every_sample_once() -> None:
    given = [s for rank in range(3) for batch in ids(loader(20, 2, 3, rank)) for s in batch if s != GHOST]
    assert sorted(given) == list(range(20))


def test_every_rank_has_as_many_batches_as_it_says() -> None:
    assert {len(list(loader(20, 2, 3, rank))) for rank in range(3)} == {len(loader(20, 2, 3, 0))} == {4}


@pytest.mark.parametrize("position", [0, 1, 3, 4])
def test_starting_at_a_position_is_the_rest_of_the_same_epoch(position: int) -> None:
    whole = loader(20, 2, 3, 1)
    whole.set_epoch(2)
    rest = whole.starting_at(position)
    assert len(rest) == 4 - position
    assert ids(rest) == ids(whole)[position:]
    assert len(whole) == 4, "later epochs are whole again"


def test_epochs_differ_and_repeat() -> None:
    one = loader(20, 2, 3, 0)
    first = ids(one)
    one.set_epoch(1)
    second = ids(one)
    one.set_epoch(0)
    assert ids(one) == first != second


def test_a_batch_is_padded_to_a_multiple_of_eight() -> None:
    dataset = SampleDataset(encoded(10))
    batch = Collator(PAD)([dataset[3], dataset[1]])
    assert batch["input_ids"].tolist() == [[103] * 4 + [PAD] * 4, [101] * 2 + [PAD] * 6]
    assert batch["labels"].tolist() == [[103] * 4 + [IGNORED_LABEL] * 4, [101] * 2 + [IGNORED_LABEL] * 6]
    assert batch["attention_mask"].tolist() == [[1] * 4 + [0] * 4, [1] * 2 + [0] * 6]
    assert batch[SAMPLE_KEY].tolist() == [3, 1]
    assert {tensor.dtype for tensor in batch.values()} == {torch.long}


def test_a_ghost_has_tokens_but_nothing_to_learn() -> None:
    """Tokens, because a rank without any would leave the others waiting in the collective."""
    dataset = SampleDataset(encoded(10))
    batch = Collator(PAD)([dataset[GHOST]])
    assert batch["attention_mask"].sum() > 0
    assert set(batch["labels"].flatten().tolist()) == {IGNORED_LABEL}
    assert batch[SAMPLE_KEY].tolist() == [GHOST]
    assert dataset[0]["labels"].tolist() == [100], "the sample it borrows from keeps its labels"


def test_a_worker_process_gives_the_same_batches() -> None:
    assert ids(loader(20, 2, 3, 0, num_workers=1)) == ids(loader(20, 2, 3, 0))


def packed_loader(num_samples: int, batch_size: int, world_size: int, rank: int) -> RankLoader:
    """Rows of at most 8 tokens."""
    data = encoded(num_samples)
    packing = pack(np.diff(data.offsets), 8)
    order = SampleOrder(len(packing), batch_size, world_size, batch_size * world_size, seed=5)
    return RankLoader(PackedDataset(data, packing), RankBatchSampler(order, rank), Collator(PAD))


def test_packed_rows_keep_their_samples_apart() -> None:
    """Positions begin anew with each sample, and no sample's first token is learned from the one before."""
    (row,) = pack([3, 2, 1], 8).row(0)[None]
    parts = [np.array([10, 11, 12]), np.array([20, 21]), np.array([30])]
    flat = np.concatenate(parts).astype(np.int32)
    dataset = PackedDataset(EncodedDataset(flat, flat.copy(), np.array([0, 3, 5, 6]), 0), pack([3, 2, 1], 8))
    batch = Collator(PAD)([dataset[0], dataset[GHOST]])
    assert row.tolist() == [0, 1, 2]
    assert batch["input_ids"][0].tolist() == [10, 11, 12, 20, 21, 30, PAD, PAD]
    assert batch["position_ids"][0].tolist() == [0, 1, 2, 0, 1, 0, 0, 1]
    assert batch["labels"][0].tolist() == [
        IGNORED_LABEL,
        11,
        12,
        IGNORED_LABEL,
        21,
        IGNORED_LABEL,
        *[IGNORED_LABEL] * 2,
    ]
    assert batch["position_ids"][1].tolist() == [0, 1, 2, 0, 1, 2, 3, 4]
    assert set(batch["labels"][1].tolist()) == {IGNORED_LABEL}
    assert batch[SAMPLE_KEY].tolist() == [0, 1, 2, GHOST]
    assert "attention_mask" not in batch
    assert flat.tolist() == dataset.encoded.labels.tolist(), "the samples themselves are not changed"


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_packed_samples_are_given_out_once_and_counted(world_size: int) -> None:
    ranks = [packed_loader(40, 1, world_size, rank) for rank in range(world_size)]
    seen = 0
    for step, batches in enumerate(zip(*(ids(loader) for loader in ranks), strict=True), start=1):
        seen += sum(i != GHOST for batch in batches for i in batch)
        assert {loader.samples_after(step) for loader in ranks} == {seen}
    assert seen == 40
    given = [i for loader in ranks for batch in ids(loader) for i in batch if i != GHOST]
    assert sorted(given) == list(range(40))


def test_packed_steps_hold_the_same_samples_whatever_the_ranks() -> None:
    def steps(batch_size: int, world_size: int) -> list[list[int]]:
        ranks = [packed_loader(40, batch_size, world_size, rank) for rank in range(world_size)]
        return [[i for batch in batches for i in batch if i != GHOST] for batches in zip(*map(ids, ranks), strict=True)]

    assert steps(1, 4) == steps(2, 2) == steps(4, 1)
