"""Limits beside memory: locked memory for RDMA, processors for DataLoader workers, what earlier jobs left in "
"/dev/shm."""

from __future__ import annotations

from launcher.host.facts import UNLIMITED
from launcher.i18n import Text
from launcher.preflight.finding import Finding, Severity, show_bytes
from launcher.preflight.inputs import PreflightInputs, Reader

# An RDMA device registers its buffers as locked memory; the usual limits of 64 KiB and 8 MiB are used up by the first.
MEMLOCK_WANTED_BYTES = 1 << 30
PROCESSES_PER_CPU = 2  # above it workers and ranks take the processor from each other
STALE_BYTES = 16 << 20  # below it nobody will miss the room


def check_memlock(inputs: PreflightInputs) -> tuple[Finding, ...]:
    """Only where RDMA will be used."""
    if not inputs.facts.rdma or inputs.num_nodes == 1 or inputs.env.get("NCCL_IB_DISABLE") == "1":
        return ()
    limit, bound = inputs.facts.memlock_limit, "unlimited"
    measured = "unlimited" if limit == UNLIMITED else show_bytes(limit)
    if limit >= MEMLOCK_WANTED_BYTES:
        return (Finding("limits.memlock", Severity.OK, measured, bound, Text("enough", "足够")),)
    message = Text(
        f"a process may lock {measured} of memory and RDMA needs more: NCCL ends with `ibv_reg_mr failed` or "
        "`Cannot allocate memory`",
        f"每个进程最多锁定 {measured} 内存，RDMA 不够用：NCCL 会报 `ibv_reg_mr failed` 或 `Cannot allocate memory`",
    )
    how = {
        Reader.DLC: Text(
            "use Lingjun resources with RDMA (Settings.EnableRDMA), which set the limit",
            "使用灵骏资源并开启 RDMA（Settings.EnableRDMA），平台会设置该上限",
        ),
        Reader.KUBERNETES: Text(
            "give the container the capability IPC_LOCK, or LimitMEMLOCK=infinity to the container engine",
            "为容器添加 IPC_LOCK 能力，或在容器引擎中设置 LimitMEMLOCK=infinity",
        ),
        Reader.CONTAINER: Text(
            "start the container with `--ulimit memlock=-1`", "启动容器时加上 `--ulimit memlock=-1`"
        ),
    }.get(
        inputs.reader,
        Text(
            "as root: `* - memlock unlimited` in /etc/security/limits.conf, then log in again",
            "以 root 在 /etc/security/limits.conf 中加入 `* - memlock unlimited`，然后重新登录",
        ),
    )
    instead = Text(
        "; without RDMA, slower: env: {NCCL_IB_DISABLE: 1}", "；或不用 RDMA（较慢）：env: {NCCL_IB_DISABLE: 1}"
    )
    remedy = Text(how.en + instead.en, how.zh + instead.zh)
    return (Finding("limits.memlock", Severity.ERROR, measured, bound, message, remedy),)


def check_cpus(inputs: PreflightInputs) -> tuple[Finding, ...]:
    cpus, workers = inputs.facts.cpu.num_usable, inputs.num_dataloader_workers
    processes = inputs.num_ranks * (1 + workers)
    if not workers:
        return ()
    measured, bound = f"{processes} processes on {cpus} CPU(s)", f"<= {PROCESSES_PER_CPU} for each CPU"
    if processes <= PROCESSES_PER_CPU * cpus:
        return (Finding("limits.cpus", Severity.OK, measured, bound, Text("enough", "足够")),)
    fitting = max(0, PROCESSES_PER_CPU * cpus // inputs.num_ranks - 1)
    message = Text(
        f"{inputs.num_ranks} ranks with {workers} DataLoader workers each share {cpus} CPU(s): GPUs will wait for data",
        f"{inputs.num_ranks} 个 rank，每个 {workers} 个 DataLoader worker，共用 {cpus} 个 CPU：GPU 会等待数据",
    )
    remedy = Text(
        f"training.dataloader_num_workers: {fitting} (records are encoded before the first step, workers only pad), "
        "or ask for more CPUs",
        f"设置 training.dataloader_num_workers: {fitting}（数据在第一步前已编码，worker 只做填充），或申请更多 CPU",
    )
    return (Finding("limits.cpus", Severity.WARNING, measured, bound, message, remedy),)


def check_shm_stale(inputs: PreflightInputs) -> tuple[Finding, ...]:
    """Segments that nobody has mapped. None is removed: whether a process of another container uses it cannot be "
    "seen."""
    stale = inputs.facts.shm_stale
    size, bound = sum(segment.size_bytes for segment in stale), f"< {show_bytes(STALE_BYTES)}"
    if size < STALE_BYTES:
        return ()
    shown = ", ".join(f"{segment.name} ({show_bytes(segment.size_bytes)})" for segment in stale[:5])
    more = f" and {len(stale) - 5} more" if len(stale) > 5 else ""
    message = Text(
        f"earlier jobs of this user left segments in /dev/shm that no process here has mapped: {shown}{more}",
        f"当前用户以前的任务在 /dev/shm 中留下了无人映射的段：{shown}",
    )
    names = " ".join(f"/dev/shm/{segment.name}" for segment in stale[:20])
    remedy = Text(
        f"if no other container shares this /dev/shm: `rm {names}`",
        f"若没有其他容器共用该 /dev/shm：`rm {names}`",
    )
    measured = f"{len(stale)} segment(s), {show_bytes(size)}"
    return (Finding("shm.stale", Severity.WARNING, measured, bound, message, remedy),)
