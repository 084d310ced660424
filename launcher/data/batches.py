"""Batches for one rank: a torch DataLoader that starts at any position of an epoch and tells which samples it gave
out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from launcher.data.encode import EncodedDataset
from launcher.data.order import GHOST, SampleOrder
from launcher.data.packing import Packing
from launcher.data.records import IGNORED_LABEL

SAMPLE_KEY = "sample_ids"
_GHOST_TOKENS = 8  # what a batch is padded to in any case


class SampleDataset(Dataset[dict[str, Any]]):
    """Map-style view of an EncodedDataset; index `GHOST` is the beginning of sample 0 without labels: a few tokens, so
    that a rank that has only ghosts does not hold up the others."""

    def __init__(self, encoded: EncodedDataset) -> None:
        self.encoded = encoded

    def __len__(self) -> int:
        return len(self.encoded)

    def __getitem__(self, index: int) -> dict[str, Any]:
        ids, labels = self.encoded.sample(0 if index == GHOST else index)
        if index == GHOST:
            ids = ids[:_GHOST_TOKENS]
            labels = np.full_like(ids, IGNORED_LABEL)
        return {"input_ids": ids, "labels": labels, SAMPLE_KEY: index}


class PackedDataset(Dataset[dict[str, Any]]):
    """Rows of several samples each. A sample's positions begin at 0: by these a model keeps the samples of a row apart.
    Its first token is not learned, which the sample before it would predict."""

    def __init__(self, encoded: EncodedDataset, packing: Packing) -> None:
        self.encoded = encoded
        self.packing = packing

    def __len__(self) -> int:
        return len(self.packing)

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index == GHOST:
            ghost = SampleDataset(self.encoded)[GHOST]
            return {**ghost, "position_ids": np.arange(len(ghost["input_ids"]))}
        row = self.packing.row(index)
        parts = [self.encoded.sample(int(sample)) for sample in row]
        labels = np.concatenate([labels for _, labels in parts])
        lengths = [len(ids) for ids, _ in parts]
        labels[np.cumsum([0, *lengths[:-1]])] = IGNORED_LABEL
        return {
            "input_ids": np.concatenate([ids for ids, _ in parts]),
            "labels": labels,
            "position_ids": np.concatenate([np.arange(length) for length in lengths]),
            SAMPLE_KEY: row.tolist(),
        }


class Collator:
    """Pads to the longest row of the batch, rounded up to a multiple of 8 (tensor cores).

    Packed rows get no attention mask, because models look at the positions only without one: the padding has positions
    of its own, like a sample more.
    """

    def __init__(self, pad_token_id: int) -> None:
        self.pad_token_id = pad_token_id

    def __call__(self, samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        longest = max(len(s["input_ids"]) for s in samples)
        width = -(-longest // 8) * 8
        input_ids = torch.full((len(samples), width), self.pad_token_id, dtype=torch.long)
        labels = torch.full((len(samples), width), IGNORED_LABEL, dtype=torch.long)
        attention_mask = torch.zeros((len(samples), width), dtype=torch.long)
        for row, sample in enumerate(samples):
            length = len(sample["input_ids"])
            input_ids[row, :length] = torch.from_numpy(sample["input_ids"].astype(np.int64))
            labels[row, :length] = torch.from_numpy(sample["labels"].astype(np.int64))
            attention_mask[row, :length] = 1
        if "position_ids" not in samples[0]:
            sample_ids = torch.tensor([s[SAMPLE_KEY] for s in samples], dtype=torch.long)
            return {"input_ids": input_ids, "labels": labels, "attention_mask": attention_mask, SAMPLE_KEY: sample_ids}
        position_ids = torch.arange(width).repeat(len(samples), 1)
        for row, sample in enumerate(samples):
            positions = sample["position_ids"]
            position_ids[row, : len(positions)] = torch.from_numpy(positions)
            position_ids[row, len(positions) :] -= len(positions)
        all_ids = [i for s in samples for i in ([GHOST] if s[SAMPLE_KEY] == GHOST else s[SAMPLE_KEY])]
        sample_ids = torch.tensor(all_ids, dtype=torch.long)
        return {"input_ids": input_ids, "labels": labels, "position_ids": position_ids, SAMPLE_KEY: sample_ids}


class RankBatchSampler(Sampler[list[int]]):
    """This rank's batches of one epoch, from micro-batch `start` on; seeking costs nothing."""

    def __init__(self, order: SampleOrder, rank: int) -> None:
        self.order = order
        self.rank = rank
        self.epoch = 0
        self.start = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.order.num_batches - self.start

    def __iter__(self) -> Iterator[list[int]]:
        permutation = self.order.permutation(self.epoch)
        for index in range(self.start, self.order.num_batches):
            yield self.order.batch(permutation, index, self.rank)


class RankLoader:
    """What the Trainer iterates over. Not wrapped by accelerate, which would shard it a second time.

    `set_epoch` and `__len__` are what `Trainer` asks of a loader; `starting_at` replaces
    `accelerate.skip_first_batches`, which draws and throws away every batch before the position.
    """

    def __init__(
        self,
        dataset: SampleDataset | PackedDataset,
        sampler: RankBatchSampler,
        collator: Collator,
        **loader_options: Any,
    ) -> None:
        self.dataset = dataset
        self.batch_sampler = sampler
        self._collator = collator
        self._options = loader_options
        self._loader: DataLoader[Any] = DataLoader(
            dataset, batch_sampler=sampler, collate_fn=collator, **loader_options
        )

    def __len__(self) -> int:
        return len(self.batch_sampler)

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        return iter(self._loader)

    def set_epoch(self, epoch: int) -> None:
        self.batch_sampler.set_epoch(epoch)

    def samples_after(self, step: int) -> int:
        """Samples that all ranks together have been given in the first `step` steps, over all epochs."""
        order = self.batch_sampler.order
        places = order.samples_after(step)
        if isinstance(self.dataset, SampleDataset):
            return places
        epochs, rows = divmod(places, order.num_samples)
        packing = self.dataset.packing
        return epochs * len(packing.samples) + packing.num_samples_of(order.permutation(epochs)[:rows])

    def starting_at(self, num_batches: int) -> RankLoader:
        """The same epoch without its first `num_batches` micro-batches; later epochs are whole again (the Trainer uses
        this loader for the resumed epoch only)."""
        sampler = RankBatchSampler(self.batch_sampler.order, self.batch_sampler.rank)
        sampler.set_epoch(self.batch_sampler.epoch)
        sampler.start = num_batches
        return RankLoader(self.dataset, sampler, self._collator, **self._options)
