"""Resume of a checkpoint that another number of ranks has written: each rank reads what it needs from the old shards.

DeepSpeed refuses such a checkpoint ("Automatic adjustment of ZeRO's optimizer state partitioning ... is not currently
supported"). Here a rank puts together the very state dict that it would have saved itself, from the stretches of the
old shards that it now owns, and gives it to DeepSpeed's own loading. Nothing is converted on disk. Why this way and not
the Universal Checkpoint: docs/decisions/0009-shards-are-divided-on-load.md.

Invariant: fp32 weights and element-wise optimizer state arrive bit for bit, whatever the two numbers of ranks are.
"""

from __future__ import annotations

import logging
import math
import pickle
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
import transformers.trainer as trainer_module
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address

from launcher.checkpoint.manifest import read_manifest
from launcher.checkpoint.shard_layout import (
    FlatLayout,
    LayoutMismatch,
    PartitionedLayout,
    ShardLayout,
    Transfer,
    transfers,
)
from launcher.errors import UserError

rank_log = logging.getLogger("ftlaunch.rank")  # for what the agent shows as well


def _stage_called(kind: Any, name: Any) -> ZeroStageEnum:
    """What `getattr` stands for in our shards. The function itself is let into no unpickler."""
    if kind is not ZeroStageEnum or name not in ZeroStageEnum.__members__:
        raise pickle.UnpicklingError(f"getattr({kind!r}, {name!r}) has no place in a checkpoint")
    return ZeroStageEnum[name]


# What DeepSpeed's shards hold besides tensors and plain Python values. Python 3.11.0 to 3.11.3 pickle a member of an
# enum as getattr(its class, its name), others by its value.
_DEEPSPEED_TYPES: list[Any] = [
    fragment_address,
    LossScaler,
    DynamicLossScaler,
    ZeroStageEnum,
    (_stage_called, "builtins.getattr"),
    (_stage_called, "__builtin__.getattr"),
]

State = dict[str, Any]


def divide_anew_when_needed(tell_phase: Callable[[str], None]) -> None:
    """Let the Trainer's resume accept checkpoints of any number of ranks; those of the same number load as ever.

    `tell_phase` is called when a state is divided anew.
    """
    original = trainer_module.deepspeed_load_checkpoint
    if getattr(original, "__name__", "") == "load_checkpoint":
        return

    def load_checkpoint(engine: Any, checkpoint_path: str, load_module_strict: bool = True) -> None:
        old_world_size = read_manifest(Path(checkpoint_path)).world_size
        if old_world_size != dist.get_world_size():
            _prepare_engine(engine, old_world_size, tell_phase)
        try:
            original(engine, checkpoint_path, load_module_strict=load_module_strict)
        finally:
            for name in ("_load_zero_checkpoint", "_get_ckpt_name"):
                engine.__dict__.pop(name, None)

    trainer_module.deepspeed_load_checkpoint = load_checkpoint


def _prepare_engine(engine: Any, old_world_size: int, tell_phase: Callable[[str], None]) -> None:
    """Until the load is over: ZeRO state is divided anew; module states are those of the old rank 0, which are the same
    on all ranks (with ZeRO-3 they hold no weights)."""
    if engine.has_moe_layers or engine.zero_nvme_offload_optimizer():
        what = "mixture-of-experts layers of DeepSpeed" if engine.has_moe_layers else "an optimizer offloaded to NVMe"
        raise UserError(
            f"the newest checkpoint was written by {old_world_size} ranks and there are {dist.get_world_size()} now; "
            f"with {what} only the same number of ranks can continue the run. Set cluster.nproc_per_node and "
            "cluster.nodes so that they are as many."
        )

    def model_states_name(
        engine: Any, folder: str, tag: str, mp_placeholder: str | None = None, pp_placeholder: str | None = None
    ) -> str:
        name: str = type(engine)._get_ckpt_name(engine, folder, tag, mp_placeholder, pp_placeholder or "0")
        return name

    def load_zero(engine: Any, load_dir: str, tag: str, load_optimizer_states: bool = True) -> bool:
        rank_log.info("dividing the state of %d rank(s) anew", old_world_size)
        tell_phase(f"dividing the state of {old_world_size} rank(s) anew")
        rank, world_size = dist.get_rank(), dist.get_world_size()
        state_list: list[State] = [{}] * world_size
        state_list[rank] = _Division(engine, load_dir, tag, old_world_size).state_of(rank)
        engine.optimizer.load_state_dict(
            state_dict_list=state_list,
            load_optimizer_states=load_optimizer_states,
            load_from_fp32_weights=engine.zero_load_from_fp32_weights(),
            param_shapes=engine._get_zero_param_shapes(),
        )
        return True

    engine._get_ckpt_name = MethodType(model_states_name, engine)
    engine._load_zero_checkpoint = MethodType(load_zero, engine)


class _Division:
    """One checkpoint and the engine that is to continue it."""

    def __init__(self, engine: Any, load_dir: str, tag: str, old_world_size: int) -> None:
        self._engine = engine
        self._optimizer = engine.optimizer
        self._old_world_size = old_world_size
        self._shard_path: Callable[[int], str] = lambda rank: engine._get_rank_zero_ckpt_name(
            load_dir, tag, engine.checkpoint_mp_rank, rank, engine.bfloat16_enabled()
        )
        model_states = _read(engine._get_ckpt_name(load_dir, tag))
        self._old_groups = _numels(model_states["param_shapes"])
        self._new_groups = _numels(engine._get_zero_param_shapes())
        self._shards: dict[int, State] = {}

    def state_of(self, rank: int) -> State:
        """What this rank's `optimizer.state_dict()` would have been at the save, had there been as many ranks."""
        return self._zero3(rank) if self._engine.zero_optimization_partition_weights() else self._zero12(rank)

    def _zero12(self, rank: int) -> State:
        optimizer, first = self._optimizer, self._shard(0)
        alignment = optimizer.nccl_start_alignment_factor
        old = FlatLayout(self._old_groups, self._old_world_size, alignment, first["param_alignment_paddings"])
        new = FlatLayout(self._new_groups, dist.get_world_size(), alignment, optimizer.round_robin_bit16_padding)
        weights = first["single_partition_of_fp32_groups"]  # saved without the padding at the end
        there = [part.numel() + padding for part, padding in zip(weights, first["group_paddings"], strict=True)]
        _require(old, there, "the checkpoint")
        _require(new, [part.numel() for part in optimizer.single_partition_of_fp32_groups], "this run")
        divided = self._divided(old, new, rank, "single_partition_of_fp32_groups", "base_optimizer_state")
        return {
            **first,
            **divided,
            "group_paddings": optimizer.groups_padding,
            "param_alignment_paddings": optimizer.round_robin_bit16_padding,
            "partition_count": optimizer.partition_count,
            "param_slice_mappings": optimizer._param_slice_mappings,
        }

    def _zero3(self, rank: int) -> State:
        optimizer, first = self._optimizer, self._shard(0)
        old = PartitionedLayout(self._old_groups, self._old_world_size)
        new = PartitionedLayout(self._new_groups, dist.get_world_size())
        _require(old, [part.numel() for part in first["fp32_flat_groups"]], "the checkpoint")
        _require(new, [part.numel() for part in optimizer.fp32_partitioned_groups_flat], "this run")
        optimizer._set_fp32_optimizer_param_groups()  # between steps ZeRO-3 keeps them empty
        try:
            divided = self._divided(old, new, rank, "fp32_flat_groups", "optimizer_state_dict")
        finally:
            optimizer._clear_fp32_optimizer_param_groups()
        return {**first, **divided, "partition_count": optimizer.partition_count}

    def _divided(self, old: ShardLayout, new: ShardLayout, rank: int, weights: str, base: str) -> State:
        """fp32 weights (key `weights`) and the base optimizer's state dict (key `base`) of shard `rank` of `new`."""
        old_base = self._shard(0)[base]
        old_ids = _ids(old_base["param_groups"])
        new_param_groups = self._optimizer.optimizer.state_dict()["param_groups"]
        new_ids = _ids(new_param_groups)
        by_group: dict[int, list[Transfer]] = {group: [] for group in range(len(new.groups))}
        for transfer in transfers(old, new, rank):
            by_group[transfer.group].append(transfer)
        group_of = {name: group for group, names in enumerate(old.groups) for name in names}
        new_weights: list[Any] = []
        new_state: dict[int, State] = {}
        for group, moves in by_group.items():
            size = new.partition_numel(group)
            like = group_of[next(iter(new.groups[group]))]
            new_weights.append(_assembled(moves, size, lambda r, g: self._shard(r)[weights][g], like))
            state = new_state[new_ids[group]] = {}
            for key, value in old_base["state"].get(old_ids[like], {}).items():
                if not torch.is_tensor(value) or value.dim() == 0:
                    state[key] = value  # such as the number of steps: the same on every rank
                    continue
                if value.numel() != old.partition_numel(like):
                    raise UserError(
                        f"the newest checkpoint was written by {self._old_world_size} ranks and there are "
                        f"{dist.get_world_size()} now, but the optimizer's state {key!r} does not go element by "
                        "element and cannot be divided anew (8-bit optimizers are such). Start as many ranks as there "
                        "were, or begin anew with another training.optim in another output_dir."
                    )
                source: Callable[[int, int], Any] = partial(self._state_tensor, base, old_ids, key)
                state[key] = _assembled(moves, size, source, like)
        param_groups = [
            {**old_group, "params": new_group["params"]}
            for old_group, new_group in zip(old_base["param_groups"], new_param_groups, strict=True)
        ]
        return {weights: new_weights, base: {"state": new_state, "param_groups": param_groups}}

    def _state_tensor(self, base: str, ids: Sequence[int], key: str, rank: int, group: int) -> Any:
        return self._shard(rank)[base]["state"][ids[group]][key]

    def _shard(self, rank: int) -> State:
        """The optimizer's part of an old rank's file; its tensors are read from disk where they are touched."""
        if rank not in self._shards:
            self._shards[rank] = _read(self._shard_path(rank))["optimizer_state_dict"]
        return self._shards[rank]


def _assembled(moves: Sequence[Transfer], size: int, source: Callable[[int, int], Any], like: int) -> Any:
    """A vector of `size` elements from stretches of `source(rank, group)`; zeros where there is only padding."""
    target = torch.zeros(size, dtype=source(0, like).dtype)
    for move in moves:
        stretch = source(move.source.rank, move.source.group).narrow(0, move.source.start, move.source.numel)
        target.narrow(0, move.start, move.source.numel).copy_(stretch)
    return target


def _ids(param_groups: Sequence[Mapping[str, Any]]) -> list[int]:
    """The optimizer's numbers of the flat vectors, in the order of the groups."""
    return [number for group in param_groups for number in group["params"]]


def _numels(param_shapes: Sequence[Mapping[str, Sequence[int]]]) -> list[dict[str, int]]:
    return [{name: math.prod(shape) for name, shape in group.items()} for group in param_shapes]


def _require(layout: ShardLayout, sizes: Sequence[int], whose: str) -> None:
    """The arithmetic of `shard_layout.py` must give the sizes that are there; else DeepSpeed cuts differently now."""
    expected = [layout.partition_numel(group) for group in range(len(layout.groups))]
    if expected != list(sizes):
        raise LayoutMismatch(
            f"the optimizer shards of {whose} hold {list(sizes)} elements where {expected} are expected for "
            f"{layout.world_size} ranks: this version of DeepSpeed cuts its state in another way. Start as many ranks "
            "as wrote the checkpoint, and report this."
        )


def _read(path: str) -> State:
    """A file of this run's checkpoint (its hash has been compared), as plain data. Mapped where the file system can, so
    that only the stretches that are needed are read."""
    with torch.serialization.safe_globals(_DEEPSPEED_TYPES):
        try:
            loaded: State = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError:  # some object mounts cannot map files
            loaded = torch.load(path, map_location="cpu", weights_only=True)
    return loaded
