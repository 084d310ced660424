"""Checkpoints as a training with DeepSpeed's ZeRO leaves them, made of small files and committed by the real code."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from launcher.checkpoint.commit import commit_folder, staging_root
from launcher.checkpoint.manifest import Manifest, record_files

IDENTITY: Mapping[str, Any] = {"model.path": "/models/base", "method": "lora", "lora.r": 16, "deepspeed.stage": 2}


def state_files(step: int, world_size: int, *, max_steps: int = 100) -> dict[str, bytes]:
    """Relative name -> content of what a whole checkpoint of this step holds."""
    state = json.dumps({"global_step": step, "max_steps": max_steps})
    files = {
        "adapter_model.safetensors": f"weights of step {step}".encode() * 50,
        "adapter_config.json": b"{}",
        "trainer_state.json": state.encode(),
        "scheduler.pt": f"schedule at {step}".encode(),
        f"global_step{step}/mp_rank_00_model_states.pt": b"model states",
        "latest": f"global_step{step}".encode(),
    }
    for rank in range(world_size):
        files[f"rng_state_{rank}.pth" if world_size > 1 else "rng_state.pth"] = b"random state"
        shard = f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        files[f"global_step{step}/{shard}"] = f"optimizer shard {rank} at {step}".encode()
    return files


def stage(
    output_dir: Path, step: int, world_size: int = 2, *, without: Collection[str] = (), generation: int = 1
) -> Path:
    """Write what the ranks of this generation write, not committed yet."""
    folder = staging_root(output_dir, generation) / f"checkpoint-{step}"
    for name, content in state_files(step, world_size).items():
        if name not in without:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)
    return folder


def manifest_of(folder: Path, step: int, world_size: int = 2, **fields: Any) -> Manifest:
    given: dict[str, Any] = {
        "step": step,
        "world_size": world_size,
        "num_nodes": 1,
        "precision": "bf16",
        "run_id": "feedface",
        "config_sha": "0123456789abcdef",
        "identity": IDENTITY,
        "samples_seen": step * 8,
        "versions": {"torch": "2.11"},
        "files": record_files(folder),
        "global_batch_size": 8,
        "planned_steps": 100,
        "plan": {"max_steps": 100, "num_train_epochs": None},
    }
    return Manifest(**(given | fields))


def save(output_dir: Path, step: int, world_size: int = 2, *, without: Collection[str] = (), **fields: Any) -> Path:
    """A checkpoint saved the way a run does it; `without` leaves files out before the manifest is written."""
    staged = stage(output_dir, step, world_size, without=without)
    return commit_folder(staged, output_dir / staged.name, manifest_of(staged, step, world_size, **fields)).path


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
