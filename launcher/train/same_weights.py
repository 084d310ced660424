"""DeepSpeed's engine begins with a broadcast of all weights from rank 0. Where the ranks find that they have the same
ones already, it is left out: over gloo it is half of a restart."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import xxhash
from deepspeed.runtime.engine import DeepSpeedEngine


def weights_digest(model: Any) -> str:
    """XXH3-128 (hex) of all parameters, in the model's order. They are on the CPU."""
    hasher = xxhash.xxh3_128()
    for name, parameter in model.named_parameters():
        hasher.update(name.encode())
        hasher.update(parameter.detach().contiguous().flatten().view(torch.uint8).numpy().data)
    return str(hasher.hexdigest())


def compare_before_broadcast(digest: str) -> None:
    """`digest`: of this rank's weights as they were loaded, or "" where it is not known. To be called on every rank
    before there is an engine: the comparison is a collective."""
    broadcast = DeepSpeedEngine._broadcast_model

    def broadcast_where_needed(engine: Any) -> None:
        if engine.has_moe_layers or not _is_the_same_everywhere(digest, engine.device):
            broadcast(engine)

    DeepSpeedEngine._broadcast_model = broadcast_where_needed


def _is_the_same_everywhere(digest: str, device: Any) -> bool:
    """Collective."""
    own = torch.tensor([int(digest[i : i + 8] or "0", 16) for i in range(0, 32, 8)], dtype=torch.int64, device=device)
    all_ranks = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(all_ranks, own)
    first = all_ranks[0]
    return bool(first.any()) and all(bool((one == first).all()) for one in all_ranks)
