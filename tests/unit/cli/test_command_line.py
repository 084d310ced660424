"""The command line is a promise: names of commands and options change only together with this list."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from launcher import __version__
from launcher.cli.main import main

REPOSITORY = Path(__file__).parents[3]
Program = Callable[..., "subprocess.CompletedProcess[str]"]

COMMAND_LINE = {
    "run": ["--config JOB.YAML", "--set KEY=VALUE", "--json"],
    "check": ["--config JOB.YAML", "--set KEY=VALUE", "--json"],
    "plan": [
        *("--config JOB.YAML", "--set KEY=VALUE", "--gpus NxCARD", "--model NAME", "--method {lora,qlora,full}"),
        *("--max-length N", "--global-batch N", "--tokens N", "--price P", "--utilisation SHARE"),
        *("--preemptions-per-day X", "--json"),
    ],
    "schema": ["--json"],
    "prepare": ["--config JOB.YAML", "--set KEY=VALUE", "--json"],
    "diagnose": ["--json", "PATH ..."],
    "status": ["--json", "PATH ..."],
    "checkpoints": ["--verify", "--json", "PATH ..."],
    "report": ["PATH ..."],
    "submit": ["--config JOB.YAML", "--set KEY=VALUE"],
}
LATER = ("report", "submit")


def helped(*arguments: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as ended:
        main([*arguments, "--help"])
    assert ended.value.code == 0
    return capsys.readouterr().out


def options_in(usage: str) -> list[str]:
    """`usage: ftlaunch run [-h] [--config JOB.YAML] [PATH ...]` -> what stands in brackets, `-h` left out."""
    line = " ".join(usage.partition("\n\n")[0].split())
    return [option for option in re.findall(r"\[([^\]]+)\]", line) if option != "-h"]


@pytest.fixture(autouse=True)
def _wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("NO_COLOR", "1")


def test_commands(capsys: pytest.CaptureFixture[str]) -> None:
    text = helped(capsys=capsys)
    assert text.startswith(
        "usage: ftlaunch --config JOB.YAML [--set KEY=VALUE ...] [--json]\n       ftlaunch COMMAND ..."
    )
    assert "--version" in text
    assert re.findall(r"^    (\w+)\b", text, re.MULTILINE) == list(COMMAND_LINE)
    for code in ("0", "1", "2", "3", "138"):
        assert re.search(rf"^  {code} +\w", text, re.MULTILINE), "exit codes are explained"


@pytest.mark.parametrize("command", COMMAND_LINE)
def test_options(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert options_in(helped(command, capsys=capsys)) == COMMAND_LINE[command]


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"ftlaunch {__version__}\n"


@pytest.mark.parametrize("command", LATER)
def test_commands_of_later_versions_say_so(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command]) == 2
    assert capsys.readouterr().err == f"ftlaunch: error: `ftlaunch {command}` is not in this version\n"


@pytest.mark.parametrize(
    "arguments",
    [
        ["launch"],
        ["job.yaml"],
        ["--config", "job.yaml", "check"],
        ["plna", "--config", "job.yaml"],
        ["plan", "--confg", "job.yaml"],
        ["plan", "--conf", "job.yaml"],
        ["plan", "extra"],
    ],
)
def test_what_is_not_known_is_exit_code_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert capsys.readouterr().err


def test_no_arguments_show_the_help_and_are_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    captured = capsys.readouterr()
    assert "ftlaunch" in captured.err
    assert captured.out == ""


@pytest.mark.parametrize(
    "arguments",
    [
        ["--config", "gone.yaml"],
        ["--config=gone.yaml"],
        ["--set", "a=b", "--config", "gone.yaml"],
        ["run", "--config", "gone.yaml"],
    ],
)
def test_the_form_of_a_containers_command_is_run(
    arguments: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("launcher.agent.run.become_subreaper", lambda: None)  # it would outlast this test
    assert main(arguments) == 2
    assert "gone.yaml" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--help"], ["run", "--help"], ["--version"]])
def test_help_imports_only_the_standard_library(arguments: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "launcher", *arguments],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}
    assert "launcher.cli.main" in imported
    heavy = ("pydantic", "torch", "transformers", "deepspeed", "numpy", "ruamel", "pynvml", "psutil", "xxhash")
    assert not {name for name in imported if name.split(".")[0] in heavy}
    assert not {name for name in imported if name.startswith(("launcher.config", "launcher.agent", "launcher.train"))}


def test_the_module_and_the_exit_status_of_the_process(program: Program) -> None:
    done = program("status", "somewhere")
    assert (done.returncode, done.stdout) == (2, "")
    assert "Traceback" not in done.stderr


def test_schema_is_one_json_document(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema"]) == 0
    assert json.loads(capsys.readouterr().out)["properties"]["output_dir"]
