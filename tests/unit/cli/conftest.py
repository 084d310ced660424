"""A small job, and the real program in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from launcher.platforms.nesting import OUTER_LAUNCHERS
from launcher.platforms.table import BY_HAND, PLATFORMS
from tests.nvml import nvml_folder

__all__ = ["nvml_folder"]

REPOSITORY = Path(__file__).parents[3]
JOB = "output_dir: run\nmodel: {path: owner/model}\ndata: {train: train.jsonl}\n"
# What this machine may bring along and what would change an answer.
_NOT_FROM_HERE = {"FTLAUNCH_SET", "CUDA_VISIBLE_DEVICES"}
_NOT_FROM_HERE |= {name for launcher in OUTER_LAUNCHERS for name in launcher.all_of}
_NOT_FROM_HERE |= {name for platform in (*PLATFORMS, BY_HAND) for name in platform.names} - {"HOSTNAME"}


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in _NOT_FROM_HERE:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("FTLAUNCH_LANG", "en")


@pytest.fixture
def job(tmp_path: Path) -> Callable[..., Path]:
    """`job("precision: bf16\\n")`: a job file whose inputs are there."""

    def write(more: str = "") -> Path:
        (tmp_path / "train.jsonl").write_text('{"question": "a", "answer": "b"}\n')
        (tmp_path / "job.yaml").write_text(JOB + more, "utf-8")
        return tmp_path / "job.yaml"

    return write


Program = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def program() -> Program:
    """`program("plan", "--json", environ={...})`: `python -m launcher ...`, its answer."""

    def run(*arguments: object, environ: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "launcher", *map(str, arguments)],
            env={**os.environ, **(environ or {}), "PYTHONPATH": str(REPOSITORY)},
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )

    return run
