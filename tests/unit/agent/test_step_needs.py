"""What a step asks of the network, by method, stage and cards."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from launcher.agent.step_needs import measured_step_s, step_needs
from launcher.config.models import JobConfig
from launcher.host.facts import Gpu
from launcher.plan.model_facts import ModelFacts

MODEL = ModelFacts("m", num_parameters=7_000_000_000)
H100 = Gpu(0, "GPU-0", "NVIDIA H100 80GB HBM3", 80 << 30, 0, (9, 0))
NEEDED = {"model": {"path": "a/b"}, "data": {"train": "t.jsonl"}}
BASE: dict[str, Any] = {
    "precision": "bf16",
    "zero_stage": 1,
    "world_size": 16,
    "samples_per_rank": 4,
    "accumulation": 4,
    "tokens_per_sample": 1000.0,
    "gpus": (H100,),
    "measured_step_s": None,
}


def needs(method: str = "full", model: ModelFacts = MODEL, **changes: Any) -> Any:
    config = JobConfig.model_validate({"output_dir": "x", "method": method, **NEEDED})
    return step_needs(config, model, None, **{**BASE, **changes})


def test_full_fine_tuning_on_cards() -> None:
    found = needs()
    assert found.gradient_bytes == 14_000_000_000 + 7_000_000_000  # summed once a step, and the weights gathered
    assert needs(zero_stage=0).gradient_bytes == 14_000_000_000
    assert found.step_s == pytest.approx(6 * 7e9 * 4000 / (989e12 * 0.4))
    assert needs(zero_stage=2).gradient_bytes == 4 * 14_000_000_000 + 7_000_000_000  # summed after each micro-batch
    assert needs(zero_stage=3).gradient_bytes == 8 * 14_000_000_000  # and the weights
    assert needs("lora").gradient_bytes == 210_000_000
    assert needs(measured_step_s=2.0).step_s == 2.0


def test_what_is_not_known_is_no_forecast() -> None:
    assert needs(model=ModelFacts("m")) is None
    assert needs(gpus=()) is None
    assert needs(gpus=(Gpu(0, "", "A card of the future", 1, 0, (12, 0)),)) is None
    assert needs(tokens_per_sample=None) is None


def test_the_step_of_an_earlier_start(tmp_path: Path) -> None:
    assert measured_step_s(tmp_path) is None
    folder = tmp_path / "ftlaunch" / "events"
    folder.mkdir(parents=True)
    saves = [("00:00:00", 1, 5), ("00:00:50", 2, 10), ("00:01:30", 2, 30)]
    lines = [
        {"event": "checkpoint_saved", "t": f"2026-12-01T{at}.000Z", "gen": gen, "step": step} for at, gen, step in saves
    ]
    (folder / "n0.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert measured_step_s(tmp_path) == pytest.approx(2.0)
    (folder / "n1.jsonl").write_text("")
    assert measured_step_s(tmp_path) is None  # not of one node alone
