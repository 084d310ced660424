"""SHA-256 of every tensor of a checkpoint: weights, optimizer shards, random states."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def digests(checkpoint: Path) -> dict[str, str]:
    """`file:key` -> SHA-256 of the tensor's bytes. Loads the files that the run itself has written."""
    import torch
    from safetensors.torch import load_file

    found: dict[str, str] = {}
    for path in sorted(checkpoint.rglob("*")):
        name = path.relative_to(checkpoint).as_posix()
        if path.suffix == ".safetensors":
            loaded: Any = load_file(path)
        elif path.suffix in (".pt", ".pth"):
            loaded = torch.load(path, map_location="cpu", weights_only=False)
        else:
            continue
        for key, tensor in _tensors(loaded, ""):
            found[f"{name}:{key}"] = hashlib.sha256(
                tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            ).hexdigest()
    return found


def _tensors(value: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    import torch

    if isinstance(value, torch.Tensor):
        yield prefix, value if value.dim() else value.reshape(1)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _tensors(item, f"{prefix}.{key}")
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from _tensors(item, f"{prefix}[{index}]")
