"""`ftlaunch prepare`, and a run that began without it and goes on with what it has kept."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from tests.fault.harness import ROOT, Job

MakeJob = Callable[..., Job]


def prepare(job: Job) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "launcher", "prepare", "--config", str(job.path)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_a_run_goes_on_with_prepared_data(make_job: MakeJob) -> None:
    job = make_job(training={"max_steps": 4}, checkpoint={"every_steps": 2})
    assert job.run().process.returncode == 0
    done = prepare(job)
    assert done.returncode == 0, done.stderr
    assert "kept in" in done.stdout
    job.configure({**job.config, "training": {**job.config["training"], "max_steps": 6}})
    run = job.run()
    assert run.process.returncode == 0, run.log
    assert run.events("resumed")[0]["step"] == 4
    log = (job.output_dir / "ftlaunch" / "logs" / "fork-server.log").read_text()  # of both starts
    assert log.count(" is used") == 1


def test_wrong_records_are_all_told_and_nothing_is_kept(make_job: MakeJob, tmp_path: Path) -> None:
    lines = Path(make_job().config["data"]["train"]).read_text().splitlines()
    lines[40], lines[50] = lines[40][:-9], json.dumps({"question": "why", "answer": ""})
    data = tmp_path / "wrong.jsonl"
    data.write_text("\n".join(lines))
    job = make_job(data={"train": str(data)})
    done = prepare(job)
    assert done.returncode == 2, done.stderr
    assert f"{data}:41: not JSON" in done.stdout
    assert f"{data}:51: `answer` is empty" in done.stdout.replace("\n         ", " ")
    assert not (job.output_dir / "ftlaunch" / "data").exists()
