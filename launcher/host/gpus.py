"""GPUs of this node through NVML, never through CUDA: a CUDA context here would take memory from the ranks.

NVML is loaded from the driver (`libnvidia-ml.so.1`); where it is missing, or answers with an error, the reason is kept.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pynvml

from launcher.host.bounded import within
from launcher.host.gpu_health import GpuHealth, read_health

ROOT = Path("/")
ANSWER_WITHIN_S = 30.0  # a driver with a broken card may never answer; a cold one without persistence needs seconds
MIN_BF16_CAPABILITY = (8, 0)  # Ampere; torch's own answer counts emulation and says yes on a V100


@dataclass(frozen=True)
class Gpu:
    index: int  # NVML's: by PCI bus
    uuid: str
    name: str
    memory_total_bytes: int
    memory_used_bytes: int  # by processes; the driver's own reserve is not counted where the driver tells it apart
    capability: tuple[int, int]
    mig_uuids: tuple[str, ...] = ()
    health: GpuHealth = field(default_factory=GpuHealth)

    @property
    def has_bf16(self) -> bool:
        return self.capability >= MIN_BF16_CAPABILITY


@dataclass(frozen=True)
class GpuReading:
    """`nvml` is "ok" or the reason why no GPU could be read; `lost` says why single cards could not."""

    nvml: str
    gpus: tuple[Gpu, ...] = ()
    lost: tuple[str, ...] = ()
    driver: str | None = None
    cuda_driver: str | None = None  # highest CUDA version that the driver runs, e.g. "12.4"


@dataclass(frozen=True)
class Visibility:
    """What CUDA_VISIBLE_DEVICES leaves: indices in the order of the ranks, and entries that name no card."""

    indices: tuple[int, ...]
    missing: tuple[str, ...]


def read_gpus(timeout_s: float = ANSWER_WITHIN_S) -> GpuReading:
    try:
        return within(timeout_s, _read_gpus, "NVML")
    except (pynvml.NVMLError, TimeoutError) as error:
        return GpuReading(nvml=str(error))


def read_gpu_health(timeout_s: float = ANSWER_WITHIN_S) -> list[dict[str, Any]]:
    """Per card what says whether it is well: temperature, ECC errors since the driver was loaded and for life, remapped
    rows, why its clocks are held down. A value that a card or driver does not have is left out.

    Raises NVMLError without a driver, TimeoutError where it does not answer."""
    return within(timeout_s, _read_health, "NVML")


def _read_health() -> list[dict[str, Any]]:
    pynvml.nvmlInit()
    try:
        return [_read_card_health(index) for index in range(pynvml.nvmlDeviceGetCount())]
    finally:
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


def _read_card_health(index: int) -> dict[str, Any]:
    health: dict[str, Any] = {"index": index}
    try:
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    except pynvml.NVMLError as error:  # fallen off the bus, or in need of a reset
        return {**health, "lost": str(error)}
    uncorrected = pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED
    readers: dict[str, Callable[[], Any]] = {
        "uuid": lambda: pynvml.nvmlDeviceGetUUID(handle),
        "temperature_c": lambda: pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU),
        "memory_used_bytes": lambda: _read_memory(handle).used,
        "ecc_uncorrected": lambda: pynvml.nvmlDeviceGetTotalEccErrors(handle, uncorrected, pynvml.NVML_VOLATILE_ECC),
        "ecc_uncorrected_for_life": lambda: pynvml.nvmlDeviceGetTotalEccErrors(
            handle, uncorrected, pynvml.NVML_AGGREGATE_ECC
        ),
        "remapped_rows": lambda: list(pynvml.nvmlDeviceGetRemappedRows(handle)),  # correctable, not, pending, failed
        "clocks_held_by": lambda: hex(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)),
        "processes": lambda: [p.pid for p in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)],
    }
    for name, read in readers.items():
        with contextlib.suppress(pynvml.NVMLError, AttributeError):  # not of this card, not in this NVML
            health[name] = read()
    return health


def gpu_device_files(root: Path = ROOT) -> tuple[str, ...]:
    """Device files of accelerators: NVIDIA's (`/dev/nvidia0`) and T-Head's PPU (`/dev/alixpu0`)."""
    files = [*(root / "dev").glob("nvidia[0-9]*"), *(root / "dev").glob("alixpu[0-9]*")]
    return tuple(sorted(str(Path("/") / file.relative_to(root)) for file in files))


def select_visible(cuda_visible_devices: str | None, gpus: Sequence[Gpu]) -> Visibility:
    """Apply CUDA_VISIBLE_DEVICES as CUDA does: indices, UUIDs or their unique beginnings, MIG UUIDs.

    Unset means all. CUDA stops at the first entry that names no card and ignores the rest; here every such entry is
    told, because it is always a mistake unless it is `-1` or `NoDevFiles`, the usual ways to say "none".
    """
    if cuda_visible_devices is None:
        return Visibility(tuple(gpu.index for gpu in gpus), ())
    entries = [entry.strip() for entry in cuda_visible_devices.split(",")] if cuda_visible_devices.strip() else []
    indices: list[int] = []
    missing: list[str] = []
    for entry in entries:
        if entry in ("-1", "NoDevFiles"):
            break
        index = _find(entry, gpus)
        if index is None:
            missing.append(entry)
        elif not missing:
            indices.append(index)
    return Visibility(tuple(indices), tuple(missing))


def _find(entry: str, gpus: Sequence[Gpu]) -> int | None:
    if entry.isdigit():
        return next((gpu.index for gpu in gpus if gpu.index == int(entry)), None)
    if entry.startswith("MIG-"):
        return next((gpu.index for gpu in gpus if entry in gpu.mig_uuids), None)
    matches = [gpu.index for gpu in gpus if entry.startswith("GPU-") and gpu.uuid.startswith(entry)]
    return matches[0] if len(matches) == 1 else None


def _read_gpus() -> GpuReading:
    pynvml.nvmlInit()
    try:
        return _read_cards()
    finally:
        with contextlib.suppress(pynvml.NVMLError):  # the answer is in hand, or a better error under way
            pynvml.nvmlShutdown()


def _read_cards() -> GpuReading:
    gpus: list[Gpu] = []
    lost: list[str] = []
    for index in range(pynvml.nvmlDeviceGetCount()):
        try:
            gpus.append(_read_gpu(index))
        except pynvml.NVMLError as error:
            lost.append(f"GPU {index}: {error}")
    return GpuReading("ok", tuple(gpus), tuple(lost), pynvml.nvmlSystemGetDriverVersion(), _cuda_driver())


def _read_gpu(index: int) -> Gpu:
    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    memory = _read_memory(handle)
    major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
    return Gpu(
        index=index,
        uuid=pynvml.nvmlDeviceGetUUID(handle),
        name=pynvml.nvmlDeviceGetName(handle),
        memory_total_bytes=memory.total,
        memory_used_bytes=memory.used,
        capability=(major, minor),
        mig_uuids=_read_mig_uuids(handle),
        health=read_health(handle),
    )


def _read_memory(handle: Any) -> Any:
    """Version 2 keeps the driver's reserve apart from `used`; drivers before 510 have only version 1."""
    try:
        return pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)
    except (pynvml.NVMLError_FunctionNotFound, pynvml.NVMLError_NotSupported):
        return pynvml.nvmlDeviceGetMemoryInfo(handle)


def _read_mig_uuids(handle: Any) -> tuple[str, ...]:
    try:
        num_slots = pynvml.nvmlDeviceGetMaxMigDeviceCount(handle)
    except pynvml.NVMLError:
        return ()  # no MIG on this card
    uuids = []
    for slot in range(num_slots):
        try:
            uuids.append(pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, slot)))
        except pynvml.NVMLError:
            continue  # an empty slot
    return tuple(uuids)


def _cuda_driver() -> str | None:
    """NVML gives 1000 * major + 10 * minor."""
    try:
        version = pynvml.nvmlSystemGetCudaDriverVersion_v2()
    except pynvml.NVMLError:
        return None
    return f"{version // 1000}.{version % 1000 // 10}"
