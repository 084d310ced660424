"""Cards from the stand-in library, read by the real nvidia-ml-py in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from launcher.host.gpus import Gpu, gpu_device_files, select_visible
from tests.nvml.build import with_cards

REPOSITORY = Path(__file__).parents[3]
MIB = 1 << 20
READ = """
import dataclasses, json, os, pathlib, sys
from launcher.host.gpus import read_gpus, select_visible
reading = read_gpus(float(os.environ.get("TIMEOUT_S", "30")))
visible = select_visible(os.environ.get("CUDA_VISIBLE_DEVICES"), reading.gpus)
print(json.dumps(dataclasses.asdict(reading) | {"visible": visible.indices, "missing": visible.missing}))
"""


def read(nvml_folder: Path, cards: str, environ: dict[str, str] | None = None, **options: str) -> dict[str, Any]:
    clean = {"PATH": "/usr/bin:/bin"} | (environ or {})
    answer = subprocess.run(
        [sys.executable, "-c", READ],
        env=with_cards(nvml_folder, cards, clean, **options),
        cwd=REPOSITORY,
        check=True,
        capture_output=True,
        text=True,
    )
    facts: dict[str, Any] = json.loads(answer.stdout)
    return facts


def test_eight_a100(nvml_folder: Path) -> None:
    facts = read(nvml_folder, "8xA100", DRIVER="550.54.14", CUDA="12.4")
    assert facts["nvml"] == "ok"
    assert [gpu["index"] for gpu in facts["gpus"]] == list(range(8))
    assert {gpu["name"] for gpu in facts["gpus"]} == {"NVIDIA A100-SXM4-80GB"}
    assert {tuple(gpu["capability"]) for gpu in facts["gpus"]} == {(8, 0)}
    assert {gpu["memory_total_bytes"] for gpu in facts["gpus"]} == {81251 * MIB}
    assert (facts["driver"], facts["cuda_driver"]) == ("550.54.14", "12.4")
    assert facts["visible"] == list(range(8))


@pytest.mark.parametrize(
    ("card", "capability", "total_mib"),
    [("V100", (7, 0), 16160), ("T4", (7, 5), 15109), ("A10", (8, 6), 22731), ("H100", (9, 0), 81559)],
)
def test_capability_and_memory_of_each_card(
    nvml_folder: Path, card: str, capability: tuple[int, int], total_mib: int
) -> None:
    (gpu,) = read(nvml_folder, f"1x{card}")["gpus"]
    assert tuple(gpu["capability"]) == capability
    assert gpu["memory_total_bytes"] == total_mib * MIB


def test_mixed_node_one_lost_card_one_in_use(nvml_folder: Path) -> None:
    facts = read(nvml_folder, "4xA100+4xV100", LOST="5", USED_MIB="1=20480")
    assert [gpu["index"] for gpu in facts["gpus"]] == [0, 1, 2, 3, 4, 6, 7]
    assert facts["lost"] == ["GPU 5: GPU is lost"]
    assert [gpu["memory_used_bytes"] for gpu in facts["gpus"][:3]] == [0, 20480 * MIB, 0]


def test_a_driver_before_510_counts_its_reserve_as_used(nvml_folder: Path) -> None:
    (gpu,) = read(nvml_folder, "1xA100", OLD="1", USED_MIB="100")["gpus"]
    assert gpu["memory_used_bytes"] == (100 + 512) * MIB


def test_health_of_each_card(nvml_folder: Path) -> None:
    broken = {"ECC": "1=2", "REMAP": "1=failed", "MODE": "2=2", "THROTTLE": "3=64", "LINKS": "3=10"}
    held = {"PROCESS": f"0={os.getpid()}", "USED_MIB": "0=2048"}
    one, two, three, four = (gpu["health"] for gpu in read(nvml_folder, "4xA100", **broken, **held)["gpus"])
    assert (one["uncorrected_errors"], two["uncorrected_errors"]) == (0, 2)
    assert (two["rows_pending"], two["rows_failed"]) == (False, True)
    assert (one["compute_mode"], three["compute_mode"]) == ("default", "prohibited")
    assert (three["throttled"], four["throttled"]) == ([], ["temperature (hardware)"])
    assert (three["links"], four["links"]) == ([12, 12], [10, 12])
    name = Path("/proc/self/comm").read_text().strip()
    assert one["processes"] == [{"pid": os.getpid(), "name": name, "memory_bytes": 2048 * MIB}]
    assert two["processes"] == []


def test_cards_before_ampere_retire_pages_and_say_nothing_of_rows(nvml_folder: Path) -> None:
    (gpu,) = read(nvml_folder, "1xV100", REMAP="pending")["gpus"]
    assert (gpu["health"]["rows_pending"], gpu["health"]["rows_failed"], gpu["health"]["links"]) == (True, None, None)


def test_no_cards(nvml_folder: Path) -> None:
    assert read(nvml_folder, "none")["gpus"] == []


@pytest.mark.parametrize(("state", "reason"), [("no-driver", "Driver Not Loaded"), ("mismatch", "version mismatch")])
def test_a_broken_driver_is_told(nvml_folder: Path, state: str, reason: str) -> None:
    facts = read(nvml_folder, state)
    assert facts["gpus"] == []
    assert reason in facts["nvml"]


def test_a_driver_that_never_answers_is_waited_for_only_so_long(nvml_folder: Path) -> None:
    assert read(nvml_folder, "hang", {"TIMEOUT_S": "0.2"})["nvml"] == "NVML gave no answer within 0.2 s"


def test_a_mig_device_is_visible_by_its_uuid(nvml_folder: Path) -> None:
    (mig,) = read(nvml_folder, "1xA100", MIG="1")["gpus"][0]["mig_uuids"]
    assert mig.startswith("MIG-")
    facts = read(nvml_folder, "1xA100", {"CUDA_VISIBLE_DEVICES": mig}, MIG="1")
    assert (facts["visible"], facts["missing"]) == ([0], [])


CARDS = tuple(Gpu(i, f"GPU-a{i}0000", "NVIDIA A100", 1, 0, (8, 0)) for i in range(4))


@pytest.mark.parametrize(
    ("setting", "indices", "missing"),
    [
        (None, (0, 1, 2, 3), ()),
        ("", (), ()),
        ("-1", (), ()),
        ("NoDevFiles", (), ()),
        ("2,0", (2, 0), ()),
        (" 1 , 3 ", (1, 3), ()),
        ("GPU-a2", (2,), ()),
        ("GPU-a", (), ("GPU-a",)),  # the beginning of several
        ("0,-1,1", (0,), ()),
        ("0,7,1", (0,), ("7",)),  # CUDA stops at the first that is not there
        ("MIG-1", (), ("MIG-1",)),
        ("all", (), ("all",)),
    ],
)
def test_cuda_visible_devices(setting: str | None, indices: tuple[int, ...], missing: tuple[str, ...]) -> None:
    visible = select_visible(setting, CARDS)
    assert (visible.indices, visible.missing) == (indices, missing)


def test_bf16_begins_with_ampere_whatever_torch_says_about_emulation() -> None:
    assert Gpu(0, "", "A100", 1, 0, (8, 0)).has_bf16
    assert not Gpu(0, "", "T4", 1, 0, (7, 5)).has_bf16


def test_device_files_of_cards_only(tmp_path: Path) -> None:
    (tmp_path / "dev").mkdir()
    for name in ("nvidia0", "nvidia10", "nvidiactl", "nvidia-uvm", "alixpu0", "null"):
        (tmp_path / "dev" / name).touch()
    assert gpu_device_files(tmp_path) == ("/dev/alixpu0", "/dev/nvidia0", "/dev/nvidia10")


def test_the_health_of_each_card_and_only_what_it_has(nvml_folder: Path) -> None:
    """For incident bundles: a lost card is told as lost, a value that a card lacks is left out."""
    read_health = "import json; from launcher.host.gpus import read_gpu_health; print(json.dumps(read_gpu_health(30)))"
    told = {}
    for ecc in ("", "3"):
        environ = with_cards(nvml_folder, "2xV100", {"PATH": "/usr/bin:/bin"}, LOST="1", USED_MIB="100", ECC=ecc)
        answer = subprocess.run(
            [sys.executable, "-c", read_health], env=environ, cwd=REPOSITORY, check=True, capture_output=True, text=True
        )
        told[ecc] = json.loads(answer.stdout)
    well, lost = told["3"]
    assert (well["temperature_c"], well["memory_used_bytes"], well["ecc_uncorrected"]) == (41, 100 * MIB, 3)
    assert "remapped_rows" not in well
    assert lost == {"index": 1, "lost": "GPU is lost"}
    assert told[""][0]["ecc_uncorrected"] == 0
