"""Real processes on a tiny model. Skipped where the training stack is not installed."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.fault.harness import Job, base_config, merged


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    missing = [
        name for name in ("torch", "deepspeed", "transformers", "peft") if importlib.util.find_spec(name) is None
    ]
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.slow)
            if missing:
                item.add_marker(pytest.mark.skip(reason=f"the training stack is not installed: {', '.join(missing)}"))


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with `model/`, `train.jsonl` and `eval.jsonl`."""
    folder = tmp_path_factory.mktemp("tiny")
    subprocess.run([sys.executable, str(Path(__file__).parent / "tiny_model.py"), str(folder)], check=True, timeout=180)
    return folder


@pytest.fixture
def make_job(tiny: Path, tmp_path: Path) -> Callable[..., Job]:
    """`make_job(name, **changes)`: a job in its own folder; nested dicts are merged into the base configuration."""

    def make(name: str = "job", **changes: Any) -> Job:
        folder = tmp_path / name
        return Job(folder, merged(base_config(tiny, folder / "out"), changes))

    return make
