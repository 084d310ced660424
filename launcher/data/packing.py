"""Several short samples in one row of a batch: which samples share which row.

Invariant: every sample is in exactly one row, and the rows are a function of the lengths alone: the same on every rank,
at every start, and in every epoch (an epoch gives out the rows in an order of its own).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Packing:
    """Row r holds the samples `samples[offsets[r]:offsets[r + 1]]`, in this order; both are int64."""

    samples: NDArray[np.int64]
    offsets: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def row(self, index: int) -> NDArray[np.int64]:
        return self.samples[self.offsets[index] : self.offsets[index + 1]]

    def num_samples_of(self, rows: NDArray[np.int64]) -> int:
        return int((self.offsets[rows + 1] - self.offsets[rows]).sum())


def pack(lengths: Sequence[int] | NDArray[np.int64], max_length: int) -> Packing:
    """Best fit, longest samples first: each goes into the fullest row that still has room for it. Of equal lengths the
    earlier sample comes first, of equally full rows the one that became so last.

    `lengths`: tokens of each sample, none above `max_length`.
    """
    rows: list[list[int]] = []
    by_room: list[list[int]] = [[] for _ in range(max_length + 1)]  # room left -> rows
    has_room = 0  # bit r: there are rows with room r
    for sample in np.argsort(-np.asarray(lengths, dtype=np.int64), kind="stable").tolist():
        length = int(lengths[sample])
        fitting = has_room >> length
        if fitting:
            room = length + (fitting & -fitting).bit_length() - 1
            row = by_room[room].pop()
            if not by_room[room]:
                has_room ^= 1 << room
        else:
            room, row = max_length, len(rows)
            rows.append([])
        rows[row].append(sample)
        by_room[room - length].append(row)
        has_room |= 1 << (room - length)
    offsets = np.cumsum([0, *(len(row) for row in rows)], dtype=np.int64)
    return Packing(np.array([sample for row in rows for sample in row], dtype=np.int64), offsets)
