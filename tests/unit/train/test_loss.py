"""However the samples of a step are cut into micro-batches, and whatever ghosts are among them: one loss."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")

from transformers.trainer_pt_utils import LabelSmoother  # noqa: E402

from launcher.train.loss import mean_over_the_step  # noqa: E402

SMOOTHERS = {"plain": None, "label smoothing": LabelSmoother(epsilon=0.1)}


@pytest.fixture
def step() -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and labels of five samples; the last is a ghost."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(5, 8, 11, generator=generator, dtype=torch.float64).requires_grad_()
    labels = torch.randint(0, 11, (5, 8), generator=generator)
    labels[0, :6] = -100
    labels[4] = -100
    return logits, labels


@pytest.mark.parametrize("smoothing", SMOOTHERS)
@pytest.mark.parametrize("cuts", [[5], [1, 1, 1, 1, 1], [4, 1], [2, 3]])
def test_any_cut_gives_the_mean_over_the_tokens_of_the_step(
    step: tuple[torch.Tensor, torch.Tensor], cuts: list[int], smoothing: str
) -> None:
    logits, labels = step
    loss = mean_over_the_step(SMOOTHERS[smoothing])
    whole = loss({"logits": logits[:4]}, labels[:4])  # of one micro-batch without ghosts, as a mean by itself
    num_items = labels[:, 1:].ne(-100).sum()
    parts = [loss({"logits": a}, b, num_items) for a, b in zip(logits.split(cuts), labels.split(cuts), strict=True)]
    assert sum(parts).item() == pytest.approx(whole.item(), rel=1e-6)
    sum(parts).backward()
    assert logits.grad is not None
    assert torch.isfinite(logits.grad).all()
    assert logits.grad[4].abs().sum() == 0, "a ghost teaches nothing"
