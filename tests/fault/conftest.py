"""Real processes on a tiny model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.fault.harness import Job, base_config, merged


@pytest.fixture
def make_job(tiny: Path, tmp_path: Path) -> Callable[..., Job]:
    """`make_job(name, **changes)`: a job in its own folder; nested dicts are merged into the base configuration."""

    def make(name: str = "job", **changes: Any) -> Job:
        folder = tmp_path / name
        return Job(folder, merged(base_config(tiny, folder / "out"), changes))

    return make


@pytest.fixture(scope="session")
def trained(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Job:
    """A run of 6 steps of two ranks with checkpoints 3 and 6, at its planned end. Tests work on copies of it."""
    folder = tmp_path_factory.mktemp("trained")
    job = Job(folder, merged(base_config(tiny, folder / "out"), {"training": {"max_steps": 6}}))
    run = job.run()
    assert run.process.returncode == 0, run.log
    return job
