"""What the tests with real training share."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fault import tiny_model

_STACK = ("torch", "deepspeed", "transformers", "peft")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whatever trains is slow, and skipped where there is nothing to train with."""
    fault = Path(__file__).parent / "fault"
    missing = [name for name in _STACK if importlib.util.find_spec(name) is None]
    for item in items:
        if fault in item.path.parents or "tiny" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.slow)
            if missing:
                item.add_marker(pytest.mark.skip(reason=f"the training stack is not installed: {', '.join(missing)}"))


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with `model/`, `train.jsonl` and `eval.jsonl`."""
    folder = tmp_path_factory.mktemp("tiny")
    subprocess.run([sys.executable, str(tiny_model.__file__), str(folder)], check=True, timeout=180)
    return folder
