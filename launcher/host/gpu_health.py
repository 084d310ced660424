"""What NVML says of a card's health. Every figure is None where card or driver do not tell it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pynvml

T = TypeVar("T")

# Bits of nvmlDeviceGetCurrentClocksThrottleReasons (nvml.h) that slow a card down against its will. A cap by power
# alone is how a busy card works.
THROTTLE_REASONS = {
    0x08: "hardware slowdown",
    0x20: "temperature (software)",
    0x40: "temperature (hardware)",
    0x80: "power brake",
}
COMPUTE_MODES = {0: "default", 1: "exclusive thread", 2: "prohibited", 3: "exclusive process"}


@dataclass(frozen=True)
class GpuProcess:
    """`name` is empty where the process is of another container: its number means nothing here."""

    pid: int
    name: str
    memory_bytes: int | None

    def __str__(self) -> str:
        return f"pid {self.pid}" + (f" {self.name}" if self.name else "")


@dataclass(frozen=True)
class GpuHealth:
    """uncorrected_errors: double-bit ECC errors since the driver was loaded. rows_pending, rows_failed: memory that a
    reset will map away, or that cannot be mapped away any more; cards before Ampere retire pages instead. links:
    NVLinks that are up, of those that the card has."""

    uncorrected_errors: int | None = None
    rows_pending: bool | None = None
    rows_failed: bool | None = None
    compute_mode: str | None = None
    throttled: tuple[str, ...] = ()
    links: tuple[int, int] | None = None
    processes: tuple[GpuProcess, ...] = ()


def read_health(handle: Any) -> GpuHealth:
    rows = _told(lambda: pynvml.nvmlDeviceGetRemappedRows(handle))
    pages_pending = _told(lambda: pynvml.nvmlDeviceGetRetiredPagesPendingStatus(handle))
    reasons = _told(lambda: pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)) or 0
    return GpuHealth(
        uncorrected_errors=_told(
            lambda: pynvml.nvmlDeviceGetTotalEccErrors(
                handle, pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC
            )
        ),
        rows_pending=bool(rows[2]) if rows is not None else None if pages_pending is None else bool(pages_pending),
        rows_failed=None if rows is None else bool(rows[3]),
        compute_mode=COMPUTE_MODES.get(_told(lambda: pynvml.nvmlDeviceGetComputeMode(handle)) or 0),
        throttled=tuple(name for bit, name in THROTTLE_REASONS.items() if reasons & bit),
        links=_read_links(handle),
        processes=_read_processes(handle),
    )


def _read_links(handle: Any) -> tuple[int, int] | None:
    """A link that the card does not have is an error or "not supported", one that is down answers 0."""
    states = []
    for link in range(pynvml.NVML_NVLINK_MAX_LINKS):
        state = _told(lambda number=link: pynvml.nvmlDeviceGetNvLinkState(handle, number))  # type: ignore[misc]
        if state is None:
            break
        states.append(state)
    return (sum(states), len(states)) if states else None


def _read_processes(handle: Any) -> tuple[GpuProcess, ...]:
    found = _told(lambda: pynvml.nvmlDeviceGetComputeRunningProcesses(handle)) or []
    return tuple(GpuProcess(process.pid, _name(process.pid), process.usedGpuMemory) for process in found)


def _name(pid: int, root: Path = Path("/")) -> str:
    try:
        return (root / "proc" / str(pid) / "comm").read_text("utf-8", "replace").strip()
    except OSError:
        return ""


def _told(ask: Callable[[], T]) -> T | None:
    try:
        return ask()
    except pynvml.NVMLError:
        return None
