from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from launcher.config.load import LoadedJob, load_job

_MINIMAL = "output_dir: runs/first\nmodel: {path: owner/model}\ndata: {train: train.jsonl}\n"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden", action="store_true", help="write the expected messages of tests/unit/config/wrong"
    )


@pytest.fixture
def load(tmp_path: Path) -> Callable[..., LoadedJob]:
    """`load(more_yaml, "lora.r=8", FTLAUNCH_SET="...")`: a job of the least settings with more of them."""

    def load_text(more: str = "", *overrides: str, **environ: str) -> LoadedJob:
        path = tmp_path / "job.yaml"
        path.write_text(_MINIMAL + more, "utf-8")
        return load_job(path, overrides, environ)

    return load_text
