"""The checks on a node that really is so: its own /dev/shm and limits in a namespace, cards from the stand-in."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.nvml.build import with_cards
from tests.unit.host.namespaces import InNamespace

CHECK = """
import json, os, pathlib
from launcher.host.facts import read_host_facts
from launcher.preflight.checks import run_checks
from launcher.preflight.inputs import PreflightInputs
facts = read_host_facts(pathlib.Path(os.environ["OUTPUT_DIR"]), os.environ)
inputs = PreflightInputs(
    facts, num_ranks=8, num_dataloader_workers=2, device="cuda", method=None, env=os.environ, platform="dlc"
)
print(json.dumps({finding.id: finding.to_json({}) for finding in run_checks(inputs)}))
"""


def check(in_namespace: InNamespace, nvml_folder: Path, tmp_path: Path, *shell: str, cards: str) -> dict[str, str]:
    base = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "OUTPUT_DIR": str(tmp_path)}
    findings = json.loads(in_namespace(CHECK, *shell, environ=with_cards(nvml_folder, cards, base)))
    return {name: f"{finding['severity']}: {finding['measured']}" for name, finding in findings.items()}


@pytest.mark.root
def test_a_node_with_the_small_dev_shm_of_containers(
    in_namespace: InNamespace, nvml_folder: Path, tmp_path: Path
) -> None:
    shm = "mount -t tmpfs -o size=64m tmpfs /dev/shm"
    findings = check(in_namespace, nvml_folder, tmp_path, shm, "ulimit -n 1024", cards="8xA100")
    assert findings["shm.size"] == "error: 64 MiB free of 64 MiB"
    assert findings["limits.nofile"] == "warning: 1024"
    assert findings["gpu.visible"] == "ok: 8 of 8 visible"


@pytest.mark.root
def test_a_node_with_enough(in_namespace: InNamespace, nvml_folder: Path, tmp_path: Path) -> None:
    shm = "mount -t tmpfs -o size=5g tmpfs /dev/shm"
    findings = check(in_namespace, nvml_folder, tmp_path, shm, cards="8xA100")
    assert findings["shm.size"] == "ok: 5 GiB free of 5 GiB"


@pytest.mark.root
def test_two_kinds_of_cards_and_too_few(in_namespace: InNamespace, nvml_folder: Path, tmp_path: Path) -> None:
    findings = check(in_namespace, nvml_folder, tmp_path, cards="2xA100+2xV100")
    assert findings["gpu.visible"] == "error: 4 of 4 visible"
    assert findings["gpu.mixed"].startswith("warning: 2 x NVIDIA A100")


@pytest.mark.root
def test_output_on_memory(in_namespace: InNamespace, nvml_folder: Path, tmp_path: Path) -> None:
    mount = f"mount -t tmpfs -o size=8m,ro tmpfs {tmp_path}"
    findings = check(in_namespace, nvml_folder, tmp_path, mount, cards="8xA100")
    assert findings["disk.durable"] == f"warning: tmpfs at {tmp_path}"
    assert "read-only" in findings["disk.writable"]
    assert findings["disk.free"] == "warning: 8 MiB free"
