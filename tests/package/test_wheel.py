"""The wheel alone in an empty environment: what a user gets who has only `pip install`, without torch and without
this repository."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def ftlaunch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The console script of a wheel that was built and installed from scratch."""
    pytest.importorskip("build", reason="the package `build` is not installed (extra `test`)")
    folder = tmp_path_factory.mktemp("wheel")
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--outdir", str(folder), str(ROOT)],
        check=True,
        capture_output=True,
        timeout=300,
        env=environ,
    )
    (wheel,) = folder.glob("*.whl")
    venv.create(folder / "venv", with_pip=True)
    subprocess.run(
        [str(folder / "venv" / "bin" / "python"), "-m", "pip", "install", "--quiet", str(wheel)],
        check=True,
        timeout=300,
        cwd=folder,
        env=environ,
    )
    return folder / "venv" / "bin" / "ftlaunch"


def answer(ftlaunch: Path, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "FTLAUNCH"))}
    return subprocess.run(
        [str(ftlaunch), *arguments], capture_output=True, text=True, timeout=60, cwd=cwd, env=environ, check=False
    )


@pytest.fixture
def job(tmp_path: Path) -> Path:
    (tmp_path / "train.jsonl").write_text('{"question": "q", "answer": "a"}\n')
    path = tmp_path / "job.yaml"
    path.write_text("output_dir: out\nmodel: {path: some/model}\ndata: {train: train.jsonl}\n")
    return path


def test_no_torch_is_there(ftlaunch: Path) -> None:
    python = ftlaunch.parent / "python"
    done = subprocess.run([str(python), "-c", "import torch"], capture_output=True, timeout=60, check=False)
    assert done.returncode != 0


def test_help_and_schema(ftlaunch: Path, tmp_path: Path) -> None:
    assert "exit codes" in answer(ftlaunch, "--help", cwd=tmp_path).stdout
    schema = json.loads(answer(ftlaunch, "schema", cwd=tmp_path).stdout)
    assert "checkpoint" in schema["properties"]


def test_plan_answers_without_the_training_stack(ftlaunch: Path, job: Path) -> None:
    done = answer(ftlaunch, "plan", "--config", str(job), "--json", cwd=job.parent)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["precision"]["value"] in ("fp32", "bf16", "fp16")
    assert not (job.parent / "out").exists()


def test_a_wrong_file_is_refused_with_its_line(ftlaunch: Path, job: Path) -> None:
    job.write_text(job.read_text() + "checkpont: {every_steps: 5}\n")
    done = answer(ftlaunch, "plan", "--config", str(job), cwd=job.parent)
    assert done.returncode == 2
    assert "checkpoint" in done.stderr
    assert "job.yaml:4" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_start_without_the_stack_is_refused_by_preflight(ftlaunch: Path, job: Path) -> None:
    done = answer(ftlaunch, "--config", str(job), cwd=job.parent)
    assert done.returncode == 3
    assert "versions.stack" in done.stderr
