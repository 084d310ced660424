"""Main memory, limits of the process, and the Python packages that training needs."""

from __future__ import annotations

from launcher.host.compute import MEMORY_TIGHT
from launcher.host.facts import UNLIMITED, Memory
from launcher.i18n import Text
from launcher.preflight.finding import Finding, Severity, show_bytes
from launcher.preflight.inputs import PreflightInputs, Reader

# DataLoader workers pass tensors as file descriptors, one for each tensor in flight: 1024 does not last.
NOFILE_WITH_WORKERS, NOFILE_WITHOUT = 65536, 4096
NOFILE_FAILS_BELOW = 256  # libraries, NCCL's sockets and logs of a single rank come near this

STACK = ("torch", "transformers", "accelerate", "deepspeed")
STACK_OF_METHOD = {"full": (), "lora": ("peft",), "qlora": ("peft", "bitsandbytes")}
PACKAGES_OF_QLORA_EXTRA = frozenset({"bitsandbytes"})  # all others come with ftlaunch[train]


def check_memory(inputs: PreflightInputs) -> tuple[Finding, ...]:
    memory, needed = inputs.facts.memory, inputs.memory_needed_bytes
    if memory is None or needed is None:
        return ()
    measured, bound = _show_memory(memory), f">= {show_bytes(needed)}"
    if needed <= MEMORY_TIGHT * memory.usable_bytes:
        return (Finding("memory.host", Severity.OK, measured, bound, Text("enough memory", "内存足够")),)
    severity = Severity.ERROR if needed > memory.usable_bytes else Severity.WARNING
    message = Text(
        f"{inputs.num_ranks} ranks on this node need about {show_bytes(needed)} of main memory: "
        "the kernel would kill one (SIGKILL, exit code -9 or 137)",
        f"本机 {inputs.num_ranks} 个 rank 约需 {show_bytes(needed)} 内存："
        "内核会杀死其中之一（SIGKILL，退出码 -9 或 137）",
    )
    less = Text(
        "use fewer ranks on a node (cluster.nproc_per_node) or deepspeed.offload_optimizer: false",
        "减少每个节点的 rank 数（cluster.nproc_per_node），或设置 deepspeed.offload_optimizer: false",
    )
    more = _more_memory(inputs.reader)
    remedy = Text(f"{more.en}, {less.en}", f"{more.zh}，{less.zh}")
    return (Finding("memory.host", severity, measured, bound, message, remedy),)


def check_memory_tier(inputs: PreflightInputs) -> tuple[Finding, ...]:
    """Checkpoints in memory, beside what the ranks need themselves. Where job.yaml leaves it open they are off then
    (`launcher.plan.forecasts.choose_memory_tier` decides by the same bound)."""
    memory, needed = inputs.facts.memory, inputs.memory_tier_bytes
    if memory is None or needed is None:
        return ()
    ranks = inputs.memory_needed_bytes or 0
    free = max(0, memory.usable_bytes - ranks)
    measured, bound = f"{show_bytes(free)} left by the ranks", f">= {show_bytes(needed)}"
    if needed + ranks <= MEMORY_TIGHT * memory.usable_bytes:
        return (Finding("memory.tier", Severity.OK, measured, bound, Text("room in memory", "内存中放得下")),)
    sizes = Text(
        f"memory tier needs {show_bytes(needed)} on this node, {show_bytes(free)} are free",
        f"内存检查点在本机需要 {show_bytes(needed)}，可用 {show_bytes(free)}",
    )
    off = Text(
        ": it is off, and after a fault the run goes on from the checkpoint on disk",
        "：因此已关闭，故障后从磁盘上的检查点继续",
    )
    killed = Text(
        ": the kernel may kill a rank (SIGKILL, exit code -9 or 137)",
        "：内核可能杀死某个 rank（SIGKILL，退出码 -9 或 137）",
    )
    what = killed if inputs.memory_tier_required else off
    more, peer = _more_memory(inputs.reader), Text("", "")
    if inputs.num_nodes > 1:
        peer = Text(", set checkpoint.peer: off (a third less)", "，设置 checkpoint.peer: off（减少三分之一）")
    instead = Text(" or set checkpoint.memory: off", "，或设置 checkpoint.memory: off")
    remedy = Text(f"{more.en}{peer.en}{instead.en}", f"{more.zh}{peer.zh}{instead.zh}")
    severity = Severity.ERROR if inputs.memory_tier_required and needed > free else Severity.WARNING
    message = Text(sizes.en + what.en, sizes.zh + what.zh)
    return (Finding("memory.tier", severity, measured, bound, message, remedy),)


def check_nofile(inputs: PreflightInputs) -> tuple[Finding, ...]:
    soft, hard = inputs.facts.nofile_limit, inputs.facts.nofile_hard_limit
    wanted = NOFILE_WITH_WORKERS if inputs.num_dataloader_workers else NOFILE_WITHOUT
    measured = "unlimited" if soft == UNLIMITED else str(soft)
    if soft >= wanted:
        return (Finding("limits.nofile", Severity.OK, measured, f">= {wanted}", Text("enough files", "文件数足够")),)
    severity = Severity.ERROR if soft < NOFILE_FAILS_BELOW else Severity.WARNING
    message = Text(
        f"a process may open {soft} files here: training may end with 'Too many open files' (errno 24)",
        f"本机每个进程最多打开 {soft} 个文件：训练可能报 'Too many open files'（errno 24）",
    )
    if hard >= wanted:
        remedy = Text(f"`ulimit -n {wanted}` before ftlaunch", f"启动 ftlaunch 之前执行 `ulimit -n {wanted}`")
    else:
        remedy = _raise_hard_limit(inputs.reader, wanted)
    return (Finding("limits.nofile", severity, measured, f">= {wanted}", message, remedy),)


def check_stack(inputs: PreflightInputs) -> tuple[Finding, ...]:
    """The packages of ftlaunch's own trainer; a `command` of the user's brings its own."""
    if inputs.method is None:
        return ()
    versions = inputs.facts.versions
    needed = (*STACK, *STACK_OF_METHOD[inputs.method])
    missing = [package for package in needed if package not in versions]
    if missing:
        return (_missing_packages(inputs, missing),)
    if inputs.device == "cuda" and versions["torch"].endswith("+cpu"):
        return (_torch_without_cuda(versions["torch"]),)
    measured = ", ".join(f"{package} {versions[package]}" for package in needed)
    return (Finding("versions.stack", Severity.OK, measured, "installed", Text("all installed", "均已安装")),)


def _show_memory(memory: Memory) -> str:
    if memory.cgroup_limit_bytes is None:
        return f"{show_bytes(memory.usable_bytes)} of {show_bytes(memory.total_bytes)} available"
    used = show_bytes(memory.cgroup_used_bytes or 0)
    limit = show_bytes(memory.cgroup_limit_bytes)
    return f"{show_bytes(memory.usable_bytes)} available (cgroup limit {limit}, {used} used)"


def _more_memory(reader: Reader) -> Text:
    return {
        Reader.DLC: Text(
            "raise Memory of the DLC job's resource configuration", "调大 DLC 任务资源配置中的内存（Memory）"
        ),
        Reader.KUBERNETES: Text("raise the pod's memory limit", "调大 Pod 的内存上限"),
        Reader.SLURM: Text("ask for more with `--mem`", "用 `--mem` 申请更多内存"),
        Reader.CONTAINER: Text("raise the container's `--memory`", "调大容器的 `--memory`"),
        Reader.BARE: Text("end other programs on this machine", "结束本机上的其他程序"),
    }[reader]


def _raise_hard_limit(reader: Reader, wanted: int) -> Text:
    workers = Text(
        "; without that: training.dataloader_num_workers: 0", "；若无法调整：training.dataloader_num_workers: 0"
    )
    if reader is Reader.CONTAINER:
        how = Text(f"start the container with `--ulimit nofile={wanted}`", f"启动容器时加上 `--ulimit nofile={wanted}`")
    elif reader in (Reader.DLC, Reader.KUBERNETES):
        how = Text(
            "the container engine of the node sets this limit (LimitNOFILE): ask its administrator",
            "该上限由节点的容器引擎设置（LimitNOFILE）：请联系管理员",
        )
    else:
        how = Text(
            f"as root: `* - nofile {wanted}` in /etc/security/limits.conf, then log in again",
            f"以 root 在 /etc/security/limits.conf 中加入 `* - nofile {wanted}`，然后重新登录",
        )
    return Text(how.en + workers.en, how.zh + workers.zh)


def _missing_packages(inputs: PreflightInputs, missing: list[str]) -> Finding:
    in_qlora = [package for package in missing if package in PACKAGES_OF_QLORA_EXTRA]
    extras = ",".join(["train"] * (len(in_qlora) < len(missing)) + ["qlora"] * bool(in_qlora))
    command = f'pip install "ftlaunch[{extras}]"'
    where = Text("", "")
    if inputs.reader in (Reader.DLC, Reader.KUBERNETES):
        where = Text(" in the image (with the torch that fits its driver)", "（在镜像中安装，torch 需与驱动匹配）")
    return Finding(
        "versions.stack",
        Severity.ERROR,
        f"missing: {', '.join(missing)}",
        "installed",
        Text(
            f"method {inputs.method} needs packages that this Python does not have: {', '.join(missing)}",
            f"method {inputs.method} 需要的软件包未安装：{'、'.join(missing)}",
        ),
        Text(f"`{command}`{where.en}", f"`{command}`{where.zh}"),
    )


def _torch_without_cuda(version: str) -> Finding:
    return Finding(
        "versions.stack",
        Severity.ERROR,
        f"torch {version}",
        "a build with CUDA",
        Text(
            f"torch {version} was built without CUDA: it cannot see the GPUs of this node",
            f"torch {version} 不带 CUDA：无法使用本机的 GPU",
        ),
        Text(
            "install torch without `+cpu`: `pip install --force-reinstall torch` from PyPI",
            "安装不带 `+cpu` 的 torch：从 PyPI 执行 `pip install --force-reinstall torch`",
        ),
    )
