"""`ftlaunch plan --gpus ... --model ...`: in half a minute, on a machine that has nothing."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from launcher.cli.main import main
from launcher.plan.known_models import known_config
from tests.nvml.build import with_cards

Program = Callable[..., "subprocess.CompletedProcess[str]"]

ASKED = ("plan", "--gpus", "8xA100-80G", "--model", "Qwen/Qwen2.5-32B")


def test_it_fits_on_so_many_cards_and_takes_so_long(capsys: pytest.CaptureFixture[str]) -> None:
    more = ("--method", "lora", "--tokens", "1e9", "--price", "2", "--preemptions-per-day", "12")
    assert main([*ASKED, *more]) == 0
    text = capsys.readouterr().out
    for words in ("fits:", "yes, ZeRO 2", "fewest cards:", "at 40% of 312 TFLOP/s", "hours for 1,000,000,000 tokens"):
        assert words in text
    assert "for each card and hour" in text
    assert "12 preemptions a day" in text
    assert "no: " in text, "what was rejected, and why"
    assert len(text.splitlines()) <= 24
    assert max(map(len, text.splitlines())) <= 170


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*ASKED, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["v"] == 1
    assert document["fits"] is True
    assert document["model"] == {"name": "Qwen/Qwen2.5-32B", "parameters": 32_763_876_352}
    best = document["best"]
    assert best["total_bytes"] == sum(value for key, value in best["memory"].items() if key != "peak")
    assert {one["zero_stage"] for one in document["alternatives"]} == {2, 3}


def test_what_does_not_fit_is_no_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--gpus", "1xT4-16G", "--model", "Qwen/Qwen2.5-72B", "--max-length", "65536"]) == 0
    text = capsys.readouterr().out
    assert "no, on 1 card of 14.6 GiB" in text
    assert "tokens/s" not in text


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--gpus", "8xA100-80G"], "go together"),
        (["--method", "full"], "go together"),
        (["--gpus", "8xA100-80G", "--model", "Qwen/Qwen2.5-33B"], "did you mean"),
        (["--gpus", "8xA100-81G", "--model", "Qwen/Qwen2.5-32B"], "A100-80G"),
        (["--gpus", "8xA100-80G", "--model", "Qwen/Qwen2.5-32B", "--max-length", "0"], "--max-length 0"),
        (["--gpus", "8xA100-80G", "--model", "Qwen/Qwen2.5-32B", "--config", "job.yaml"], "not both"),
    ],
)
def test_mistakes(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *arguments]) == 2
    assert said in capsys.readouterr().err


def test_with_a_job_the_plan_shows_the_same_parts_and_check_the_same_sum(
    nvml_folder: Path, program: Program, job: Callable[..., Path], tmp_path: Path
) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text(json.dumps(known_config("Qwen/Qwen2.5-7B")), "utf-8")
    path = job("method: full\ntraining: {per_device_train_batch_size: 32}\ncheck: {skip: [versions.stack]}\n")
    environ = {**with_cards(nvml_folder, "8xA100"), "FTLAUNCH_SET": f"model.path={tmp_path / 'model'}"}
    done = program("plan", "--config", path, environ=environ)
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if "memory of each rank:" in line]
    assert "at its peak: logits " in line
    assert "ZeRO 3, optimizer in host memory" in done.stdout
    assert "no: " in done.stdout
    size = line.split("memory of each rank:")[1].split(" at its peak")[0].strip()
    checked = json.loads(program("check", "--config", path, "--json", environ=environ).stdout)
    (finding,) = [finding for finding in checked["findings"] if finding["id"] == "gpu.memory"]
    assert finding["severity"] == "warning"
    assert finding["measured"] == f"{size} at the peak of a step"
