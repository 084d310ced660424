"""The loss of models that leave it to the Trainer how losses of micro-batches become that of a step.

Models whose forward takes `num_items_in_batch` (the causal ones of Transformers 5) divide the sum over their tokens by
the tokens of the whole step. Others return the mean over their micro-batch: gradients would then depend on how samples
are spread over ranks, and a micro-batch of ghosts, which has no token to learn from, would be 0/0, a NaN for all ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers.loss.loss_utils import ForCausalLMLoss

LossOfOutputs = Callable[..., torch.Tensor]


def mean_over_the_step(label_smoother: Callable[..., torch.Tensor] | None) -> LossOfOutputs:
    """A `compute_loss_func` for the Trainer, with label smoothing where the user asked for it."""

    def loss(outputs: Any, labels: torch.Tensor, num_items_in_batch: torch.Tensor | None = None) -> torch.Tensor:
        if label_smoother is not None:
            return label_smoother(outputs, labels, shift_labels=True, num_items_in_batch=num_items_in_batch)
        logits = outputs["logits"] if isinstance(outputs, dict) else outputs[0]
        found: torch.Tensor = ForCausalLMLoss(logits, labels, logits.shape[-1], num_items_in_batch=num_items_in_batch)
        return found

    return loss
