"""Which sample comes when: a pure function of (seed, epoch, position), the same for any number of ranks.

Invariant: over one epoch every sample is given out exactly once. Where the last batches are short, places are filled
with `GHOST` (a sample without labels, which adds nothing to loss or gradients) instead of repeating samples, as
`accelerate` does with `even_batches`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

GHOST = -1


@dataclass(frozen=True)
class SampleOrder:
    """Epoch order of `num_samples` samples.

    A *global micro-batch* holds `world_size * batch_size` places; rank r takes places r * batch_size to (r + 1) *
    batch_size - 1.
    """

    num_samples: int
    batch_size: int
    world_size: int
    seed: int
    shuffle: bool = True

    @property
    def places_per_batch(self) -> int:
        return self.batch_size * self.world_size

    @property
    def num_batches(self) -> int:
        """Micro-batches of each rank in one epoch."""
        return -(-self.num_samples // self.places_per_batch)

    def permutation(self, epoch: int) -> NDArray[np.int64]:
        """Order of all samples in this epoch; Philox is counter-based, so (seed, epoch) alone decides."""
        if not self.shuffle:
            return np.arange(self.num_samples, dtype=np.int64)
        key = np.array([self.seed & 0xFFFFFFFFFFFFFFFF, epoch], dtype=np.uint64)
        generator = np.random.Generator(np.random.Philox(key=key))
        return generator.permutation(self.num_samples)

    def batch(self, permutation: NDArray[np.int64], index: int, rank: int) -> list[int]:
        """Sample indices of `rank` in global micro-batch `index`; `GHOST` where no sample is left."""
        start = index * self.places_per_batch + rank * self.batch_size
        taken: list[int] = permutation[start : start + self.batch_size].tolist()
        return taken + [GHOST] * (self.batch_size - len(taken))
