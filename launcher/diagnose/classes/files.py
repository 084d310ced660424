"""Host memory, shared memory, open files, disks, permissions."""

from __future__ import annotations

from launcher.diagnose.fault import Fault
from launcher.i18n import Text

_CACHE = r"\.triton|triton/(?:runtime|compiler)|torch_extensions|torchinductor|\.cache/|/cache|cpp_ext|huggingface_hub"
_WHILE_SAVING = r"/ftlaunch/staging/|in (?:_save_checkpoint|_write_final)\b"
_TRAINING_UNDER_WAY = r"it/s\]|s/it\]|\bloss['\"]? ?[:=]|\b[Ee]poch\W+[1-9]"

FAULTS: tuple[Fault, ...] = (
    Fault(
        cls="host_oom",
        action="adjust:host_memory",
        signals=(9,),
        plainest=r"Kill(?:ed)? process \d+",
        kernel=(
            r"[Oo]ut of memory: Kill(?:ed)? process \d+",
            r"oom-kill:constraint=\w+",
            r"invoked oom-killer",
            r"oom_reaper: reaped process \d+",
            r"Detected \d+ oom[_-]kill event",
            r"oom-kill event\(s\)",
            r"tasks? [\d,\-]+: Out Of Memory",
            r"OOMKill(?:ed|ing)\b",
            r"Exceeded (?:job|step) memory limit|exceeded memory limit \(\d+|TERM_MEMLIMIT",
            r"[Tt]he node was low on resource: memory",
            r"killed due to (?:the node running low on memory|memory pressure \(OOM\))",
        ),
        errors=(
            r"DataLoader worker \(pid \d+\) is killed by signal: Killed",
            r"DefaultCPUAllocator: (?:can't|not enough memory)",
            r"\[Errno 12\] Cannot allocate memory|(?:fork|mmap)\S*:? .{0,80}Cannot allocate memory",
            r"Unable to allocate [\d.]+ \w+ for an array with shape",
            r"workers are \{SIGKILL\(-9\)",
            r"std::bad_alloc\b",
            r"^(?:numpy\S*)?MemoryError\b",
        ),
        vague=(
            r"^Killed$|: line \d+: +\d+ Killed\b|tasks? [\d,\-]+: Killed",
            r"process in the process pool was terminated abruptly",
            r"One of the subprocesses has abruptly died during map operation",
        ),
        cause=Text(
            "{where}: host memory ran out (the limit of the job or pod, or the machine's), and a process was killed "
            "for it.",
            "{where}：主机内存耗尽（作业或 Pod 的限额，或整机内存），进程因此被杀死。",
        ),
        remedy=Text(
            "Raise the memory of the job or pod, or need less: deepspeed.offload_optimizer: false, fewer "
            "training.dataloader_num_workers, fewer ranks a node, a model loaded in 16 bit.",
            "提高作业或 Pod 的内存，或减少占用：deepspeed.offload_optimizer: false，减小 "
            "training.dataloader_num_workers，减少每节点 rank 数，以 16 位精度加载模型。",
        ),
    ),
    Fault(
        cls="host_oom",
        action="adjust:host_memory",
        hints=(r"Loading (?:checkpoint shards|weights): +\d{1,2}%",),
        near=r"closing signal SIGTERM|Killing subprocess",
        cause=Text(
            "{where}: a process vanished without a word while the model was loaded, and the launcher stopped the "
            "others: most likely the host's memory ran out.",
            "{where}：加载模型时某个进程无声退出，启动器随后停止了其他进程：多半是主机内存耗尽。",
        ),
        remedy=Text(
            "Look for oom-kill in `dmesg -T`; raise the memory of the job or pod, or run fewer ranks on the node.",
            "在 `dmesg -T` 中查找 oom-kill；提高作业或 Pod 的内存，或减少该节点的 rank 数。",
        ),
    ),
    Fault(
        cls="shm_exhausted",
        action="adjust:shm_size",
        signals=(7,),
        errors=(
            r"is killed by signal: Bus error",
            r"Unexpected bus error encountered in worker",
            r"unable to (?:allocate|open) shared memory ?(?:\(shm\)|object)(?!.{0,80}Too many open files)",
            r"[Ee]rror:? .{0,40}failed to extend /dev/shm|[Cc]all to (?:posix_fallocate|shm_open) failed",
            r"unable to (?:write to|resize|mmap \d+ bytes from) file </torch_",
            r"Couldn't allocate shared memory segment",
            r"Error while creating shared memory segment",
            r"failed to create shared memory file",
            r"/dev/shm\S* .{0,120}No space left on device|No space left on device.{0,80}/dev/shm",
            r"Fatal Python error: Bus error|Signal: Bus error \(7\)",
            r"^Bus error\b|: line \d+: +\d+ Bus error\b|tasks? [\d,\-]+: Bus error",
        ),
        cause=Text(
            "{where}: /dev/shm is too small; DataLoader workers and NCCL keep their buffers there.",
            "{where}：/dev/shm 太小；DataLoader 进程和 NCCL 的缓冲区都放在其中。",
        ),
        remedy=Text(
            "Give the container more: DLC: the job's shared-memory setting; Kubernetes: an emptyDir of medium "
            "Memory at /dev/shm; docker: --shm-size=16g. Or set training.dataloader_num_workers: 0.",
            "增大容器共享内存：DLC 设置作业的共享内存；Kubernetes 在 /dev/shm 挂载 medium: Memory 的 emptyDir；"
            "docker 使用 --shm-size=16g。或设置 training.dataloader_num_workers: 0。",
        ),
    ),
    Fault(
        cls="fd_limit",
        action="adjust:ulimit_nofile",
        errors=(r"Too many open files", r"received \d+ items of ancdata", r"unable to open file descriptor"),
        cause=Text(
            "{where}: the limit on open files was reached; each DataLoader worker and each shared tensor takes some.",
            "{where}：打开文件数达到上限；每个 DataLoader 进程和每个共享张量都会占用文件描述符。",
        ),
        remedy=Text(
            "Raise the limit (`ulimit -n 1048576`, or LimitNOFILE of the container runtime), or use fewer "
            "training.dataloader_num_workers.",
            "提高上限（`ulimit -n 1048576`，或容器运行时的 LimitNOFILE），或减小 training.dataloader_num_workers。",
        ),
    ),
    Fault(
        cls="fd_limit",
        action="stop",
        errors=(
            r"can't start new thread",
            r"libgomp: Thread creation failed|pthread_create failed",
            r"\[Errno 11\] Resource temporarily unavailable",
            r"fork: (?:retry: )?Resource temporarily unavailable",
        ),
        cause=Text(
            "{where}: no more threads or processes are allowed (pids limit of the container, or `ulimit -u`).",
            "{where}：线程或进程数达到上限（容器的 pids 限制或 `ulimit -u`）。",
        ),
        remedy=Text(
            "Raise the pids limit of the container, or lower env.OMP_NUM_THREADS and training.dataloader_num_workers.",
            "提高容器的 pids 限制，或减小 env.OMP_NUM_THREADS 和 training.dataloader_num_workers。",
        ),
    ),
    Fault(
        cls="disk_quota",
        action="adjust:cache_dir",
        errors=(r"Disk quota exceeded",),
        near=_CACHE,
        cause=Text(
            "{where}: the quota of the file system that holds a cache (compiled kernels, hub files) is used up.",
            "{where}：缓存（编译产物、Hub 文件）所在文件系统的配额已用完。",
        ),
        remedy=Text(
            "Point the caches to a roomy disk in env: TRITON_CACHE_DIR, TORCH_EXTENSIONS_DIR, "
            "TORCHINDUCTOR_CACHE_DIR, HF_HOME.",
            "在 env 中把缓存指向空间充足的磁盘：TRITON_CACHE_DIR、TORCH_EXTENSIONS_DIR、TORCHINDUCTOR_CACHE_DIR、"
            "HF_HOME。",
        ),
    ),
    Fault(
        cls="disk_quota",
        action="adjust:disk_space",
        errors=(r"Disk quota exceeded|\[Errno 122\]|os error 122\b",),
        cause=Text("{where}: the disk quota is used up.", "{where}：磁盘配额已用完。"),
        remedy=Text(
            "Delete old files or ask for a larger quota; lower checkpoint.keep; move output_dir to another file "
            "system.",
            "删除旧文件或申请更大配额；减小 checkpoint.keep；或把 output_dir 移到其他文件系统。",
        ),
    ),
    Fault(
        cls="no_space",
        action="adjust:disk_space",
        errors=(
            r"No space left on device",
            r"PytorchStreamWriter failed writing file",
            r"unexpected pos \d+ vs \d+",
            r"write\(\): fd \d+ failed with (?:Input/output error|No space)",
            r"\[Errno 28\]",
            r"Not enough (?:free )?disk space\b(?! to download the file)",
        ),
        vague=(r"basic_ios::clear: iostream error",),  # torch's first words; its last where the log is cut off, too
        cause=Text(
            "{where}: the file system is full; a write, most likely of a checkpoint, was cut short (torch.save only "
            "says that a position is not the expected one).",
            "{where}：文件系统已满；写入（多半是检查点）中断（torch.save 只会提示写入位置与预期不符）。",
        ),
        remedy=Text(
            "Look with `df -h` and `df -i`; free space on output_dir's disk, lower checkpoint.keep, or move "
            "output_dir.",
            "用 `df -h` 和 `df -i` 检查；清理 output_dir 所在磁盘，减小 checkpoint.keep，或更换 output_dir。",
        ),
    ),
    Fault(
        cls="permission",
        action="adjust:master_port",
        errors=(r"failed to bind\..{0,80}\bEACCES\b", r"failed to bind to .{0,80}Permission denied"),
        cause=Text(
            "{where}: the master port is below 1024 and this user may not open it.",
            "{where}：主端口小于 1024，当前用户无权监听。",
        ),
        remedy=Text(
            "Set cluster.master_port to a port from 1024 to 65535.",
            "将 cluster.master_port 设为 1024 到 65535 之间的端口。",
        ),
    ),
    Fault(
        cls="permission",
        action="retry",
        errors=(
            r"\[Errno 30\] Read-only file system(?:: '(?P<path>[^'\n]*)')?",
            r"\[Errno 13?\] (?:Permission denied|Operation not permitted): '(?P<path>[^'\n]*)'",
            r"(?P<path>Read-only file system|Permission denied) \(os error (?:30|13)\)",
        ),
        near=_WHILE_SAVING,
        cause=Text(
            "{where}: the output folder could be written when the run began and refuses it now ({path}): its volume "
            "became read-only, or its mount or permissions have changed.",
            "{where}：输出目录在运行开始时可写，现在却被拒绝（{path}）：该卷变为只读，或其挂载、权限发生了变化。",
        ),
        remedy=Text(
            "Run it again once the folder can be written (`mount`, `ls -ld`; `dmesg` tells why the kernel made a "
            "file system read-only), or on another node.",
            "待目录恢复可写后重新运行（用 `mount`、`ls -ld` 检查；内核把文件系统改为只读的原因见 `dmesg`），"
            "或换一个节点运行。",
        ),
    ),
    Fault(
        cls="permission",
        action="adjust:cache_dir",
        errors=(
            r"Permission denied: '(?P<path>[^'\n]*(?:cache|torch_extensions|triton|torchinductor|/tmp/)[^'\n]*)'",
            r"PermissionError at (?P<path>\S+) when downloading",
        ),
        cause=Text("{where}: the cache {path} belongs to another user.", "{where}：缓存 {path} 属于其他用户。"),
        remedy=Text(
            "Point the cache elsewhere in env (HF_HOME, TORCH_EXTENSIONS_DIR, TRITON_CACHE_DIR), or mend the "
            "folder's owner.",
            "在 env 中更换缓存目录（HF_HOME、TORCH_EXTENSIONS_DIR、TRITON_CACHE_DIR），或修正目录属主。",
        ),
    ),
    Fault(
        cls="permission",
        action="retry",
        errors=(r"\[Errno 13?\] (?:Permission denied|Operation not permitted): '(?P<path>[^'\n]*)'",),
        near=_TRAINING_UNDER_WAY,
        cause=Text(
            "{where}: {path} could be read before and is refused now, in the middle of training: a mount or a "
            "ticket of the network file system was lost.",
            "{where}：{path} 之前可访问，训练中途却被拒绝：网络文件系统的挂载或票据失效。",
        ),
        remedy=Text(
            "Run it again. If it repeats, check the mount and the life of its ticket (`klist`, `mount`).",
            "可直接重新运行。若反复出现，请检查挂载及其票据有效期（`klist`、`mount`）。",
        ),
    ),
    Fault(
        cls="permission",
        action="retry_excluding_node",
        errors=(
            r"\[Errno 116\]|Stale (?:NFS )?file handle",
            r"\[Errno 107\]|Transport endpoint is not connected",
            r"\[Errno 5\] Input/output error|\[Errno 121\] Remote I/O error|Input/output error \(os error 5\)",
        ),
        cause=Text(
            "{where}: a file system stopped answering as it should: its mount was lost on this node, or its disk or "
            "server is ill.",
            "{where}：文件系统不再正常响应：该节点的挂载丢失，或磁盘、存储服务异常。",
        ),
        remedy=Text(
            "Run it again without this node; there look at `mount`, `df` and `dmesg -T`, and mount it again.",
            "请排除该节点后重新运行；在该节点上检查 `mount`、`df` 和 `dmesg -T`，并重新挂载。",
        ),
    ),
    Fault(
        cls="permission",
        action="stop",
        vague=(r"^(?:mkdir|touch|cp|mv|rm|tee|bash|sh|/\S+): .{0,200}Permission denied$",),
        errors=(
            r"(?:PermissionError|\[Errno 13?\]).{0,60}(?:Permission denied|not permitted)(?:: '(?P<path>[^'\n]*)')?",
            r"\[Errno 30\] Read-only file system(?:: '(?P<path>[^'\n]*)')?",
            r"Permission denied \(os error 13\)",
        ),
        cause=Text("{where}: no permission for {path}.", "{where}：没有访问 {path} 的权限。"),
        remedy=Text(
            "Mend the owner or the mode of that path (`ls -ld` it, `id` shows who you are), or choose another one "
            "in job.yaml.",
            "修正该路径的属主或权限（用 `ls -ld` 查看，用 `id` 查看当前用户），或在 job.yaml 中改用其他路径。",
        ),
    ),
)
