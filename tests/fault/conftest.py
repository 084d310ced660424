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
