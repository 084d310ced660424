"""GPUs: are the right ones visible, whole, free, alike, and does the driver run what torch was built for."""

from __future__ import annotations

from collections.abc import Sequence

from launcher.host.facts import Gpu
from launcher.i18n import Text
from launcher.preflight.check_versions import numbers
from launcher.preflight.finding import Finding, Severity, show_bytes
from launcher.preflight.inputs import PreflightInputs, Reader

# A desktop or an idle daemon stays below this; another training or a process that did not end does not.
MEMORY_USED_BOUND_BYTES = 1 << 30

# The toolkit's own driver; with an older one of the same major version kernels run and PTX is not compiled.
# (11.8 and 12.1 to 12.4 by NVIDIA's release notes, the others by the names of the runfiles.)
DRIVER_OF_CUDA = {
    "11.8": "520.61.05",
    "12.1": "530.30.02",
    "12.4": "550.54.14",
    "12.6": "560.28.03",
    "12.8": "570.86.10",
    "12.9": "575.51.03",
    "13.0": "580.65.06",
}
_FIRST, _LAST = (0, 0), (99, 0)


def check_visible(inputs: PreflightInputs) -> tuple[Finding, ...]:
    facts = inputs.facts
    if facts.nvml != "ok":
        return _without_nvml(inputs)
    setting = inputs.env.get("CUDA_VISIBLE_DEVICES")
    measured = f"{len(inputs.visible)} of {len(facts.gpus)} visible"
    bound = f">= {inputs.num_ranks}"
    if facts.gpus and facts.missing_gpus:
        message = Text(
            f"CUDA_VISIBLE_DEVICES={setting} names {', '.join(facts.missing_gpus)}, which this node does not have: "
            "CUDA ignores that entry and all behind it",
            f"CUDA_VISIBLE_DEVICES={setting} 中的 {'、'.join(facts.missing_gpus)} 在本机不存在："
            "CUDA 会忽略它及其后的所有项",
        )
        return (_visible_error(measured, bound, message, _fix_visible_devices(inputs)),)
    if inputs.device == "cpu":
        return _idle_gpus(inputs)
    if facts.gpus and not inputs.visible:
        message = Text(
            f"this node has {len(facts.gpus)} GPUs but CUDA_VISIBLE_DEVICES={setting!r} hides them all",
            f"本机有 {len(facts.gpus)} 块 GPU，但 CUDA_VISIBLE_DEVICES={setting!r} 把它们全部隐藏了",
        )
        return (_visible_error(measured, bound, message, _fix_visible_devices(inputs)),)
    if len(inputs.visible) < inputs.num_ranks:
        message = Text(
            f"{inputs.num_ranks} ranks were asked for on this node, which has {len(inputs.visible)} visible GPUs",
            f"本机要求 {inputs.num_ranks} 个 rank，但只有 {len(inputs.visible)} 块可见的 GPU",
        )
        return (_visible_error(measured, bound, message, _more_gpus(inputs.reader)),)
    names = ", ".join(sorted({gpu.name for gpu in inputs.visible}))
    return (Finding("gpu.visible", Severity.OK, measured, bound, Text(names, names)),)


def check_lost(inputs: PreflightInputs) -> tuple[Finding, ...]:
    lost = inputs.facts.lost_gpus
    if not lost:
        return ()
    message = Text(
        "NVML counts these cards but cannot read them: a hardware or driver fault",
        "NVML 能数到这些 GPU 却无法读取：硬件或驱动故障",
    )
    # A node that has enough cards left for this job is usable, though it should be looked after.
    enough = inputs.device == "cpu" or (inputs.visible and len(inputs.visible) >= inputs.num_ranks)
    severity = Severity.WARNING if enough else Severity.ERROR
    return (Finding("gpu.lost", severity, "; ".join(lost), "every card answers", message, _other_node(inputs)),)


def check_memory_used(inputs: PreflightInputs) -> tuple[Finding, ...]:
    if inputs.device != "cuda" or not inputs.visible:
        return ()
    bound = f"<= {show_bytes(MEMORY_USED_BOUND_BYTES)}"
    held = [gpu for gpu in inputs.visible if gpu.memory_used_bytes > MEMORY_USED_BOUND_BYTES]
    if not held:
        most = max(gpu.memory_used_bytes for gpu in inputs.visible)
        measured = f"at most {show_bytes(most)} used"
        return (Finding("gpu.memory_used", Severity.OK, measured, bound, Text("free", "空闲")),)
    measured = ", ".join(f"GPU {gpu.index}: {show_bytes(gpu.memory_used_bytes)}{_by_whom(gpu)}" for gpu in held)
    message = Text(
        "somebody else holds memory on GPUs that this job will use: it may run out of memory",
        "本任务要用的 GPU 上已有其他进程占用显存，可能导致显存不足",
    )
    remedy = Text(
        "`nvidia-smi` shows the processes; end those that are yours, or leave these cards out with "
        "CUDA_VISIBLE_DEVICES (in a container the holder may be invisible: ask for another node)",
        "用 `nvidia-smi` 查看进程；结束属于您的进程，或用 CUDA_VISIBLE_DEVICES 排除这些卡"
        "（容器内可能看不到占用者：请换一个节点）",
    )
    return (Finding("gpu.memory_used", Severity.WARNING, measured, bound, message, remedy),)


def _by_whom(gpu: Gpu) -> str:
    return f" by {', '.join(str(process) for process in gpu.health.processes)}" if gpu.health.processes else ""


def check_mixed(inputs: PreflightInputs) -> tuple[Finding, ...]:
    """Cards that differ in bf16 or memory bind the whole job to the weakest."""
    if inputs.device != "cuda" or len(inputs.visible) < 2:
        return ()
    groups = _by_name(inputs.visible)
    measured = " + ".join(f"{len(cards)} x {name}" for name, cards in groups.items())
    if len(groups) == 1:
        return (Finding("gpu.mixed", Severity.OK, measured, "one kind", Text("all alike", "型号一致")),)
    slowest = min(inputs.visible, key=lambda gpu: (gpu.capability, gpu.memory_total_bytes))
    message = Text(
        f"different GPUs in one node: precision, batch size and pace follow the weakest ({slowest.name}, "
        f"{show_bytes(slowest.memory_total_bytes)}{'' if slowest.has_bf16 else ', no bf16'})",
        f"同一节点上有不同型号的 GPU：精度、批大小和速度都取决于最弱的一种（{slowest.name}，"
        f"{show_bytes(slowest.memory_total_bytes)}{'' if slowest.has_bf16 else '，不支持 bf16'}）",
    )
    strongest = max(groups.values(), key=lambda cards: (cards[0].capability, len(cards)))
    chosen = ",".join(str(gpu.index) for gpu in strongest)
    remedy = Text(
        f"to use one kind only: CUDA_DEVICE_ORDER=PCI_BUS_ID CUDA_VISIBLE_DEVICES={chosen}",
        f"若只用一种型号：CUDA_DEVICE_ORDER=PCI_BUS_ID CUDA_VISIBLE_DEVICES={chosen}",
    )
    return (Finding("gpu.mixed", Severity.WARNING, measured, "one kind", message, remedy),)


def check_driver(inputs: PreflightInputs) -> tuple[Finding, ...]:
    """Within one major CUDA version any driver runs any torch; an older major never runs a newer one."""
    versions = inputs.facts.versions
    driver_cuda, torch_cuda = versions.get("cuda_driver"), versions.get("torch_cuda")
    if inputs.device != "cuda" or driver_cuda is None or torch_cuda is None:
        return ()
    measured, bound = f"driver {versions.get('driver', '?')}: CUDA {driver_cuda}", f"CUDA {torch_cuda}"
    if _major(driver_cuda) >= _major(torch_cuda):
        return (Finding("gpu.driver", Severity.OK, measured, bound, Text("runs this torch", "可运行该版本 torch")),)
    message = Text(
        f"the driver runs CUDA {driver_cuda} and torch {versions.get('torch')} was built for CUDA {torch_cuda}: "
        "it will say that the driver is too old",
        f"驱动只支持 CUDA {driver_cuda}，而 torch {versions.get('torch')} 是为 CUDA {torch_cuda} 构建的："
        "会报驱动版本过旧",
    )
    wheel = Text(
        f"install a torch built for CUDA {_major(driver_cuda)} (wheels named +cu{_major(driver_cuda)}x)",
        f"安装为 CUDA {_major(driver_cuda)} 构建的 torch（名称带 +cu{_major(driver_cuda)}x 的版本）",
    )
    newer = DRIVER_OF_CUDA.get(torch_cuda, f"one for CUDA {torch_cuda}")
    if inputs.reader is Reader.DLC:
        remedy = Text(
            f"choose a newer driver in the DLC job (Settings.Driver; {newer} or later), or {wheel.en}",
            f"在 DLC 任务中选择更新的驱动（Settings.Driver，{newer} 或更新），或{wheel.zh}",
        )
    else:
        remedy = Text(
            f"update the driver ({newer} or later), or {wheel.en}", f"升级驱动（{newer} 或更新），或{wheel.zh}"
        )
    return (Finding("gpu.driver", Severity.ERROR, measured, bound, message, remedy),)


def kernels_of(torch: str, cuda: str) -> tuple[tuple[int, int], tuple[int, int]]:
    """Oldest and newest compute capability (its major number counts) that PyTorch's own wheel has kernels for: the
    lists of architectures of its builds (CUDA 13: 7.5 to 12.0; 12.8 and 12.9: from 7.0, of torch 2.7 and from 2.11 on
    7.5; before 12.8: 5.0 to 9.0, no Blackwell)."""
    if _major(cuda) >= 13:
        return (7, 5), _LAST
    if _major(cuda) < 12:
        return _FIRST, (9, 0)
    if numbers(cuda) < (12, 8):
        return (5, 0), (9, 0)
    keeps_volta = (2, 8) <= numbers(torch) < (2, 11)
    return ((7, 0) if keeps_volta else (7, 5)), _LAST


def check_capability(inputs: PreflightInputs) -> tuple[Finding, ...]:
    versions = inputs.facts.versions
    torch, cuda = versions.get("torch"), versions.get("torch_cuda")
    if inputs.device != "cuda" or torch is None or cuda is None or not inputs.visible:
        return ()
    oldest, newest = kernels_of(torch, cuda)
    by_capability = sorted(inputs.visible, key=lambda gpu: gpu.capability)
    weakest, strongest = by_capability[0], by_capability[-1]
    upper = f", < {newest[0] + 1}.0" if newest != _LAST else ""
    bound = f">= {_dotted(oldest)}{upper} (torch {torch}, CUDA {cuda})"
    too_new = strongest.capability[0] > newest[0]
    wrong = strongest if too_new else weakest
    measured = f"{wrong.name}: {_dotted(wrong.capability)}"
    if weakest.capability >= oldest and not too_new:
        return (Finding("gpu.capability", Severity.OK, measured, bound, Text("has kernels", "有对应的内核")),)
    message = Text(
        f"torch {torch}, built for CUDA {cuda}, has no kernels for {wrong.name}: `no kernel image is available`",
        f"torch {torch}（CUDA {cuda}）没有适用于 {wrong.name} 的内核：会报 `no kernel image is available`",
    )
    remedy = Text(
        "install a torch built for CUDA 12 (wheels named +cu126 have the widest range of cards), or use newer cards",
        "安装为 CUDA 12 构建的 torch（+cu126 支持的显卡最广），或使用更新的 GPU",
    )
    if too_new:
        remedy = Text(
            "install a torch built for CUDA 12.8 or later (wheels named +cu128, +cu130)",
            "安装为 CUDA 12.8 或更新版本构建的 torch（+cu128、+cu130）",
        )
    return (Finding("gpu.capability", Severity.ERROR, measured, bound, message, remedy),)


def _without_nvml(inputs: PreflightInputs) -> tuple[Finding, ...]:
    facts = inputs.facts
    files = facts.gpu_device_files
    bound = f">= {inputs.num_ranks}" if inputs.device == "cuda" else "none, or readable"
    if any(file.startswith("/dev/nvidia") for file in files):
        if inputs.device == "cpu" and _hides_all(inputs.env.get("CUDA_VISIBLE_DEVICES")):
            return ()  # a run on the CPU by intention
        message = Text(
            f"this node has {', '.join(files)} but the driver does not answer: {facts.nvml}",
            f"本机有 {'、'.join(files)}，但驱动没有响应：{facts.nvml}",
        )
        return (Finding("gpu.visible", Severity.ERROR, facts.nvml, bound, message, _mend_driver(inputs)),)
    if files:
        message = Text(
            f"{', '.join(files)} cannot be read through NVML: number, memory and capability of the cards "
            "are not checked",
            f"{'、'.join(files)} 无法通过 NVML 读取：不检查卡的数量、显存和算力",
        )
        remedy = Text(
            "see with the vendor's tool (`ppu-smi`) that all cards are there", "请用厂商工具（`ppu-smi`）确认"
        )
        return (Finding("gpu.visible", Severity.WARNING, facts.nvml, bound, message, remedy),)
    if inputs.device == "cpu":
        return ()
    message = Text(f"this node has no GPU that can be seen: {facts.nvml}", f"本机没有可见的 GPU：{facts.nvml}")
    return (_visible_error("0", bound, message, _more_gpus(inputs.reader)),)


def _idle_gpus(inputs: PreflightInputs) -> tuple[Finding, ...]:
    num_gpus = len(inputs.facts.gpus)
    if not num_gpus:
        return ()
    message = Text(
        f"this node has {num_gpus} GPUs, and this job will train on the CPU",
        f"本机有 {num_gpus} 块 GPU，但本任务将在 CPU 上训练",
    )
    measured = f"{len(inputs.visible)} of {num_gpus} visible"
    remedy = _fix_visible_devices(inputs)
    return (Finding("gpu.visible", Severity.WARNING, measured, "none idle", message, remedy),)


def _visible_error(measured: str, bound: str, message: Text, remedy: Text) -> Finding:
    return Finding("gpu.visible", Severity.ERROR, measured, bound, message, remedy)


def _fix_visible_devices(inputs: PreflightInputs) -> Text:
    every = ",".join(str(gpu.index) for gpu in inputs.facts.gpus)
    return Text(
        f"unset CUDA_VISIBLE_DEVICES, or set it to indices of this node: {every}",
        f"取消 CUDA_VISIBLE_DEVICES，或设为本机的编号：{every}",
    )


def _more_gpus(reader: Reader) -> Text:
    fewer = Text("set cluster.nproc_per_node: auto", "设置 cluster.nproc_per_node: auto")
    ask = {
        Reader.DLC: Text(
            "ask for GPUs in the DLC job (ResourceConfig.GPU, or a GPU instance type as EcsSpec)",
            "在 DLC 任务中申请 GPU（ResourceConfig.GPU，或选择 GPU 实例规格 EcsSpec）",
        ),
        Reader.KUBERNETES: Text(
            "ask for `resources.limits: {nvidia.com/gpu: N}` in the pod",
            "在 Pod 中申请 `resources.limits: {nvidia.com/gpu: N}`",
        ),
        Reader.SLURM: Text("ask for `--gpus-per-node=N`", "申请 `--gpus-per-node=N`"),
        Reader.CONTAINER: Text("start the container with `--gpus all`", "启动容器时加上 `--gpus all`"),
        Reader.BARE: Text("see with `nvidia-smi` that the driver is installed", "用 `nvidia-smi` 确认驱动已安装"),
    }[reader]
    return Text(f"{ask.en}, or {fewer.en}", f"{ask.zh}，或{fewer.zh}")


def _mend_driver(inputs: PreflightInputs) -> Text:
    mend = Text(
        "`nvidia-smi` should show the same; after a driver update reload its modules or reboot the machine",
        "`nvidia-smi` 应显示同样的错误；若刚升级过驱动，请重新加载内核模块或重启机器",
    )
    if inputs.reader is not Reader.BARE:
        mend = Text(
            "the container lacks the driver's libraries or they do not fit the host's driver: start it with the NVIDIA "
            "container runtime and NVIDIA_DRIVER_CAPABILITIES=compute,utility, without a libnvidia-ml of its own; "
            "else ask for another node",
            "容器内缺少驱动库，或与宿主机驱动不匹配：请使用 NVIDIA 容器运行时，设置 "
            "NVIDIA_DRIVER_CAPABILITIES=compute,utility，镜像中不要自带 libnvidia-ml；否则请换一个节点",
        )
    if inputs.device == "cpu":
        return Text(
            mend.en + "; to train on the CPU on purpose: CUDA_VISIBLE_DEVICES=-1",
            mend.zh + "；若本就要在 CPU 上训练：CUDA_VISIBLE_DEVICES=-1",
        )
    return mend


def _other_node(inputs: PreflightInputs) -> Text:
    if inputs.reader is Reader.DLC:
        return Text(
            "use another node (JobSpecs[].AssignNodeSpec.AntiAffinityNodeNames leaves this one out) and report it",
            "换一个节点提交（JobSpecs[].AssignNodeSpec.AntiAffinityNodeNames 可排除本节点），并上报该节点",
        )
    return Text(
        "use another node; on this one `dmesg | grep -i xid` shows the fault, a reboot or repair is needed",
        "换一个节点；本机可用 `dmesg | grep -i xid` 查看故障，需要重启或维修",
    )


def _hides_all(cuda_visible_devices: str | None) -> bool:
    return cuda_visible_devices is not None and cuda_visible_devices.strip() in ("", "-1", "NoDevFiles")


def _by_name(gpus: Sequence[Gpu]) -> dict[str, list[Gpu]]:
    groups: dict[str, list[Gpu]] = {}
    for gpu in gpus:
        groups.setdefault(gpu.name, []).append(gpu)
    return groups


def _major(version: str) -> int:
    return int(version.partition(".")[0])


def _dotted(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"
