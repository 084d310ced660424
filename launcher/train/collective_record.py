"""Writes every collective of this rank into its progress record: number, kind, size, and whether it has returned.

Invariant: what a collective does, returns and raises stays the same. Functions of torch.distributed are wrapped where
they are and in every module that has imported them by name; DeepSpeed looks them up when the process group is made, so
this comes before. Not seen are torch's functional collectives (DTensor, tensor parallelism of torch).
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from launcher.progress_record import ProgressRecord

_KINDS = (
    "all_reduce",
    "all_reduce_coalesced",
    "reduce",
    "broadcast",
    "all_gather",
    "all_gather_coalesced",
    "all_gather_single",
    "all_gather_into_tensor",
    "_all_gather_base",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
    "_reduce_scatter_base",
    "gather",
    "scatter",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "monitored_barrier",
)
_MARK = "_ftlaunch_record"


def record_collectives(record: ProgressRecord) -> None:
    """From now on, in this process. Another call takes over with another record."""
    wrapped = {}
    for kind in _KINDS:
        function = getattr(distributed_c10d, kind, None)
        if function is not None:
            wrapped[kind] = (function, _wrapped(getattr(function, _MARK, function), kind.strip("_"), record))
    for module in list(sys.modules.values()):
        names = getattr(module, "__dict__", {})
        for kind, (before, after) in wrapped.items():
            if names.get(kind) is before:
                setattr(module, kind, after)
    wait = dist.Work.wait
    setattr(dist.Work, "wait", _waiting(getattr(wait, _MARK, wait), record))  # noqa: B010 - mypy: a method


def _wrapped(function: Callable[..., Any], kind: str, record: ProgressRecord) -> Callable[..., Any]:
    name = kind[:24].encode()
    group_at = list(inspect.signature(function).parameters).index("group")

    @functools.wraps(function)
    def collective(*args: Any, **kwargs: Any) -> Any:
        if not record.is_outside:  # one that another is made of
            return function(*args, **kwargs)
        group = kwargs.get("group") if len(args) <= group_at else args[group_at]
        first = args[0] if args else next(iter(kwargs.values()), None)
        record.collective_begins(name, _num_elements(first), of_all_ranks=_is_of_all(group))
        try:
            return function(*args, **kwargs)
        finally:
            record.goes_on()

    setattr(collective, _MARK, function)
    return collective


def _waiting(wait: Callable[..., Any], record: ProgressRecord) -> Callable[..., Any]:
    @functools.wraps(wait)
    def waiting(*args: Any, **kwargs: Any) -> Any:
        if not record.is_outside:  # the end of a collective without async_op
            return wait(*args, **kwargs)
        record.waits()
        try:
            return wait(*args, **kwargs)
        finally:
            record.goes_on()

    setattr(waiting, _MARK, wait)
    return waiting


def _num_elements(first: Any) -> int:
    if isinstance(first, torch.Tensor):
        return first.numel()
    if isinstance(first, list | tuple):
        return sum(one.numel() for one in first if isinstance(one, torch.Tensor))
    return 0


def _is_of_all(group: Any) -> bool:
    """A rank that is not in the group has a stand-in for it, which has no size."""
    if group is None or group is dist.GroupMember.WORLD:
        return True
    try:
        return bool(group.size() == dist.get_world_size())
    except AttributeError:
        return False
