"""SHA-256 of everything in a checkpoint that a resume uses: tensors, and the plain values beside them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import Any

_PLAIN = (type(None), bool, int, float, complex, str, bytes)
# Of trainer_state.json: what was logged (see `history`), and a number of operations that Transformers computes, with
# ZeRO-3, from the parameters that happen to be gathered at the moment.
_NOT_STATE = ("log_history", "total_flos")
_MEASURED = ("runtime", "per_second")  # parts of keys of logged figures that tell the machine's speed
_DEPTH = 20  # of containers in containers; what is deeper holds itself


def digests(folder: Path) -> dict[str, str]:
    """`file:key` -> SHA-256, for every tensor, array and plain value of `folder` (a checkpoint, or `final/`): weights,
    optimizer shards with their fp32 weights, schedule, random states, the Trainer's counters.

    Loads the files that the run itself has written.
    """
    import torch
    from safetensors.torch import load_file

    found: dict[str, str] = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.suffix == ".safetensors":
            loaded: Any = load_file(path)
        elif path.suffix in (".pt", ".pth"):
            loaded = torch.load(path, map_location="cpu", weights_only=False)
        elif path.name == "trainer_state.json":
            state = json.loads(path.read_text("utf-8"))
            loaded = {key: value for key, value in state.items() if key not in _NOT_STATE}
        else:
            continue
        for key, content in _leaves(loaded, "", 0):
            found[f"{name}:{key}"] = hashlib.sha256(content).hexdigest()
    return found


def history(checkpoint: Path) -> list[dict[str, Any]]:
    """What was logged on the way to this checkpoint: losses, gradient norms, learning rates, evaluation losses."""
    state = json.loads((checkpoint / "trainer_state.json").read_text("utf-8"))
    return [
        {key: value for key, value in entry.items() if not any(part in key for part in _MEASURED)}
        for entry in state["log_history"]
    ]


def num_tensors(folder: Path) -> int:
    """How many tensors `digests` compares in `folder`."""
    import torch
    from safetensors import safe_open

    count = 0
    for path in folder.rglob("*"):
        if path.suffix == ".safetensors":
            with safe_open(path, "pt") as opened:
                count += len(opened.keys())
        elif path.suffix in (".pt", ".pth"):
            count += sum(
                content[:6] == b"tensor"
                for _, content in _leaves(torch.load(path, map_location="cpu", weights_only=False), "", 0)
            )
    return count


def _leaves(value: Any, key: str, depth: int) -> Iterator[tuple[str, bytes]]:
    """(key, bytes) of all that `value` consists of. The order of a mapping's keys does not count."""
    content = _content(value)
    if content is not None:
        yield key, content
        return
    if depth > _DEPTH:
        raise ValueError(f"{key}: a value within itself")
    if isinstance(value, Mapping):
        yield f"{key}.keys", repr(sorted(map(str, value))).encode()
        items = value.items()
    elif isinstance(value, (list, tuple)):
        yield f"{key}.len", str(len(value)).encode()
        items = dict(enumerate(value)).items()
    else:  # an object of DeepSpeed's (a loss scaler, the place of a fragment): its type and what it holds
        yield f"{key}.type", type(value).__qualname__.encode()
        items = vars(value).items()
    for name, item in items:
        yield from _leaves(item, f"{key}.{name}", depth + 1)


def _content(value: Any) -> bytes | None:
    """The bytes of a value that is not looked into; None for others."""
    import numpy as np
    import torch

    if isinstance(value, torch.Tensor):
        flat = value.detach().cpu().contiguous().reshape(-1)
        return f"tensor {value.dtype} {tuple(value.shape)} ".encode() + flat.view(torch.uint8).numpy().tobytes()
    if isinstance(value, np.ndarray):
        return f"array {value.dtype} {value.shape} ".encode() + value.tobytes()
    if isinstance(value, Enum):
        return repr((type(value).__name__, value.name)).encode()
    if isinstance(value, (set, frozenset)):
        return repr(sorted(map(str, value))).encode()
    if isinstance(value, (*_PLAIN, torch.dtype, torch.Size, type)):
        return repr(value).encode()
    if isinstance(value, (list, tuple)) and all(isinstance(item, _PLAIN) for item in value):
        return repr(value).encode()  # as one: Python's random state is 625 numbers
    return None
