"""Which samples make up which optimizer step: a pure function of (seed, epoch, step), the same for any number of ranks.

Invariants: over one epoch every sample is given out exactly once, and the samples of a step depend on the global batch
alone, not on how many ranks share it. Places that no sample is left for are filled with `GHOST` (a sample without
labels, which adds nothing to loss or gradients) instead of repeating samples, as `accelerate` does with `even_batches`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

GHOST = -1


@dataclass(frozen=True)
class SampleOrder:
    """Epoch order of `num_samples` samples, `global_batch_size` of them an optimizer step.

    A step consists of `accumulation` *global micro-batches* of `world_size * batch_size` places each; in one of them
    rank r takes places r * batch_size to (r + 1) * batch_size - 1. The last step of an epoch is shorter.
    """

    num_samples: int
    batch_size: int
    world_size: int
    global_batch_size: int
    seed: int
    shuffle: bool = True

    @property
    def places_per_batch(self) -> int:
        return self.batch_size * self.world_size

    @property
    def accumulation(self) -> int:
        """Micro-batches of a whole step."""
        return micro_batches_per_step(self.global_batch_size, self.batch_size, self.world_size)

    @property
    def steps_per_epoch(self) -> int:
        return -(-self.num_samples // self.global_batch_size)

    @property
    def num_batches(self) -> int:
        """Micro-batches of each rank in one epoch; those of the last step are as many as its samples need."""
        whole_steps = self.steps_per_epoch - 1
        left = self.num_samples - whole_steps * self.global_batch_size
        return whole_steps * self.accumulation + -(-left // self.places_per_batch)

    def permutation(self, epoch: int) -> NDArray[np.int64]:
        """Order of all samples in this epoch; Philox is counter-based, so (seed, epoch) alone decides."""
        if not self.shuffle:
            return np.arange(self.num_samples, dtype=np.int64)
        key = np.array([self.seed & 0xFFFFFFFFFFFFFFFF, epoch], dtype=np.uint64)
        generator = np.random.Generator(np.random.Philox(key=key))
        return generator.permutation(self.num_samples)

    def batch(self, permutation: NDArray[np.int64], index: int, rank: int) -> list[int]:
        """Sample indices of `rank` in global micro-batch `index` of the epoch; `GHOST` where no sample is left."""
        step, micro_batch = divmod(index, self.accumulation)
        start = step * self.global_batch_size + micro_batch * self.places_per_batch + rank * self.batch_size
        end = min(start + self.batch_size, (step + 1) * self.global_batch_size)
        taken: list[int] = permutation[start:end].tolist()  # empty where end < start: a rank without a sample
        return taken + [GHOST] * (self.batch_size - len(taken))

    def samples_after(self, step: int) -> int:
        """Samples that all ranks together have been given in the first `step` steps, over all epochs."""
        epochs, steps = divmod(step, self.steps_per_epoch)
        return epochs * self.num_samples + min(steps * self.global_batch_size, self.num_samples)


def micro_batches_per_step(global_batch_size: int, batch_size: int, world_size: int) -> int:
    """How many micro-batches of `batch_size` samples each of `world_size` ranks needs for a global batch."""
    return -(-global_batch_size // (batch_size * world_size))
