"""Shards are read as plain data, whichever Python has written them."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
other_world = pytest.importorskip("launcher.train.other_world")
stages = pytest.importorskip("deepspeed.runtime.zero.config").ZeroStageEnum


class AsGetattr:
    """Pickled as Python 3.11.0 to 3.11.3 pickle a member of an enum."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return getattr, self.arguments


@pytest.mark.parametrize("stage", [stages.gradients, AsGetattr(stages, "gradients")], ids=["by value", "by getattr"])
def test_the_stage_of_zero_is_read(tmp_path: Path, stage: Any) -> None:
    torch.save({"zero_stage": stage, "state": torch.arange(3)}, tmp_path / "shard.pt")
    loaded = other_world._read(str(tmp_path / "shard.pt"))
    assert loaded["zero_stage"] is stages.gradients
    assert loaded["state"].tolist() == [0, 1, 2]


@pytest.mark.parametrize("arguments", [(stages, "__init_subclass__"), (torch.nn.Module, "apply"), (str, "join")])
def test_no_other_attribute_is(tmp_path: Path, arguments: tuple[Any, str]) -> None:
    torch.save({"zero_stage": AsGetattr(*arguments)}, tmp_path / "shard.pt")
    with pytest.raises(pickle.UnpicklingError):
        other_world._read(str(tmp_path / "shard.pt"))
