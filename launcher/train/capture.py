"""What a checkpoint of one rank is made of, taken while the training thread stands still and written later.

Invariant: a part refers only to what does not change before the next backward pass of an optimizer step: tensors that
the optimizer alone writes, and copies of everything else. Whoever writes the parts has to be done by then.
"""

from __future__ import annotations

import copy
import json
import logging
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import peft.peft_model as peft_module
import safetensors.torch
import torch
import transformers.modeling_utils as modeling_module
from deepspeed.runtime.checkpoint_engine import TorchCheckpointEngine
from transformers.trainer_callback import ExportableState

from launcher.host.local_folder import RANK_PREFIX, SCRATCH_VARIABLE
from launcher.train.random_state import random_states

log = logging.getLogger("ftlaunch.resilience")


class Stream(Protocol):
    def write(self, data: Any, /) -> int: ...


class Sink(Protocol):
    """Where parts are written: `launcher.checkpoint.snapshot.SlotWriter`."""

    def open(self, name: str) -> Any:
        """A context manager that gives a `Stream`; one at a time."""


@dataclass(frozen=True)
class Part:
    """One or more files of a checkpoint, still to be written."""

    write: Callable[[Sink], None]


def text_part(name: str, make: Callable[[], str]) -> Part:
    """`make` is called by the writer."""

    def write(sink: Sink) -> None:
        with sink.open(name) as stream:
            stream.write(make().encode())

    return Part(write)


def torch_part(name: str, state: Any) -> Part:
    def write(sink: Sink) -> None:
        with sink.open(name) as stream:
            torch.save(state, stream)

    return Part(write)


class _Kept(TorchCheckpointEngine):  # type: ignore[misc]  # deepspeed is untyped here
    """A DeepSpeed checkpoint engine that keeps what it is to save."""

    def __init__(self) -> None:
        super().__init__()
        self.saved: list[tuple[str, dict[str, Any]]] = []

    def save(self, state_dict: dict[str, Any], path: str) -> None:
        self.saved.append((path, state_dict))


class EngineCapture:
    """The files that DeepSpeed's `save_checkpoint` would write on this rank, without its barriers, step after step.

    What DeepSpeed finds out by walking over all modules (names, shapes, shared weights) does not change while a job
    trains; it is found once. For a LoRA model of 2,500 modules that is 20 ms of every save.
    """

    def __init__(self, engine: Any, *, trainable_only: bool) -> None:
        """`trainable_only`: frozen weights are left out (they come from the base model at every start)."""
        self._engine = engine
        self._trainable_only = trainable_only
        self._module: list[tuple[str, Any, bool]] = []  # name, tensor, whether it is a buffer
        self._found = self._find() if engine.save_non_zero_checkpoint else {}
        self.parts(0)  # for nothing, but the first time is the longest, and no step waits for it here

    def parts(self, step: int) -> list[Part]:
        engine, tag = self._engine, f"global_step{step}"
        kept = _Kept()
        with _instead(engine, {"checkpoint_engine": kept, "_copy_recovery_script": lambda save_path: None}):
            if engine.save_non_zero_checkpoint:
                with _instead(engine, self._found):
                    engine._save_checkpoint("", tag, exclude_frozen_parameters=self._trainable_only)
            if engine.save_zero_checkpoint:
                engine._save_zero_checkpoint("", tag)
        return [torch_part(path, state) for path, state in kept.saved]

    def _find(self) -> dict[str, Any]:
        """The engine's own methods, with answers that are known already."""
        engine = self._engine
        buffer_names = engine._get_buffer_names()
        buffers = set(buffer_names)
        state = engine.module_state_dict(exclude_frozen_parameters=self._trainable_only)
        if engine.zero_optimization_partition_weights():
            # ZeRO-3 saves weights as empty tensors, for which it partitions those that every rank keeps whole. What
            # they are at the moment depends on the layers that the forward pass is at.
            parameters = engine.module.named_parameters(remove_duplicate=False)
            partitioned = {name for name, parameter in parameters if hasattr(parameter, "ds_id")}
            state = {name: value.new_empty(0) if name in partitioned else value for name, value in state.items()}
        frozen = {p.data_ptr() for p in engine.module.parameters() if not p.requires_grad and p.numel()}
        # DeepSpeed leaves out the first name of a frozen weight only; a tied embedding has two.
        self._module = [
            (name, value, name in buffers)
            for name, value in state.items()
            if not (self._trainable_only and torch.is_tensor(value) and value.numel() and value.data_ptr() in frozen)
        ]
        return {
            "module_state_dict": lambda **kwargs: self._module_now(),
            "_get_buffer_names": lambda: buffer_names,
            **{name: cache(getattr(engine, name)) for name in _NEVER_CHANGING},
        }

    def _module_now(self) -> dict[str, Any]:
        """Buffers as copies: the next forward pass may write them."""
        return {name: value.clone() if is_buffer else value for name, value, is_buffer in self._module}


_NEVER_CHANGING = ("_get_zero_param_shapes", "_get_shared_params", "_get_zero_frozen_param_attributes")


@contextmanager
def _instead(engine: Any, replacements: Mapping[str, Any]) -> Iterator[None]:
    """The engine with other attributes and methods while it lasts."""
    before = {name: engine.__dict__[name] for name in replacements if name in engine.__dict__}
    engine.__dict__.update(replacements)
    try:
        yield
    finally:
        for name in replacements:
            del engine.__dict__[name]
        engine.__dict__.update(before)


def trainer_parts(trainer: Any, *, own_scheduler: bool) -> list[Part]:
    """Random states of this rank; on rank 0 also the schedule and the Trainer's state."""
    args = trainer.args
    name = "rng_state.pth" if args.world_size <= 1 else f"rng_state_{args.process_index}.pth"
    parts = [torch_part(name, random_states())]
    if args.process_index == 0:
        state = _state_of(trainer)
        parts.append(text_part("trainer_state.json", lambda: _state_as_json(state)))
        parts.append(text_part("latest", lambda: f"global_step{state.global_step}"))
        if own_scheduler:
            parts.append(torch_part("scheduler.pt", copy.deepcopy(trainer.lr_scheduler.state_dict())))
    return parts


def _state_of(trainer: Any) -> Any:
    """The Trainer's state as it is now. Entries of the log are never changed, so the list alone is copied."""
    state = copy.copy(trainer.state)
    state.log_history = list(state.log_history)
    state.total_flos += trainer.current_flos * trainer.args.world_size  # since it was last gathered
    state.stateful_callbacks = dict(state.stateful_callbacks)
    for callback in [*trainer.callback_handler.callbacks, trainer.control]:
        if isinstance(callback, ExportableState):
            state.stateful_callbacks[type(callback).__name__] = copy.deepcopy(callback.state())
    return state


def _state_as_json(state: Any) -> str:
    """As `TrainerState.save_to_json` writes it."""
    return json.dumps(asdict(state), indent=2, sort_keys=True) + "\n"


def model_part(trainer: Any) -> Part | None:
    """Weights, configuration, tokenizer and what else other tools look for. All ranks take part (ZeRO-3 gathers);
    None except on rank 0."""
    engine = trainer.model_wrapped
    is_peft = isinstance(trainer.model, peft_module.PeftModel)
    if engine.zero_optimization_partition_weights():
        if not engine.zero_gather_16bit_weights_on_model_save():
            weights: Mapping[str, Any] | None = None
        else:
            weights = engine._zero3_consolidated_16bit_state_dict(exclude_frozen_parameters=is_peft)
    else:
        weights = trainer.model.state_dict()
    if trainer.args.process_index != 0:
        return None

    def write(sink: Sink) -> None:
        with tempfile.TemporaryDirectory(prefix=RANK_PREFIX, dir=os.environ.get(SCRATCH_VARIABLE)) as name:
            folder = Path(name)
            with _weights_written_to(sink, folder):
                trainer._save(str(folder), state_dict=weights if weights is not None else {})
            engine._copy_recovery_script(str(folder))
            for path in sorted(path for path in folder.rglob("*") if path.is_file()):
                with path.open("rb") as source, sink.open(path.relative_to(folder).as_posix()) as stream:
                    shutil.copyfileobj(source, stream)

    return Part(write)


@contextmanager
def _weights_written_to(sink: Sink, folder: Path) -> Iterator[None]:
    """While it lasts, what this thread's `save_pretrained` would write as safetensors below `folder` goes to `sink`."""
    writer = threading.get_ident()

    def save_file(original: Callable[..., None]) -> Callable[..., None]:
        def redirected(tensors: Any, filename: Any, metadata: Any = None) -> None:
            path = Path(filename)
            if threading.get_ident() != writer or not path.is_relative_to(folder):
                original(tensors, filename, metadata=metadata)
                return
            if not tensors:
                return  # ZeRO-3 without gathering: DeepSpeed's shards are all there is
            with sink.open(path.relative_to(folder).as_posix()) as stream:
                stream.write(safetensors.torch.save(tensors, metadata))

        return redirected

    originals = [(module, module.safe_save_file) for module in (peft_module, modeling_module)]
    try:
        for module, original in originals:
            module.safe_save_file = save_file(original)
        yield
    finally:
        for module, original in originals:
            module.safe_save_file = original
