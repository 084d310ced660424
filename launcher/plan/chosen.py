"""A decision and its reason, as `ftlaunch plan` shows them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Chosen(Generic[T]):
    """A value and why; `by` is "job.yaml" where the user set it, else "ftlaunch"."""

    value: T
    reason: str
    by: str = "ftlaunch"
