"""What people write today: Trainer, PEFT LoRA and DeepSpeed ZeRO-2, resuming from the newest checkpoint. It runs under
every launcher but ftlaunch, which needs no script: there the same job is a job.yaml (job_files.py).

Each rank adds lines to `FOLDER/steps.jsonl`: its start, and the end of each step, in seconds of the machine's clock.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

RANK = int(os.environ["RANK"])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--save-every", type=int, required=True)
    parser.add_argument("--max-length", type=int, required=True)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--user-code", action="store_true", help="the model's folder has code of its own")
    parser.add_argument("--save-at-sigterm", action="store_true", help="Trainer's enable_jit_checkpoint")
    parser.add_argument("--no-deepspeed", action="store_true", help="DDP: its checkpoints fit another world size")
    options, _ = parser.parse_known_args()  # some launchers add --local_rank
    tell(options.folder, "started")

    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainerCallback, TrainingArguments
    from transformers.trainer_utils import get_last_checkpoint

    torch.manual_seed(42)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    texts = [json.loads(line)["text"] for line in Path(options.data).read_text("utf-8").splitlines()]
    encoded = tokenizer(texts, truncation=True, max_length=options.max_length)["input_ids"]
    samples = [{"input_ids": torch.tensor(ids), "labels": torch.tensor(ids)} for ids in encoded]

    deepspeed = {
        "zero_optimization": {"stage": 2},
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "train_batch_size": "auto",
        "bf16": {"enabled": "auto"},
        "zero_allow_untested_optimizer": True,
    }
    run = options.folder / "run"
    arguments = TrainingArguments(
        output_dir=str(run),
        per_device_train_batch_size=1,
        max_steps=options.steps,
        save_steps=options.save_every,
        save_total_limit=2,
        logging_steps=1,
        learning_rate=1e-3,
        report_to=[],
        deepspeed=None if options.no_deepspeed else deepspeed,
        use_cpu=True,
        bf16=options.bf16,
        disable_tqdm=True,
        enable_jit_checkpoint=options.save_at_sigterm,
    )
    dtype = torch.bfloat16 if options.bf16 else torch.float32
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype, trust_remote_code=options.user_code)
    lora = LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    model = get_peft_model(model, lora)

    class Clock(TrainerCallback):  # type: ignore[misc]  # transformers is untyped here
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            tell(options.folder, "step", step=state.global_step)

    trainer = Trainer(model=model, args=arguments, train_dataset=samples, callbacks=[Clock()])
    trainer.train(resume_from_checkpoint=get_last_checkpoint(str(run)) if run.is_dir() else None)


def tell(folder: Path, event: str, **fields: object) -> None:
    record = {"t": time.time(), "rank": RANK, "pid": os.getpid(), "event": event, **fields}
    with (folder / "steps.jsonl").open("a") as stream:
        stream.write(json.dumps(record) + "\n")  # a short line is one write: those of two ranks do not mix


if __name__ == "__main__":
    main()
