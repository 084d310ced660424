"""Whether a model keeps the samples of a packed row apart.

Transformers does it by the positions, which begin anew with each sample: its mask functions where there is no attention
mask, its flash attention where a batch is a single row. Models with other attention, or with layers that hand state
from token to token, would let a sample read the one before it, silently: they are refused.
"""

from __future__ import annotations

import inspect
import sys
from typing import Any

from launcher.errors import UserError

_SEPARABLE_LAYERS = frozenset({"full_attention", "sliding_attention"})


def require_packing(model: Any, batch_size: int) -> None:
    """Raises UserError where samples in a row of this model would see each other."""
    plain = model.get_base_model() if hasattr(model, "get_base_model") else model
    name = type(plain).__name__
    reason = _why_not(plain, batch_size)
    if reason:
        raise UserError(f"data.packing: true cannot be used with {name}: {reason}. Remove packing from data.")


def _why_not(model: Any, batch_size: int) -> str:
    attention = str(getattr(model.config, "_attn_implementation", ""))
    if "flash" in attention and batch_size != 1:
        return (
            f"{attention} keeps samples apart in batches of one row only; training.per_device_train_batch_size is "
            f"{batch_size}. Write 1, and a larger data.max_length or gradient_accumulation_steps"
        )
    if "position_ids" not in inspect.signature(model.forward).parameters:
        return "it takes no position_ids"
    others = sorted(set(getattr(model.config.get_text_config(), "layer_types", None) or ()) - _SEPARABLE_LAYERS)
    if others:
        return f"its layers of type {', '.join(others)} would carry one sample into the next"
    # Read of the module that defines the model: what it does not import, it does not call.
    if not hasattr(sys.modules[type(model).__module__], "create_causal_mask"):
        return "its attention does not go by Transformers' mask functions"
    return ""
