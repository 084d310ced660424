"""/dev/shm and the output folder."""

from __future__ import annotations

from launcher.host.facts import Disk, Shm
from launcher.host.storage import why_locks_stay_here
from launcher.i18n import Text
from launcher.preflight.check_mount import shares_an_object_mount
from launcher.preflight.finding import Finding, Severity, show_bytes
from launcher.preflight.inputs import PreflightInputs, Reader

MIB, GIB = 1 << 20, 1 << 30

# NCCL makes segments of some 10 MB for each pair of ranks and channel in /dev/shm; DataLoader workers pass each batch
# through it. Below 128 MiB (containers get 64 MiB by default) that fails outright, usually as SIGBUS without a message.
SHM_FAILS_BELOW_BYTES = 128 * MIB
SHM_WANTED_BYTES = 1 * GIB
SHM_PER_PAIR_BYTES = 64 * MIB

DISK_LOW_BYTES = 1 * GIB  # where nobody could say how much a run needs
# One machine's own. Overlay may have a network mount below it, which /proc does not tell: hence warnings.
LOCAL_FSTYPES = frozenset(
    {"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "bcachefs", "jfs", "overlay", "aufs", "tmpfs", "ramfs"}
)
VOLATILE_FSTYPES = frozenset({"overlay", "tmpfs", "ramfs", "aufs"})


def check_shm(inputs: PreflightInputs) -> tuple[Finding, ...]:
    shm = inputs.facts.shm or Shm("/dev/shm", 0, 0)
    wanted = shm_wanted_bytes(inputs.num_ranks)
    num_users = inputs.num_ranks * (1 + inputs.num_dataloader_workers)
    measured = f"{show_bytes(shm.free_bytes)} free of {show_bytes(shm.size_bytes)}"
    if num_users == 1 or shm.free_bytes >= wanted:
        bound = f">= {show_bytes(wanted)}" if num_users > 1 else "unused"
        return (Finding("shm.size", Severity.OK, measured, bound, Text("/dev/shm is large enough", "/dev/shm 足够")),)
    needs_it = inputs.num_dataloader_workers > 0 or inputs.device == "cuda"
    fails = needs_it and shm.free_bytes < SHM_FAILS_BELOW_BYTES
    message = Text(
        f"/dev/shm is too small for {inputs.num_ranks} ranks with {inputs.num_dataloader_workers} DataLoader workers "
        "each: they end with SIGBUS (exit code 135 or -7) or an NCCL system error",
        f"/dev/shm 太小：本机 {inputs.num_ranks} 个 rank，每个 {inputs.num_dataloader_workers} 个 DataLoader worker，"
        "会以 SIGBUS（退出码 135 或 -7）或 NCCL system error 失败",
    )
    severity = Severity.ERROR if fails else Severity.WARNING
    remedy = _free_shm() if shm.size_bytes >= wanted else _enlarge_shm(inputs.reader, wanted)
    return (Finding("shm.size", severity, measured, f">= {show_bytes(wanted)}", message, remedy),)


def check_disk_free(inputs: PreflightInputs) -> tuple[Finding, ...]:
    disk = inputs.facts.disk
    if disk.free_bytes is None:
        return ()  # object stores do not say; whether the folder answers at all is `disk.writable`
    if disk.free_inodes == 0:
        return (_no_inodes(disk),)
    needed = inputs.disk_needed_bytes
    bound_bytes = DISK_LOW_BYTES if needed is None else needed
    measured, bound = f"{show_bytes(disk.free_bytes)} free", f">= {show_bytes(bound_bytes)}"
    if disk.free_bytes >= bound_bytes:
        return (Finding("disk.free", Severity.OK, measured, bound, Text("room for checkpoints", "检查点空间足够")),)
    severity = Severity.WARNING if needed is None else Severity.ERROR
    message = Text(
        f"{disk.path} has too little room for the checkpoints of this run",
        f"{disk.path} 的剩余空间放不下本次训练的检查点",
    )
    return (Finding("disk.free", severity, measured, bound, message, _more_disk(inputs.reader)),)


def check_disk_writable(inputs: PreflightInputs) -> tuple[Finding, ...]:
    disk = inputs.facts.disk
    if disk.writable == "ok":
        return (Finding("disk.writable", Severity.OK, disk.path, "writable", Text("can be written", "可以写入")),)
    message = Text(f"output_dir cannot be written: {disk.writable}", f"output_dir 无法写入：{disk.writable}")
    remedy = Text(
        "choose another output_dir, or give this user the right to write there (`ls -ld` and `mount` show why)",
        "换一个 output_dir，或给当前用户写权限（用 `ls -ld` 和 `mount` 查看原因）",
    )
    if inputs.reader is Reader.DLC:
        remedy = Text(
            "set MountAccess: RW for this data source of the DLC job (public data sets are always read-only), "
            "or choose another output_dir",
            "把 DLC 任务中该数据源的 MountAccess 设为 RW（公共数据集始终只读），或换一个 output_dir",
        )
    return (Finding("disk.writable", Severity.ERROR, disk.writable, "writable", message, remedy),)


def check_disk_durable(inputs: PreflightInputs) -> tuple[Finding, ...]:
    """A checkpoint on the container's own disk is gone with the container: nothing could be resumed from it."""
    mount = inputs.facts.mount
    if mount is None:
        return ()
    volatile = mount.fstype in VOLATILE_FSTYPES and (inputs.reader is not Reader.BARE or mount.fstype != "overlay")
    measured = f"{mount.fstype} at {mount.path}"
    bound = "storage that outlives the machine"
    if not volatile:
        return (Finding("disk.durable", Severity.OK, measured, bound, Text("outlives a restart", "重启后仍在")),)
    message = Text(
        "output_dir is on storage that is lost with this container or machine: after a preemption training would "
        "begin from the start",
        "output_dir 位于随容器或机器消失的存储上：被抢占后训练只能从头开始",
    )
    remedy = {
        Reader.DLC: Text(
            "mount a NAS, CPFS or OSS data source in the DLC job (usually at /mnt/data) and put output_dir there",
            "在 DLC 任务中挂载 NAS、CPFS 或 OSS 数据源（通常挂载到 /mnt/data），并把 output_dir 放到其中",
        ),
        Reader.KUBERNETES: Text(
            "mount a persistent volume claim in the pod and put output_dir there",
            "在 Pod 中挂载 PVC，并把 output_dir 放到其中",
        ),
    }.get(
        inputs.reader,
        Text(
            "put output_dir on a disk or network mount (with Docker: `-v /data/runs:/runs`)",
            "把 output_dir 放到磁盘或网络存储上（Docker：`-v /data/runs:/runs`）",
        ),
    )
    return (Finding("disk.durable", Severity.WARNING, measured, bound, message, remedy),)


def check_disk_shared(inputs: PreflightInputs) -> tuple[Finding, ...]:
    """Several nodes agree through files of output_dir, write their parts of each checkpoint there and read them all."""
    mount = inputs.facts.mount
    if mount is None or inputs.num_nodes == 1:
        return ()
    on_objects = shares_an_object_mount(inputs)
    if on_objects is not None:
        return (on_objects,)
    measured, bound = f"{mount.fstype} at {mount.path}", "one folder for all nodes, with locks"
    if mount.fstype in LOCAL_FSTYPES:
        message = Text(
            f"{inputs.num_nodes} nodes need one output_dir, and {mount.fstype} usually belongs to one machine: nodes "
            "that do not see the same folder are not let in, or wait for each other in vain",
            f"{inputs.num_nodes} 个节点需要共用同一个 output_dir，而 {mount.fstype} 通常只属于一台机器："
            "看到的不是同一目录的节点不会被接纳，或只能互相空等",
        )
        remedy = Text(
            "put output_dir on storage that every node mounts at the same path (NAS, CPFS, NFS, Lustre); if it is, "
            "leave this check out: check.skip: [disk.shared]",
            "把 output_dir 放到各节点以相同路径挂载的存储上（NAS、CPFS、NFS、Lustre）；"
            "若已经如此，可跳过此项：check.skip: [disk.shared]",
        )
        return (Finding("disk.shared", Severity.WARNING, measured, bound, message, remedy),)
    if not why_locks_stay_here(mount):
        return (Finding("disk.shared", Severity.OK, measured, bound, Text("can be shared", "可以共用")),)
    measured = why_locks_stay_here(mount)
    message = Text(
        f"locks on {mount.path} may not reach other machines: whether nodes of an earlier start still live, or which "
        "of two halves of the nodes goes on, cannot be told for certain there",
        f"{mount.path} 上的锁可能不能跨机器生效：无法确定较早一次启动的节点是否仍在运行，或两半节点中由哪一半继续",
    )
    remedy = Text(
        "put output_dir on a file system with locks (NAS with NFS and without nolock, CPFS, Lustre); or see to it that "
        "no node of an earlier start lives when you start again",
        "把 output_dir 放到支持锁的文件系统上（不带 nolock 的 NFS/NAS、CPFS、Lustre）；"
        "或在重新启动前确认较早一次启动的节点都已停止",
    )
    return (Finding("disk.shared", Severity.WARNING, measured, bound, message, remedy),)


def shm_wanted_bytes(num_ranks: int) -> int:
    """At least 1 GiB, and 64 MiB for each ordered pair of local ranks (4 GiB for eight)."""
    return max(SHM_WANTED_BYTES, SHM_PER_PAIR_BYTES * num_ranks**2)


def _free_shm() -> Text:
    return Text(
        "it is large enough but in use: `ls -l /dev/shm` shows what earlier processes left; remove what nobody uses",
        "容量足够但已被占用：用 `ls -l /dev/shm` 查看以前的进程遗留的文件，删除无人使用的",
    )


def _enlarge_shm(reader: Reader, wanted: int) -> Text:
    gib = -(-wanted // GIB)
    by_reader = {
        Reader.DLC: Text(
            f"in the DLC job set the shared memory of the resource configuration to {gib} GiB or more "
            f"(ResourceConfig.SharedMemory, `--shared-memory {gib}Gi`); "
            "jobs on public resources (EcsSpec) have no such field: use a resource quota",
            f"在 DLC 任务的资源配置中把共享内存设为至少 {gib} GiB"
            f"（ResourceConfig.SharedMemory，命令行 `--shared-memory {gib}Gi`）；"
            "公共资源（EcsSpec）任务没有这个字段：请使用资源配额",
        ),
        Reader.KUBERNETES: Text(
            f"mount a volume `emptyDir: {{medium: Memory, sizeLimit: {gib}Gi}}` at /dev/shm in the pod "
            "(it counts against the pod's memory limit)",
            f"在 Pod 的 /dev/shm 挂载 `emptyDir: {{medium: Memory, sizeLimit: {gib}Gi}}`（计入 Pod 的内存上限）",
        ),
        Reader.CONTAINER: Text(
            f"start the container with `--shm-size={gib}g` (or `--ipc=host`)",
            f"启动容器时加上 `--shm-size={gib}g`（或 `--ipc=host`）",
        ),
    }
    enlarge = by_reader.get(
        reader,
        Text(
            f"as root: `mount -o remount,size={gib}G /dev/shm`",
            f"以 root 执行：`mount -o remount,size={gib}G /dev/shm`",
        ),
    )
    instead = Text(
        "; without that: training.dataloader_num_workers: 0 and env.NCCL_SHM_DISABLE: 1 (slower)",
        "；若无法调整：设置 training.dataloader_num_workers: 0 和 env.NCCL_SHM_DISABLE: 1（会变慢）",
    )
    return Text(enlarge.en + instead.en, enlarge.zh + instead.zh)


def _no_inodes(disk: Disk) -> Finding:
    return Finding(
        "disk.free",
        Severity.ERROR,
        "0 free inodes",
        ">= 1",
        Text(
            f"the file system of {disk.path} has no free inode: every new file fails with 'No space left on device'",
            f"{disk.path} 所在文件系统的 inode 已用尽：新建任何文件都会报 'No space left on device'",
        ),
        Text(
            "delete folders with very many small files there (`df -i`), or choose another output_dir",
            "删除其中小文件极多的目录（`df -i`），或换一个 output_dir",
        ),
    )


def _more_disk(reader: Reader) -> Text:
    common = Text(
        "free some space, lower checkpoint.keep, or choose another output_dir",
        "清理空间、调小 checkpoint.keep，或换一个 output_dir",
    )
    if reader is Reader.DLC:
        return Text(common.en + " on a NAS, CPFS or OSS mount", common.zh + "（放到 NAS、CPFS 或 OSS 挂载上）")
    return common
