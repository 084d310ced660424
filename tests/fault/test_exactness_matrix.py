"""Killed before a micro-batch, in a save, in an evaluation and after a step, a run ends bit for bit like the
undisturbed one.

Each method, each ZeRO stage, both accumulations and packing are among the combinations here;
`scripts/exactness_matrix.py` goes through all of them.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.fault.exactness import (
    ALL,
    EVALUATE_EVERY,
    SAVE_EVERY,
    STEPS,
    Combination,
    compared,
    run_disturbed,
    run_pair,
    run_undisturbed,
)
from tests.fault.harness import ROOT

SOME = [
    Combination("full", 0, 1),
    Combination("full", 3, 3),
    Combination("lora", 1, 3),
    Combination("qlora", 2, 3),
    Combination("lora", 3, 3, packing=True),
]
TO_BE_SPOILT = Combination("lora", 2, 1)


@pytest.mark.parametrize("combination", SOME, ids=lambda combination: combination.name)
def test_killed_everywhere_the_run_is_the_undisturbed_one(combination: Combination, tiny: Path, tmp_path: Path) -> None:
    if combination.method == "qlora" and importlib.util.find_spec("bitsandbytes") is None:
        pytest.skip("bitsandbytes is not installed")
    verdict = run_pair(combination, tiny, tmp_path)
    assert not verdict.differences
    assert verdict.num_kills == 4
    assert verdict.num_checkpoints == STEPS // SAVE_EVERY
    assert verdict.num_tensors > 200  # a comparison of nothing would pass as well


def test_one_random_number_drawn_too_many_is_found(tiny: Path, tmp_path: Path) -> None:
    """The comparison can fail: one draw more on one rank, after the last resume, moves the masks of dropout."""
    undisturbed = run_undisturbed(TO_BE_SPOILT, tiny, tmp_path)
    last_kill = max(kill["step"] for kill in TO_BE_SPOILT.kills())
    spoilt_step = max(last_kill, SAVE_EVERY * (last_kill // SAVE_EVERY) + 1)
    assert spoilt_step < STEPS
    draw = {
        "FTLAUNCH_TEST_DRAW": f"1:{spoilt_step}",
        "PYTHONPATH": f"{ROOT / 'tests' / 'fault' / 'one_more_draw'}:{ROOT}",
    }
    disturbed = run_disturbed(TO_BE_SPOILT, tiny, tmp_path, draw)
    verdict = compared(TO_BE_SPOILT, undisturbed, disturbed)
    folders = {difference.partition("/")[0] for difference in verdict.differences}
    before, after = spoilt_step // SAVE_EVERY, -(-spoilt_step // SAVE_EVERY)
    assert f"checkpoint-{SAVE_EVERY * before}" not in folders
    assert {f"checkpoint-{SAVE_EVERY * after}", f"checkpoint-{STEPS}", "final"} <= folders
    differing = "\n".join(verdict.differences)
    assert "adapter_model.safetensors" in differing
    assert "optim_states.pt" in differing
    assert "rng_state_1.pth" in differing
    assert "losses: " in differing


def test_the_matrix_is_killed_at_every_step_and_place() -> None:
    kills = [kill for combination in ALL for kill in combination.kills()]
    steps = {at: {kill["step"] for kill in kills if kill.get("at", "step_end") == at} for at in PLACES}
    assert steps["step_end"] == steps["micro_batch"] == set(range(1, STEPS + 1))
    assert steps["save"] == set(range(SAVE_EVERY, STEPS + 1, SAVE_EVERY))
    assert steps["evaluation"] == set(range(EVALUATE_EVERY, STEPS + 1, EVALUATE_EVERY))
    for at in PLACES:
        assert {kill["rank"] for kill in kills if kill.get("at", "step_end") == at} == {0, 1}
    assert any(kill["batch"] > 1 for kill in kills if kill.get("at") == "micro_batch")


PLACES = ("step_end", "micro_batch", "save", "evaluation")
