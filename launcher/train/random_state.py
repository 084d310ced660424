"""Python's, NumPy's and torch's random states of one rank."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist


@contextlib.contextmanager
def random_state_kept() -> Iterator[None]:
    """Python's, NumPy's and torch's random states (CPU and this rank's GPU) are the same after as before."""
    python_state, numpy_state, cpu_state = random.getstate(), np.random.get_state(), torch.random.get_rng_state()
    cuda_state = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
    try:
        yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        torch.random.set_rng_state(cpu_state)
        if cuda_state is not None:
            torch.cuda.set_rng_state(cuda_state)


def random_states() -> dict[str, Any]:
    """What `Trainer._load_rng_state` reads from rng_state.pth."""
    states: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "cpu": torch.random.get_rng_state(),
    }
    if torch.cuda.is_available():
        all_devices = dist.is_initialized() and dist.get_world_size() > 1
        states["cuda"] = torch.cuda.random.get_rng_state_all() if all_devices else torch.cuda.random.get_rng_state()
    return states


def seed_anew(seed: int, step: int, world_size: int, rank: int) -> None:
    """Random states of a rank that has no predecessor: its own, and the same at every resume from this step with this
    many ranks."""
    words = np.random.SeedSequence([seed & 0xFFFFFFFFFFFFFFFF, step, world_size, rank]).generate_state(3)
    random.seed(int(words[0]))
    np.random.seed(int(words[1]))
    torch.manual_seed(int(words[2]))  # of the GPU, too
