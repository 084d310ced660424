from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from pydantic import ValidationError

from launcher.config.load import LoadedJob, Origin, load_job
from launcher.config.models import JobConfig
from launcher.errors import UserError

Load = Callable[..., LoadedJob]
MINIMAL = "output_dir: runs/first\nmodel: {path: owner/model}\ndata: {train: train.jsonl}\n"


def test_least_settings_get_defaults(load: Load, tmp_path: Path) -> None:
    config = load().config
    assert config.output_dir == str(tmp_path / "runs/first")
    assert config.data is not None
    assert config.data.train == [str(tmp_path / "train.jsonl")]
    assert (config.method, config.precision, config.lora.r, config.lora.effective_alpha) == ("lora", "auto", 16, 32)
    assert (config.checkpoint.every_steps, config.checkpoint.keep, config.spot.exit_code) == (500, 3, 138)


def test_priority_is_set_then_environment_then_file_then_default(load: Load) -> None:
    job = load(
        "lora:\n  r: 4\n  alpha: 4\n  dropout: 0.1\n",
        "lora.r=16",
        FTLAUNCH_SET="lora.r=8;lora.alpha=8\n restart.adjust=false",
    )
    assert (job.config.lora.r, job.config.lora.alpha, job.config.lora.dropout) == (16, 8, 0.1)
    assert job.config.restart.adjust is False
    assert job.origin["lora.r"] == Origin("--set")
    assert job.origin["lora.alpha"] == Origin("FTLAUNCH_SET")
    assert job.origin["lora.dropout"] == Origin("file", 7)
    assert job.origin["lora.bias"] == Origin("default")
    assert job.origin["output_dir"] == Origin("file", 1)


@pytest.mark.parametrize(
    ("given", "steps"), [("auto", None), ("off", None), ("on", 1), ("1", 1), ("7", 7), ("'on'", 1)]
)
def test_how_often_checkpoints_are_kept_in_memory(load: Load, given: str, steps: int | None) -> None:
    checkpoint = load(f"checkpoint: {{memory: {given}}}\n").config.checkpoint
    assert checkpoint.memory_steps == steps
    assert (checkpoint.budget, checkpoint.peer) == (0.01, "auto")


def test_every_setting_has_an_origin(load: Load) -> None:
    job = load("training: {max_steps: 5, lr_scheduler_kwargs: {num_cycles: 2}}\ndeepspeed: ds.json\nenv: {A: 1}\n")
    assert job.origin["training.max_steps"] == Origin("file", 4)
    assert job.origin["training.lr_scheduler_kwargs.num_cycles"] == Origin("file", 4)
    assert job.origin["deepspeed.config"] == Origin("file", 5)
    assert job.origin["env.A"] == Origin("file", 6)
    assert job.origin["checkpoint.keep"] == Origin("default")


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("training.learning_rate=1e-4", 1e-4),
        ("training.max_steps=-1", -1),
        ("training.run_name='7'", "7"),
        ("training.run_name=a: b # c", "a: b # c"),
        ("training.run_name=@x", "@x"),
        ("training.report_to=[tensorboard, wandb]", ["tensorboard", "wandb"]),
        ("training.lr_scheduler_kwargs={num_cycles: 2}", {"num_cycles": 2}),
        ("training.data_seed=null", None),
        ("training.data_seed=", None),
        ("training.gradient_checkpointing=true", True),
        ("training.run_name==", "="),
    ],
)
def test_override_values_are_yaml_scalars(load: Load, override: str, value: object) -> None:
    key = override.split("=", 1)[0].removeprefix("training.")
    assert load("", override).config.training[key] == value


def test_override_of_a_section_replaces_it(load: Load) -> None:
    job = load("lora: {r: 4, alpha: 4}\n", "lora={r: 8}")
    assert (job.config.lora.r, job.config.lora.alpha) == (8, None)
    assert job.origin["lora.r"] == Origin("--set")
    assert job.origin["lora.alpha"] == Origin("default")


def test_override_changes_one_of_two_aliases_only(load: Load) -> None:
    job = load(
        "training:\n  lr_scheduler_kwargs: &k {a: 1}\n  gradient_checkpointing_kwargs: *k\n",
        "training.lr_scheduler_kwargs.a=2",
    )
    assert job.config.training == {"lr_scheduler_kwargs": {"a": 2}, "gradient_checkpointing_kwargs": {"a": 1}}


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("lora.rank=8", ["--set: lora.rank is not a key of lora", "write lora.r"]),
        ("trainng.max_steps=8", ["--set: trainng is not a key of job.yaml", "did you mean training?"]),
        ("lora.r=x", ["--set: lora.r has a value", "a whole number"]),
        ("lora.r", ["--set: there is no '='", "training.max_steps=100"]),
        ("env.HF_TOKEN hf_abc", ["--set: there is no '='", "env.HF_TOKEN (the rest is not shown)"]),
        ("data.train[0]=a.jsonl", ["--set: the key has a form", "data.train=[a.jsonl, b.jsonl]"]),
        ("data.train=[a.jsonl", ["--set: data.train has a malformed value"]),
        ("output_dir.x=1", ["--set: output_dir.x cannot be set", "output_dir is given as a single value"]),
    ],
)
def test_wrong_override_says_what_to_write(load: Load, override: str, parts: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        load("", override)
    for part in parts:
        assert part in str(caught.value)
    assert "hf_abc" not in str(caught.value)


def test_wrong_value_from_the_environment_names_the_variable(load: Load) -> None:
    with pytest.raises(UserError, match=r"^FTLAUNCH_SET: checkpoint.keep has a value"):
        load("", FTLAUNCH_SET="checkpoint.keep=0")


def test_folder_with_space_chinese_name_and_brackets(tmp_path: Path) -> None:
    folder = tmp_path / "my runs [1]" / "保险"
    folder.mkdir(parents=True)
    (folder / "任务.yaml").write_text(
        "output_dir: ./结果\nmodel: {path: ./模型 一}\n"
        "data: {train: 训练.jsonl, eval: 'e*.jsonl', system_prompt: 你好}\n",
        "utf-8",
    )
    config = load_job(folder / "任务.yaml", [], {}).config
    assert config.output_dir == str(folder / "结果")
    assert config.model is not None
    assert config.model.path == str(folder / "模型 一")
    assert config.data is not None
    assert config.data.train == [str(folder / "训练.jsonl")]
    assert config.data.eval[0].endswith("/my runs [[]1]/保险/e*.jsonl"), "the folder's brackets are no pattern"
    assert config.data.system_prompt == "你好"


def test_byte_order_mark_and_windows_line_ends(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_bytes(b"\xef\xbb\xbf" + MINIMAL.replace("\n", "\r\n").encode())
    assert load_job(path, [], {}).origin["data.train"] == Origin("file", 3)


def test_anchors_and_merges(load: Load) -> None:
    job = load("lora: &base\n  r: 8\n  alpha: 8\ntraining:\n  lr_scheduler_kwargs:\n    <<: *base\n    alpha: 9\n")
    assert job.config.training["lr_scheduler_kwargs"] == {"r": 8, "alpha": 9}
    assert job.origin["training.lr_scheduler_kwargs.alpha"] == Origin("file", 10)
    assert job.origin["training.lr_scheduler_kwargs.r"] == Origin("file", 5)


def test_yaml_1_2_reads_what_people_mean(load: Load) -> None:
    job = load("training: {learning_rate: 1e-4, run_name: on}\ncluster: {nodes: 2:4}\n")
    assert job.config.training == {"learning_rate": 1e-4, "run_name": "on"}
    assert (job.config.cluster.min_nodes, job.config.cluster.max_nodes) == (2, 4)


def test_numbers_in_env_stay_as_written(load: Load) -> None:
    job = load("env: {A: 1.10, B: 0x1F, C: 1_000, D: '7', E: yes}\n", "env.F=2")
    assert job.config.env == {"A": "1.10", "B": "0x1F", "C": "1_000", "D": "7", "E": "yes", "F": "2"}


def test_hosts_alone_give_the_number_of_nodes(load: Load) -> None:
    assert load("cluster: {hosts: [a, b]}\n").config.cluster.max_nodes == 2


def test_variables_and_home_are_expanded_in_paths_only(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(
        "output_dir: ~/runs/${JOB}-$N\nmodel: {path: $MODELS/qwen}\n"
        "data: {train: ['${DATA}/a.jsonl'], system_prompt: 'costs ${JOB} $5'}\n"
    )
    config = load_job(path, [], {"HOME": "/h", "JOB": "j", "N": "1", "MODELS": "/m", "DATA": "/d"}).config
    assert config.output_dir == "/h/runs/j-1"
    assert config.model is not None
    assert config.model.path == "/m/qwen"
    assert config.data is not None
    assert (config.data.train, config.data.system_prompt) == (["/d/a.jsonl"], "costs ${JOB} $5")


def test_empty_variable_is_refused_because_runs_would_share_a_folder(load: Load) -> None:
    with pytest.raises(UserError, match="uses the environment variable JOB, which is empty"):
        load("", "output_dir=/mnt/runs/$JOB", JOB="")


def test_sha_follows_the_settings_and_not_their_spelling(load: Load) -> None:
    first = load("lora: {r: 8}\n").sha
    assert first == load("# a comment\nlora:\n  r: 8\n").sha == load("", "lora.r=8").sha
    assert first != load("lora: {r: 9}\n").sha
    assert len(first) == 16


def test_command_instead_of_model_and_data(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text("output_dir: /tmp/x\nmodel: null\ncommand: [python, train.py]\nenv: {A: 1}\n")
    assert load_job(path, [], {}).config.command == ["python", "train.py"]


def test_one_drill_or_several(load: Load) -> None:
    one = load("drill: {kill: {rank: 1, step: 8}}\n").config.drill
    assert one is not None
    assert [(kill.rank, kill.step, kill.signal) for kill in one.kill] == [(1, 8, "SIGKILL")]


def test_no_file_a_folder_or_the_data_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my-job.yaml").write_text(MINIMAL)
    big = tmp_path / "data.jsonl"
    big.write_bytes(b"x" * (2 << 20))
    for path, part in [
        (None, "ftlaunch --config my-job.yaml"),
        (Path("job.yaml"), "no such file. In that folder: my-job.yaml"),
        (Path("gone/job.yaml"), "is the volume mounted?"),
        (tmp_path, "is a folder. Give the file in it"),
        (big, "2.0 MiB, more than any job file"),
    ]:
        with pytest.raises(UserError, match=part.replace("?", r"\?").replace(".", r"\.")):
            load_job(path, [], {})


def test_models_alone_refuse_contradictions_too() -> None:
    with pytest.raises(ValidationError, match="method is full"):
        JobConfig.model_validate(
            {"output_dir": "/x", "model": {"path": "m"}, "data": {"train": "a"}, "method": "full", "lora": {"r": 8}}
        )


def test_a_configuration_is_read_again_from_its_own_dump(load: Load) -> None:
    config = load("lora: {r: 8}\n").config
    dumped = config.model_dump(mode="json", exclude_unset=True)
    assert JobConfig.model_validate(dumped) == config


@pytest.mark.parametrize(
    "text",
    [
        "a: " + "[" * 50_000,
        "a: &a [x, x]\n"
        + "".join(f"{n}: &{n} [{', '.join([f'*{m}'] * 30)}]\n" for m, n in ("ab", "bc", "cd", "de", "ef")),
        "output_dir: !!bool x\n",
        "output_dir: !!int x\n",
    ],
    ids=["deep", "aliases-that-multiply", "wrong-bool", "wrong-int"],
)
def test_hostile_text_is_a_plain_mistake(tmp_path: Path, text: str) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(text)
    with pytest.raises(UserError):
        load_job(path, [], {})
