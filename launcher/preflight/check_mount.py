"""What kind of storage output_dir is on, by what its probe has found, and what a run needs beside an object mount."""

from __future__ import annotations

from launcher.host.facts import StorageKind, StorageProbe
from launcher.i18n import Text
from launcher.preflight.finding import Finding, Severity, show_bytes
from launcher.preflight.inputs import PreflightInputs, Reader

_BOUND = "what checkpoints need"


def check_disk_kind(inputs: PreflightInputs) -> tuple[Finding, ...]:
    storage = inputs.facts.storage
    if storage is None or inputs.facts.disk.writable != "ok":
        return ()  # `disk.writable` says it
    if storage.not_tried:
        return (_not_tried(storage),)
    if storage.unusable:
        return (_unusable(storage, inputs.reader),)
    if storage.kind is StorageKind.POSIX:
        message = Text("checkpoints get their name with one rename", "检查点通过一次重命名得到最终名称")
        return (Finding("disk.kind", Severity.OK, f"posix ({storage.fstype})", _BOUND, message),)
    measured = f"object ({storage.fstype}; {'; '.join(storage.reasons)})"
    if inputs.tensorboard and not storage.can("append"):
        return (_no_tensorboard(measured, inputs.reader),)
    message = Text(
        "files are put under their final name and read back, MANIFEST.json is the last one; records and logs are "
        "written on this node's own disk and copied",
        "文件直接写到最终名称并回读校验，MANIFEST.json 最后写入；记录与日志先写在本机磁盘，再复制过去",
    )
    return (Finding("disk.kind", Severity.OK, measured, _BOUND, message),)


def check_disk_scratch(inputs: PreflightInputs) -> tuple[Finding, ...]:
    """On an object mount the ranks make a checkpoint on this node's own disk before it is put to its place."""
    scratch, needed = inputs.scratch, inputs.scratch_needed_bytes
    if scratch is None or scratch.free_bytes is None or needed is None:
        return ()
    measured, bound = f"{show_bytes(scratch.free_bytes)} free in {scratch.path}", f">= {show_bytes(needed)}"
    if scratch.free_bytes >= needed:
        return (
            Finding("disk.scratch", Severity.OK, measured, bound, Text("room for one checkpoint", "放得下一个检查点")),
        )
    message = Text(
        "a checkpoint is made on this node's own disk before it is put to the object mount: too little room there",
        "检查点先在本机磁盘上生成，再写到对象存储挂载，而本机磁盘空间不足",
    )
    remedy = Text(
        "name a larger local disk: env: {TMPDIR: /local/disk}",
        "指定更大的本地磁盘：env: {TMPDIR: /local/disk}",
    )
    return (Finding("disk.scratch", Severity.ERROR, measured, bound, message, remedy),)


def check_disk_speed(inputs: PreflightInputs) -> tuple[Finding, ...]:
    """Whether a last checkpoint is on disk before a preempted machine is gone."""
    speed, checkpoint = inputs.disk_speed, inputs.checkpoint_bytes
    if speed is None:
        return ()
    reading = f", read {show_bytes(int(speed.read_bytes_per_s))}/s" if speed.read_bytes_per_s is not None else ""
    measured = f"write {show_bytes(int(speed.write_bytes_per_s))}/s{reading}"
    if checkpoint is None or not inputs.grace_s:
        return ()
    takes_s = checkpoint / max(speed.write_bytes_per_s, 1.0)
    bound = f"a checkpoint of {show_bytes(checkpoint)} within {inputs.grace_s:g} s (spot.grace_seconds)"
    if takes_s <= inputs.grace_s:
        return (Finding("disk.speed", Severity.OK, measured, bound, Text("fast enough", "足够快")),)
    message = Text(
        f"one checkpoint takes about {takes_s:.0f} s here: the save after a preemption notice will not be whole in "
        "time, "
        "and the run goes back to the checkpoint before",
        f"在此写一个检查点约需 {takes_s:.0f} 秒：收到抢占通知后来不及保存完整，只能从更早的检查点继续",
    )
    least = Text("a NAS or CPFS with more throughput, or a local disk", "吞吐更高的 NAS 或 CPFS，或本地磁盘")
    if inputs.reader is Reader.DLC:
        least = Text(
            "CPFS or a NAS of a faster class (its throughput grows with its size); "
            "Settings.TerminationGracePeriodSeconds of the DLC job gives more time, with spot.grace_seconds",
            "CPFS 或更高规格的 NAS（吞吐随容量增长）；或延长 DLC 任务的 Settings.TerminationGracePeriodSeconds 和 "
            "spot.grace_seconds",
        )
    remedy = Text(
        f"{least.en}; or lower checkpoint.every_steps, so that less is lost",
        f"{least.zh}；或调小 checkpoint.every_steps 以减少损失",
    )
    return (Finding("disk.speed", Severity.WARNING, measured, bound, message, remedy),)


def shares_an_object_mount(inputs: PreflightInputs) -> Finding | None:
    """For `disk.shared`: several nodes cannot agree through an object mount."""
    storage = inputs.facts.storage
    if storage is None or storage.kind is StorageKind.POSIX:
        return None
    message = Text(
        f"{inputs.num_nodes} nodes cannot agree through an object mount: locks and exclusive creation hold for one "
        "machine, and what one node has written may be unknown to the others for a minute. Two halves of the nodes "
        "could both go on",
        f"{inputs.num_nodes} 个节点无法通过对象存储挂载达成一致：锁和独占创建只在单机有效，"
        "一个节点写入的内容其他节点可能一分钟后才看到，两半节点可能同时继续训练",
    )
    remedy = _elsewhere(inputs.reader, for_nodes=True)
    measured = f"object ({storage.fstype})"
    return Finding("disk.shared", Severity.ERROR, measured, "one folder for all nodes, with locks", message, remedy)


def _not_tried(storage: StorageProbe) -> Finding:
    message = Text(
        f"what output_dir can do could not be tried; taken for {storage.kind.value} by the type of its mount",
        f"未能试验 output_dir 支持哪些操作；按挂载类型视为 {storage.kind.value}",
    )
    remedy = Text(
        "`ls` there shows whether the mount answers; if it does, run ftlaunch check again",
        "用 `ls` 查看该挂载是否有响应；若有，请重新运行 ftlaunch check",
    )
    return Finding("disk.kind", Severity.WARNING, storage.not_tried, _BOUND, message, remedy)


def _unusable(storage: StorageProbe, reader: Reader) -> Finding:
    message = Text(
        f"output_dir cannot hold a run: this does not work there: {storage.unusable}",
        f"output_dir 无法存放训练结果，以下操作不可用：{storage.unusable}",
    )
    measured = f"{storage.kind.value} ({storage.fstype})"
    return Finding("disk.kind", Severity.ERROR, measured, _BOUND, message, _elsewhere(reader, for_nodes=False))


def _elsewhere(reader: Reader, *, for_nodes: bool) -> Text:
    if reader is Reader.DLC:
        remedy = Text(
            "put output_dir on a NAS or CPFS data source of the DLC job; the results can be copied to OSS afterwards",
            "把 output_dir 放到 DLC 任务的 NAS 或 CPFS 数据源上，结束后再把结果复制到 OSS",
        )
    else:
        remedy = Text(
            "put output_dir on NAS, CPFS, NFS, Lustre or another file system of that kind; the results can be copied "
            "to the object store afterwards",
            "把 output_dir 放到 NAS、CPFS、NFS、Lustre 等文件系统上，结束后再把结果复制到对象存储",
        )
    if not for_nodes:
        return remedy
    own_risk = Text("; or train on one node", "；或只用单个节点训练")
    return Text(remedy.en + own_risk.en, remedy.zh + own_risk.zh)


def _no_tensorboard(measured: str, reader: Reader) -> Finding:
    message = Text(
        "monitor.tensorboard appends to files below output_dir, which this mount cannot: the first step would fail",
        "monitor.tensorboard 需要在 output_dir 下追加写文件，而该挂载不支持追加：第一步就会失败",
    )
    remedy = Text(
        "env: {TENSORBOARD_LOGGING_DIR: /local/folder}, or monitor: {tensorboard: false}",
        "设置 env: {TENSORBOARD_LOGGING_DIR: /local/folder}，或 monitor: {tensorboard: false}",
    )
    if reader is Reader.DLC:
        remedy = Text(
            f"{remedy.en}, or allow it in the DLC job (Settings.EnableOssAppend)",
            f"{remedy.zh}，或在 DLC 任务中打开 Settings.EnableOssAppend",
        )
    return Finding("disk.kind", Severity.ERROR, measured, _BOUND, message, remedy)
