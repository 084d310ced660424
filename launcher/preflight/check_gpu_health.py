"""Cards that are there and not well: memory errors, faults in the kernel log, throttling, links that are down."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from launcher.host.facts import Gpu
from launcher.i18n import Text
from launcher.preflight.finding import Finding, Severity
from launcher.preflight.inputs import PreflightInputs, Reader

# Numbers of NVIDIA's Xid catalogue that speak of the card, not of a program: memory (48, 63, 64, 92, 94, 95), NVLink
# (74), off the bus (79), GSP (119, 120), SRAM (171, 172). 13, 31, 43 and 45 come from a faulty or killed program.
XIDS_OF_HARDWARE = frozenset({48, 62, 63, 64, 69, 74, 79, 92, 94, 95, 119, 120, 140, 143, 154, 171, 172})
_XID = re.compile(r"NVRM: Xid \((?:PCI:)?([^)]+)\): (\d+)")


def xids_of(kernel_lines: Iterable[str]) -> tuple[tuple[str, int], ...]:
    """(PCI address, number) of each Xid in the kernel's messages, once each."""
    found = (_XID.search(line) for line in kernel_lines)
    return tuple(dict.fromkeys((match.group(1), int(match.group(2))) for match in found if match))


def check_ecc(inputs: PreflightInputs) -> tuple[Finding, ...]:
    cards = _cards(inputs)
    known = [gpu for gpu in cards if gpu.health.uncorrected_errors is not None or gpu.health.rows_pending is not None]
    if not known:
        return ()
    bound = "no uncorrected error, no row to be mapped away"
    failed = [gpu for gpu in known if gpu.health.rows_failed]
    sick = [gpu for gpu in known if gpu.health.uncorrected_errors or gpu.health.rows_pending]
    if not failed and not sick:
        return (Finding("gpu.ecc", Severity.OK, f"{len(known)} card(s) without", bound, Text("none", "没有")),)
    measured = "; ".join(_memory_of(gpu) for gpu in known if gpu in failed or gpu in sick)
    if failed:
        message = Text(
            f"memory of GPU {_listed(failed)} is broken and cannot be mapped away any more: results may be wrong",
            f"GPU {_listed(failed)} 的显存已损坏且无法再屏蔽：结果可能出错",
        )
        return (Finding("gpu.ecc", Severity.ERROR, measured, bound, message, _other_node(inputs)),)
    message = Text(
        f"GPU {_listed(sick)} has had memory errors since its driver was loaded: the next one ends the run (Xid 48, "
        "94, 95)",
        f"GPU {_listed(sick)} 在驱动加载后出现过显存错误：再次出现会使任务失败（Xid 48、94、95）",
    )
    remedy = Text(
        "`nvidia-smi --gpu-reset -i N` (root, card idle) or a reboot maps the rows away; in a container: another node",
        "执行 `nvidia-smi --gpu-reset -i N`（root，且卡空闲）或重启以屏蔽坏行；容器内请换一个节点",
    )
    return (Finding("gpu.ecc", Severity.WARNING, measured, bound, message, remedy),)


def check_xid(inputs: PreflightInputs) -> tuple[Finding, ...]:
    if not _cards(inputs) or inputs.xids is None:
        return ()
    found = [(address, number) for address, number in inputs.xids if number in XIDS_OF_HARDWARE]
    bound = "no Xid of hardware since the machine was started"
    if not found:
        return (Finding("gpu.xid", Severity.OK, "none", bound, Text("none", "没有")),)
    measured = ", ".join(f"Xid {number} ({address})" for address, number in found[:8])
    message = Text(
        "the kernel log tells of faults of cards: memory (48, 63, 64, 92, 94, 95), NVLink (74), fallen off the bus "
        "(79)",
        "内核日志中有 GPU 故障：显存（48、63、64、92、94、95）、NVLink（74）、掉卡（79）",
    )
    return (Finding("gpu.xid", Severity.WARNING, measured, bound, message, _other_node(inputs)),)


def check_throttled(inputs: PreflightInputs) -> tuple[Finding, ...]:
    cards = _cards(inputs)
    slow = [gpu for gpu in cards if gpu.health.throttled]
    if not cards:
        return ()
    if not slow:
        return (Finding("gpu.throttled", Severity.OK, "none", "none", Text("none is slowed down", "均未降频")),)
    measured = "; ".join(f"GPU {gpu.index}: {', '.join(gpu.health.throttled)}" for gpu in slow)
    message = Text(
        "cards are slowed down before the job has begun; all ranks wait for the slowest at every step",
        "任务尚未开始 GPU 就已降频；每一步所有 rank 都要等最慢的一张卡",
    )
    remedy = Text(
        "`nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER` shows why (cooling, power supply); or another node",
        "用 `nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER` 查看原因（散热、供电）；或换一个节点",
    )
    return (Finding("gpu.throttled", Severity.WARNING, measured, "none", message, remedy),)


def check_compute_mode(inputs: PreflightInputs) -> tuple[Finding, ...]:
    cards = [gpu for gpu in _cards(inputs) if gpu.health.compute_mode]
    refused = [gpu for gpu in cards if gpu.health.compute_mode == "prohibited"]
    bound = "default or exclusive process"
    if not cards:
        return ()
    if not refused:
        modes = ", ".join(sorted({str(gpu.health.compute_mode) for gpu in cards}))
        return (Finding("gpu.compute_mode", Severity.OK, modes, bound, Text("may be used", "可以使用")),)
    measured = f"GPU {_listed(refused)}: prohibited"
    message = Text(
        f"no program may use GPU {_listed(refused)}: CUDA will say that no device is available or that it is busy",
        f"GPU {_listed(refused)} 被设为禁止计算：CUDA 会报没有可用设备或设备忙",
    )
    remedy = Text("as root: `nvidia-smi -c DEFAULT`", "以 root 执行：`nvidia-smi -c DEFAULT`")
    return (Finding("gpu.compute_mode", Severity.ERROR, measured, bound, message, remedy),)


def check_nvlink(inputs: PreflightInputs) -> tuple[Finding, ...]:
    """Links of the cards that ranks share a step over: one that is down halves a ring."""
    cards = [gpu for gpu in _cards(inputs) if gpu.health.links]
    if len(cards) < 2 or inputs.num_ranks < 2:
        return ()
    most = max(gpu.health.links[0] for gpu in cards if gpu.health.links)
    weak = [gpu for gpu in cards if gpu.health.links and (gpu.health.links[0] < max(most, 1))]
    measured = ", ".join(
        sorted({f"{gpu.health.links[0]} of {gpu.health.links[1]}" for gpu in cards if gpu.health.links})
    )
    if not weak:
        return (Finding("gpu.nvlink", Severity.OK, f"{measured} up", "the same on all", Text("all up", "全部正常")),)
    message = Text(
        f"NVLinks of GPU {_listed(weak)} are down: traffic takes PCIe, and all-reduce becomes several times slower",
        f"GPU {_listed(weak)} 的 NVLink 未连通：通信会走 PCIe，all-reduce 会慢数倍",
    )
    remedy = Text(
        "`nvidia-smi nvlink -s` shows them; see that nvidia-fabricmanager runs on the host (SXM), or use another node",
        "用 `nvidia-smi nvlink -s` 查看；确认宿主机上 nvidia-fabricmanager 正在运行（SXM），或换一个节点",
    )
    return (Finding("gpu.nvlink", Severity.WARNING, f"{measured} up", "the same on all", message, remedy),)


def _cards(inputs: PreflightInputs) -> Sequence[Gpu]:
    return inputs.visible if inputs.device == "cuda" else ()


def _memory_of(gpu: Gpu) -> str:
    health, parts = gpu.health, []
    if health.uncorrected_errors:
        parts.append(f"{health.uncorrected_errors} uncorrected")
    if health.rows_pending:
        parts.append("rows wait for a reset")
    if health.rows_failed:
        parts.append("rows could not be mapped away")
    return f"GPU {gpu.index}: {', '.join(parts)}"


def _listed(gpus: Sequence[Gpu]) -> str:
    return ", ".join(str(gpu.index) for gpu in gpus)


def _other_node(inputs: PreflightInputs) -> Text:
    if inputs.reader is Reader.DLC:
        return Text(
            "use another node (JobSpecs[].AssignNodeSpec.AntiAffinityNodeNames leaves this one out) and report it; "
            "Settings.EnableSanityCheck of the DLC job tests the cards before",
            "换一个节点（JobSpecs[].AssignNodeSpec.AntiAffinityNodeNames 可排除本节点）并上报；"
            "DLC 任务的 Settings.EnableSanityCheck 可提前检测",
        )
    return Text(
        "use another node, and have this one repaired: `nvidia-smi -q -d ECC,ROW_REMAPPER`, `dmesg | grep -i xid`",
        "换一个节点并送修本机：`nvidia-smi -q -d ECC,ROW_REMAPPER`、`dmesg | grep -i xid`",
    )
