"""Every wrong job.yaml of tests/unit/config/wrong through the program: exit code 2 and its one right message."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from launcher.cli.main import main

REPOSITORY = Path(__file__).parents[3]
WRONG = REPOSITORY / "tests/unit/config/wrong"
CASES = sorted(path.stem for path in WRONG.glob("*.yaml"))
IN_A_PROCESS = ("key-typo", "text-tab", "input-model-missing")


def expected(name: str) -> str:
    return "ftlaunch: error: " + (WRONG / f"{name}.txt").read_text("utf-8")


@pytest.mark.parametrize("name", [name for name in CASES if name not in IN_A_PROCESS])
def test_message(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(WRONG)
    assert main(["plan", "--config", f"{name}.yaml"]) == 2
    captured = capsys.readouterr()
    assert captured.err.replace(f"{WRONG}/", "") == expected(name)
    assert captured.out == ""


@pytest.mark.parametrize("name", IN_A_PROCESS)
def test_message_of_the_process(name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "launcher", "plan", "--config", f"{name}.yaml"],
        cwd=WRONG,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 2
    assert done.stderr.replace(f"{WRONG}/", "") == expected(name)
    assert done.stdout == ""


def test_a_wrong_job_is_refused_by_every_command_that_takes_one(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(WRONG)
    monkeypatch.setattr("launcher.agent.run.become_subreaper", lambda: None)  # it would outlast this test
    for command in ("plan", "check", "run"):
        assert main([command, "--config", "key-typo.yaml"]) == 2
        assert "key-typo.yaml" in capsys.readouterr().err
