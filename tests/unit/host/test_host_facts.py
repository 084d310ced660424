"""The whole reading: JSON-able, changes nothing, needs no GPU, imports no torch."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest

from launcher.host.facts import is_in_container, read_host_facts
from launcher.host.software import cuda_of_torch


def test_facts_are_json_and_reading_changes_nothing(tmp_path: Path) -> None:
    facts = read_host_facts(tmp_path / "out", {})
    document = json.loads(json.dumps(dataclasses.asdict(facts)))
    assert document["hostname"]
    assert document["cpu"]["num_usable"] >= 1
    assert document["memory"]["total_bytes"] > 0
    assert {"python", "kernel"} <= document["versions"].keys()
    assert facts.nic("lo") is not None
    assert list(tmp_path.iterdir()) == []


def test_a_relative_output_dir_is_taken_from_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert read_host_facts(Path("out"), {}).disk.path == str(tmp_path)


def test_reading_imports_no_torch() -> None:
    code = (
        "import sys, pathlib; from launcher.host.facts import read_host_facts; read_host_facts(pathlib.Path('.'), {});"
        "print([name for name in ('torch', 'transformers', 'deepspeed') if name in sys.modules])"
    )
    answer = subprocess.run(
        [sys.executable, "-c", code], cwd=Path(__file__).parents[3], check=True, capture_output=True, text=True
    )
    assert answer.stdout.strip() == "[]"


def test_containers(tmp_path: Path) -> None:
    assert not is_in_container({}, tmp_path)
    assert is_in_container({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, tmp_path)
    (tmp_path / ".dockerenv").touch()
    assert is_in_container({}, tmp_path)


@pytest.mark.parametrize(
    ("version", "requirements", "cuda"),
    [
        ("2.9.0+cu128", [], "12.8"),
        ("2.13.0+cpu", ["nvidia-cuda-runtime==13.0.96"], None),
        ("2.9.0+ali.10.ppu2.0.0.cu129", [], "12.9"),
        ("2.8.0", ["filelock", 'nvidia-cuda-runtime-cu12==12.8.90; platform_system == "Linux"'], "12.8"),
        ("2.11.0", ["cuda-toolkit[cudart,nvrtc]==13.0.2; platform_system == 'Linux'"], "13.0"),
        ("2.11.0", ["filelock"], None),
    ],
)
def test_cuda_of_a_torch_build(version: str, requirements: list[str], cuda: str | None) -> None:
    assert cuda_of_torch(version, requirements) == cuda
