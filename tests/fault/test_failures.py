"""Failures of the job itself: named, proven, and not tried again when a rerun would meet them again."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from tests.fault.harness import Job

MakeJob = Callable[..., Job]


def test_an_exception_of_the_training_code_stops_at_once(make_job: MakeJob) -> None:
    # A scheduler option that only the optimizer's construction can refuse: an exception on every rank.
    job = make_job(training={"lr_scheduler_type": "cosine", "lr_scheduler_kwargs": {"no_such_option": 1}})
    run = job.run()
    assert run.process.returncode == 1, run.log
    assert len(run.events("generation_started")) == 1
    (incident,) = run.events("incident")
    assert incident["class"] == "user_code"
    assert not incident["retryable"]
    assert "no_such_option" in incident["evidence"][0]["text"]
    bundle = Path(incident["bundle"])
    assert {"verdict.json", "summary.md", "environment.json", "host.json", "rank-0.log", "rank-1.log"} <= {
        path.name for path in bundle.iterdir()
    }
    assert json.loads((bundle / "verdict.json").read_text())["action"] == "stop"
    assert "no_such_option" in run.log


def test_a_token_beyond_the_vocabulary_is_named_before_training(make_job: MakeJob, tiny: Path, tmp_path: Path) -> None:
    model = tmp_path / "small-vocabulary"
    model.mkdir()
    for path in (tiny / "model").iterdir():
        (model / path.name).write_bytes(path.read_bytes())
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    last = max(vocabulary, key=lambda word: vocabulary[word])
    vocabulary["batch"], vocabulary[last] = 5000, vocabulary["batch"]
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    job = make_job(model={"path": str(model)})
    run = job.run()
    assert run.process.returncode == 2, run.log
    assert "token id 5000" in run.log


def test_lora_without_a_target_names_the_modules_that_there_are(make_job: MakeJob) -> None:
    job = make_job(lora={"target_modules": ["query_proj"]})
    run = job.run()
    assert run.process.returncode == 2, run.log
    assert "'query_proj'" in run.log
    assert "q_proj" in run.log
    assert "v_proj" in run.log


def test_a_rank_that_always_dies_uses_up_the_budget(make_job: MakeJob) -> None:
    kills = [{"rank": 0, "step": 1}] * 3
    job = make_job(restart={"max_without_progress": 1, "backoff_seconds": 0.1}, drill={"kill": kills})
    run = job.run()
    # The first attempt reached a new step, the second and third did not: one restart without progress was allowed.
    assert [event["action"] for event in run.events("decision")] == ["restart", "restart", "stop"]
    assert run.process.returncode == 138, run.log
    assert "best on another node" in run.log


def test_a_missing_package_is_an_import_error(make_job: MakeJob, tmp_path: Path) -> None:
    broken = tmp_path / "broken" / "peft"
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text("import a_package_that_is_not_there\n")
    root = Path(__file__).resolve().parents[2]
    job = make_job()
    run = job.run(environ={"PYTHONPATH": f"{broken.parent}:{root}"})
    assert run.process.returncode == 1, run.log
    (incident,) = run.events("incident")
    assert incident["class"] == "import_abi"
    assert "a_package_that_is_not_there" in run.log


def test_secrets_reach_no_file_of_the_run(make_job: MakeJob) -> None:
    secret = "hf_ThisIsATokenForThisTestOnly000000"
    job = make_job(
        training={"lr_scheduler_type": "cosine", "lr_scheduler_kwargs": {"no_such_option": 1}},
        env={"HF_TOKEN": secret, "MY_ACCESS_KEY": "AKsecretvalue123456"},
    )
    run = job.run(environ={"OSS_ACCESS_KEY_SECRET": "anothersecretvalue"})
    assert run.process.returncode == 1
    for path in job.output_dir.rglob("*"):
        if path.is_file():
            content = path.read_bytes()
            for value in (secret, "AKsecretvalue123456", "anothersecretvalue"):
                assert value.encode() not in content, path
    assert secret not in run.log
