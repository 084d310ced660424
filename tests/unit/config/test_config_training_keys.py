from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from launcher.config.training import OWNED, RENAMED, accepted_training_keys, check_training, training_keys

SCRIPT = Path(__file__).parents[3] / "scripts" / "gen_training_keys.py"
needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="Transformers is not installed"
)


@needs_transformers
def test_keys_are_those_of_the_installed_transformers() -> None:
    done = subprocess.run([sys.executable, str(SCRIPT), "--check"], check=False, timeout=60)
    assert done.returncode == 0, f"run: python {SCRIPT.relative_to(SCRIPT.parents[1])}"


def test_owned_keys_are_refused_and_the_others_accepted() -> None:
    assert "gradient_checkpointing" in accepted_training_keys()
    assert "gradient_checkpointing_kwargs" in accepted_training_keys()
    assert not set(accepted_training_keys()) & set(OWNED)
    assert all(check_training({key: None}) for key in OWNED)


def test_names_of_other_trainers_are_no_key_here() -> None:
    assert not set(RENAMED) & set(training_keys())


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("learning_rate", 1),
        ("learning_rate", 1e-4),
        ("warmup_steps", 0.03),
        ("max_steps", -1),
        ("optim", "adamw_torch"),
        ("report_to", ["tensorboard"]),
        ("report_to", "none"),
        ("tf32", None),
        ("lr_scheduler_kwargs", {"num_cycles": 2}),
        ("include_num_input_tokens_seen", True),
    ],
)
def test_right_values(key: str, value: object) -> None:
    assert check_training({key: value}) == ()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("learning_rate", True),
        ("learning_rate", float("inf")),
        ("max_steps", 1.5),
        ("max_steps", False),
        ("dataloader_pin_memory", 1),
        ("dataloader_pin_memory", None),
        ("optim", "adam"),
        ("report_to", 3),
        ("logging_steps", 0),
    ],
)
def test_wrong_values(key: str, value: object) -> None:
    (mistake,) = check_training({key: value})
    assert mistake.key == ("training", key)
    assert mistake.accepted
