"""`ftlaunch plan` and `check`: the whole way from job.yaml to the answer, with cards from the NVML stand-in."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from launcher.cli.main import main
from launcher.host.compute import read_cpu
from tests.nvml.build import with_cards
from tests.unit.checkpoint.checkpoint_folders import save

REPOSITORY = Path(__file__).parents[3]
Program = Callable[..., "subprocess.CompletedProcess[str]"]
Job = Callable[..., Path]


def planned(path: Path, capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["plan", "--config", str(path), "--json", *arguments]) == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return document


def tree(folder: Path) -> dict[str, bytes | None]:
    return {str(path): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


# -- precision ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cards", "visible", "ranks", "precision"),
    [
        ("8xA100", None, 8, "bf16"),
        ("8xV100", None, 8, "fp16"),
        ("4xA100+4xV100", None, 8, "fp16"),
        ("4xA100+4xV100", "0,1", 2, "bf16"),
        ("none", None, 1, "bf16" if read_cpu().flags_bf16 else "fp32"),
    ],
)
def test_precision_from_the_cards(
    nvml_folder: Path, program: Program, job: Job, cards: str, visible: str | None, ranks: int, precision: str
) -> None:
    environ = with_cards(nvml_folder, cards)
    if visible is not None:
        environ["CUDA_VISIBLE_DEVICES"] = visible
    done = program("plan", "--config", job(), "--json", environ=environ)
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    assert plan["device"]["value"] == ("cpu" if cards == "none" else "cuda")
    assert plan["num_ranks"]["value"] == ranks
    assert plan["precision"]["value"] == precision
    assert plan["hostfile"].endswith(f" slots={ranks}\n")


def test_bf16_that_was_asked_for_on_cards_without_it_is_refused(nvml_folder: Path, program: Program, job: Job) -> None:
    done = program("plan", "--config", job("precision: bf16\n"), "--json", environ=with_cards(nvml_folder, "8xV100"))
    assert done.returncode == 3
    assert done.stdout == ""
    assert done.stderr.startswith("ftlaunch: error: precision: bf16, but 8 x ")
    assert "V100" in done.stderr
    assert "precision: auto" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_same_on_one_card_of_a_mixed_node(nvml_folder: Path, program: Program, job: Job) -> None:
    environ = with_cards(nvml_folder, "4xA100+4xV100")
    assert program("plan", "--config", job("precision: bf16\n"), environ=environ).returncode == 3
    environ["CUDA_VISIBLE_DEVICES"] = "0,1,2,3"
    assert program("plan", "--config", job("precision: bf16\n"), environ=environ).returncode == 0


# -- where it runs -----------------------------------------------------------------------------------------------------

ON_DLC = {"HOSTNAME": "dlc1a-master-0", "WORLD_SIZE": "1", "RANK": "0", "NPROC_PER_NODE": "8", "MASTER_PORT": "23456"}


def test_the_platform_and_the_variables_that_say_so(program: Program, job: Job) -> None:
    place = json.loads(program("plan", "--config", job(), "--json", environ=ON_DLC).stdout)["place"]
    assert (place["platform"], place["num_nodes"], place["node_rank"]) == ("PAI-DLC PyTorchJob", 1, 0)
    assert (place["num_ranks_per_node"], place["master_port"]) == (8, 23456)
    assert dict(place["evidence"]) == ON_DLC
    text = program("plan", "--config", job(), environ=ON_DLC).stdout
    shown = ", ".join(f"{name}={value}" for name, value in place["evidence"])
    assert f"platform: PAI-DLC PyTorchJob ({shown})\n" in text


def test_job_yaml_and_a_platform_that_contradict_each_other(program: Program, job: Job) -> None:
    """Only what is written counts: the default of cluster.nodes contradicts nothing."""
    environ = {**ON_DLC, "WORLD_SIZE": "2"}
    done = program("plan", "--config", job(), "--set", "cluster.nodes=1", environ=environ)
    assert done.returncode == 2
    assert "has started 2 nodes" in done.stderr
    assert "cluster.nodes asks for 1" in done.stderr
    done = program("plan", "--config", job(), environ=environ)
    assert "cluster.nodes asks for" not in done.stderr


# -- what a plan is ----------------------------------------------------------------------------------------------------


def test_a_plan_changes_nothing(job: Job, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = job()
    before = tree(tmp_path)
    planned(path, capsys)
    assert main(["plan", "--config", str(path)]) == 0
    assert main(["check", "--config", str(path)]) in (0, 3)
    assert tree(tmp_path) == before


def test_a_plan_does_not_touch_a_run_that_is_there(
    job: Job, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = job()
    identity = planned(path, capsys)
    assert identity["resume"] == "from the beginning"
    (tmp_path / "run/checkpoint-7").mkdir(parents=True)
    (tmp_path / "run/ftlaunch/staging/checkpoint-9").mkdir(parents=True)
    before = tree(tmp_path)
    again = planned(path, capsys)
    assert again["resume"] == "from the beginning; checkpoint-7 refused: no MANIFEST.json: the save was not finished"
    assert tree(tmp_path) == before


def test_a_folder_of_another_run_is_refused_as_a_start_would(
    job: Job, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(tmp_path / "run", 10)
    for command in ("plan", "check"):
        assert main([command, "--config", str(job()), "--set", "check.skip=[model.files]"]) == 2
        assert "holds another run" in capsys.readouterr().err


def test_no_training_stack_is_imported(job: Job) -> None:
    code = (
        "import sys; from launcher.cli.main import main\n"
        "code = main(sys.argv[1:])\n"
        "heavy = {'torch', 'transformers', 'deepspeed', 'peft', 'accelerate'} & set(sys.modules)\n"
        "print(code, sorted(heavy), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "plan", "--config", str(job()), "--json"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert done.stderr == "0 []\n"
    assert json.loads(done.stdout)["v"] == 1


def test_every_setting_has_its_origin(
    job: Job, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FTLAUNCH_SET", "lora.alpha=8")
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    plan = planned(job("lora: {dropout: 0.1}\nenv: {OMP_NUM_THREADS: 3}\n"), capsys, "--set", "lora.r=4")
    origin = {key: (value["kind"], value["line"]) for key, value in plan["origin"].items()}
    assert origin["lora.r"] == ("--set", None)
    assert origin["lora.alpha"] == ("FTLAUNCH_SET", None)
    assert origin["lora.dropout"] == ("file", 4)
    assert origin["lora.bias"] == ("default", None)
    environment = {variable["name"]: (variable["value"], variable["origin"]) for variable in plan["environment"]}
    assert environment["OMP_NUM_THREADS"] == ("3", "job.yaml")
    assert environment["NCCL_DEBUG"] == ("INFO", "environment")
    assert environment["PYTHONUNBUFFERED"][1] in ("ftlaunch", "environment")
    assert "NCCL_DEBUG=INFO\n" in plan["deepspeed_env"]


def test_the_text_says_what_the_json_says(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    path = job("lora: {r: 4}\n")
    plan = planned(path, capsys)
    assert main(["plan", "--config", str(path)]) == 0
    text = capsys.readouterr().out
    for key in ("device", "precision"):
        assert plan[key]["reason"] in text
    assert "lora.r: 4  <- file, line 4" in text
    assert f"ftlaunch --config {path}" in text
    assert plan["config_sha"] in text
    for line in (plan["hostfile"] + plan["deepspeed_env"]).splitlines():
        assert f"  {line}\n" in text


@pytest.mark.parametrize("arguments", [["--json"], []], ids=["json", "text"])
def test_a_plan_in_a_jobs_log_shows_no_secret(
    job: Job, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    """The plan is printed into the logs of platforms, where more people read than may know the token."""
    path = job("env: {HF_TOKEN: hf_notToBeShown0123456789abcdefghijkl}\n")
    assert main(["plan", "--config", str(path), *arguments]) == 0
    shown = capsys.readouterr().out
    assert "HF_TOKEN" in shown
    assert "notToBeShown" not in shown


def test_a_reader_that_goes_away_is_no_error(job: Job) -> None:
    """`ftlaunch plan | head -1`"""
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, "-m", "launcher", "plan", "--config", str(job()), "--json"],
        cwd=REPOSITORY,
        stdout=writing,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
        timeout=60,
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("command", ["plan", "check", "run"])
@pytest.mark.parametrize(
    ("environ", "launcher"),
    [
        ({"TORCHELASTIC_RUN_ID": "none", "LOCAL_RANK": "0", "RANK": "0", "WORLD_SIZE": "2"}, "torchrun"),
        ({"LOCAL_RANK": "1", "CROSS_RANK": "0", "CROSS_SIZE": "1"}, "deepspeed"),
    ],
)
def test_inside_another_launchers_rank_it_refuses(
    job: Job, tmp_path: Path, program: Program, command: str, environ: dict[str, str], launcher: str
) -> None:
    path = job()
    before = tree(tmp_path)
    done = program(command, "--config", path, environ=environ)
    assert done.returncode == 2
    assert f"rank of {launcher}" in done.stderr
    assert "Traceback" not in done.stderr
    assert tree(tmp_path) == before, "nothing was started and nothing written"


def test_a_model_folder_with_a_strange_config_is_no_traceback(
    job: Job, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text("[]")
    path = job()
    path.write_text(path.read_text().replace("owner/model", "./model"))
    assert main(["plan", "--config", str(path)]) in (0, 2)


def test_check_as_json_counts_what_would_stop_the_start(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["check", "--config", str(job()), "--json"])
    document = json.loads(capsys.readouterr().out)
    assert document["v"] == 1
    assert document["refused"] is any(finding["severity"] == "error" for finding in document["findings"])
    assert code == (3 if document["refused"] else 0)


def test_check_refuses_a_card_that_is_not_there(nvml_folder: Path, program: Program, job: Job) -> None:
    environ = {**with_cards(nvml_folder, "2xA100"), "CUDA_VISIBLE_DEVICES": "0,7"}
    done = program("check", "--config", job(), "--json", environ=environ)
    assert done.returncode == 3, done.stderr
    errors = [finding["id"] for finding in json.loads(done.stdout)["findings"] if finding["severity"] == "error"]
    assert "gpu.visible" in errors
