"""Every check with what people are told about it: `docs/checks.md` is written from this list.

Adding a check is one function over `PreflightInputs`, one entry here, and a test that it fires once and is silent once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from launcher.preflight import (
    check_cluster,
    check_data,
    check_gpu_health,
    check_gpus,
    check_host,
    check_limits,
    check_mount,
    check_network,
    check_rdma,
    check_storage,
    check_versions,
)
from launcher.preflight.finding import Finding
from launcher.preflight.inputs import PreflightInputs


@dataclass(frozen=True)
class Check:
    """`id` is what `check.skip` names. `refuses` and `warns` are the bounds of an error and of a warning, "" for
    none; `remedy` in short: the finding has the words for the reader's platform."""

    id: str
    run: Callable[[PreflightInputs], tuple[Finding, ...]]
    measures: str
    refuses: str
    warns: str
    remedy: str


GROUPS: tuple[tuple[str, tuple[Check, ...]], ...] = (
    (
        "Versions",
        (
            Check(
                "versions.stack",
                check_host.check_stack,
                "whether the packages of the training stack are installed, from their metadata (nothing is imported)",
                "torch, transformers, accelerate or deepspeed is missing (lora: also peft; qlora: also peft and "
                "bitsandbytes); a `+cpu` torch where GPUs are used",
                "",
                "the `pip install` command with the right extra",
            ),
            Check(
                "versions.combination",
                check_versions.check_combination,
                "torch, transformers, accelerate, deepspeed and peft against the versions that ftlaunch is made for, "
                "and what each of them asks of the others (as `pip check`)",
                "older than ftlaunch needs",
                "newer than it is made for; a conflict between the packages",
                "`ftlaunch[train]` with constraints.txt",
            ),
            Check(
                "versions.copies",
                check_versions.check_copies,
                "packages of the stack that are installed in several folders of `sys.path`",
                "",
                "two copies of one",
                "uninstall all, install once",
            ),
            Check(
                "versions.nccl",
                check_versions.check_nccl,
                "the NCCL that is installed for torch against the one its wheel was built with, and others that "
                "`LD_PRELOAD` or `LD_LIBRARY_PATH` put in front",
                "",
                "they differ; there is another one",
                "the version of torch, the same on every node",
            ),
            Check(
                "versions.system",
                check_versions.check_system,
                "Python and glibc",
                "",
                "Python below 3.10, glibc below 2.28 or none (musl)",
                "a newer image",
            ),
        ),
    ),
    (
        "GPUs",
        (
            Check(
                "gpu.visible",
                check_gpus.check_visible,
                "the cards that NVML sees and `CUDA_VISIBLE_DEVICES` leaves, against the ranks of this node",
                "`CUDA_VISIBLE_DEVICES` names a card that is not there; fewer visible GPUs than ranks; `/dev/nvidia*` "
                "is there and the driver does not answer",
                "GPUs are there and the job trains on the CPU; cards of another vendor that NVML cannot read",
                "unset or correct the variable; ask for GPUs; mend the driver or the container runtime",
            ),
            Check(
                "gpu.lost",
                check_gpus.check_lost,
                "cards that NVML counts and cannot read",
                "too few are left for the ranks",
                "a card is lost and enough are left",
                "another node",
            ),
            Check(
                "gpu.driver",
                check_gpus.check_driver,
                "the highest CUDA version that the driver runs, against the one torch was built for",
                "the driver's CUDA major version is below torch's",
                "",
                "a newer driver (DLC: `Settings.Driver`), or a torch for the driver's CUDA",
            ),
            Check(
                "gpu.capability",
                check_gpus.check_capability,
                "the cards' compute capability, against the architectures that PyTorch's wheel is built for",
                "below 7.5 for CUDA 13; below 7.0 (torch 2.8 to 2.10) or 7.5 for CUDA 12.8 and 12.9; below 5.0 or "
                "above "
                "9.0 for earlier CUDA 12",
                "",
                "another build of torch, or other cards",
            ),
            Check(
                "gpu.memory_used",
                check_gpus.check_memory_used,
                "memory that somebody holds on the visible cards before the job begins, and which process",
                "",
                "more than 1 GiB of a card",
                "end the process, or leave the card out",
            ),
            Check(
                "gpu.mixed",
                check_gpus.check_mixed,
                "the kinds of the visible cards",
                "",
                "more than one kind: the weakest decides precision, batch and pace",
                "the value of `CUDA_VISIBLE_DEVICES` for one kind",
            ),
            Check(
                "gpu.ecc",
                check_gpu_health.check_ecc,
                "uncorrected memory errors since the driver was loaded, rows (pages) that wait to be mapped away",
                "rows could not be mapped away",
                "there were errors, or a reset is due",
                "reset the card, another node",
            ),
            Check(
                "gpu.xid",
                check_gpu_health.check_xid,
                "faults in the kernel log (Xid) that speak of the card, not of a program",
                "",
                "there are some",
                "another node (DLC: AntiAffinityNodeNames, EnableSanityCheck)",
            ),
            Check(
                "gpu.throttled",
                check_gpu_health.check_throttled,
                "why clocks are held down: temperature, power brake, hardware",
                "",
                "a card is slowed down",
                "cooling and power; another node",
            ),
            Check(
                "gpu.compute_mode",
                check_gpu_health.check_compute_mode,
                "whether programs may use the card",
                "prohibited",
                "",
                "`nvidia-smi -c DEFAULT`",
            ),
            Check(
                "gpu.nvlink",
                check_gpu_health.check_nvlink,
                "several ranks: NVLinks that are up, of those that the cards have",
                "",
                "a card has fewer than the others, or none is up",
                "fabric manager; another node",
            ),
        ),
    ),
    (
        "Memory and limits",
        (
            Check(
                "shm.size",
                check_storage.check_shm,
                "free space in `/dev/shm`, against ranks and DataLoader workers",
                "less than 128 MiB free, with GPUs or DataLoader workers",
                "less than max(1 GiB, 64 MiB x ranks²) free, with more than one rank or with workers",
                "DLC: shared memory of the resource configuration; Kubernetes: `emptyDir` with `medium: Memory`; "
                "docker: `--shm-size`; or no workers",
            ),
            Check(
                "shm.stale",
                check_limits.check_shm_stale,
                "segments of torch, NCCL, DeepSpeed and Python in `/dev/shm` that belong to this user, are older "
                "than a "
                "minute, and that no visible process holds",
                "",
                "16 MiB or more",
                "the `rm` command; nothing is removed by itself, because another container may share the folder",
            ),
            Check(
                "memory.host",
                check_host.check_memory,
                "main memory that is available (machine and cgroup), against what the ranks need",
                "less than the ranks need",
                "the ranks need more than 90 % of it",
                "more memory, fewer ranks, no optimizer offload",
            ),
            Check(
                "memory.tier",
                check_host.check_memory_tier,
                "main memory that the ranks leave, against checkpoints in memory",
                "too little, with `checkpoint.memory: on` or a number",
                "less than a tenth to spare; too little with `auto`, which switches them off then",
                "more memory, `checkpoint.peer: off`, `checkpoint.memory: off`",
            ),
            Check(
                "limits.nofile",
                check_host.check_nofile,
                "how many files a process may open (soft limit)",
                "fewer than 256",
                "fewer than 65536 with DataLoader workers, 4096 without",
                "`ulimit -n`, or the limit of the container engine",
            ),
            Check(
                "limits.memlock",
                check_limits.check_memlock,
                "how much memory a process may lock, where several nodes talk over RDMA",
                "less than 1 GiB",
                "",
                "`--ulimit memlock=-1`, the capability IPC_LOCK, limits.conf; `NCCL_IB_DISABLE: 1`",
            ),
            Check(
                "limits.cpus",
                check_limits.check_cpus,
                "ranks and DataLoader workers against the CPUs that this process may use",
                "",
                "more than two processes for each CPU",
                "fewer workers, more CPUs",
            ),
        ),
    ),
    (
        "Storage",
        (
            Check(
                "disk.writable",
                check_storage.check_disk_writable,
                "whether output_dir can be written",
                "it cannot",
                "",
                "mount it read-write (DLC: `MountAccess: RW`), or another output_dir",
            ),
            Check(
                "disk.kind",
                check_mount.check_disk_kind,
                "what output_dir can do, tried in a private folder that is removed again: create, fsync, rename and "
                "replace files and a folder, append, write in the middle, truncate, lock, link",
                "files cannot be created, read back, renamed or replaced; `monitor.tensorboard` on a mount that "
                "appends nothing",
                "the mount did not answer within 30 s; its type decides then",
                "NAS or CPFS; `env: {TENSORBOARD_LOGGING_DIR: ...}`",
            ),
            Check(
                "disk.free",
                check_storage.check_disk_free,
                "free space and inodes of output_dir",
                "less than `checkpoint.keep` + 1 checkpoints and `final/` need; no free inode",
                "less than 1 GiB, where the need is not known",
                "free space, lower `checkpoint.keep`, another output_dir",
            ),
            Check(
                "disk.speed",
                check_mount.check_disk_speed,
                "how fast output_dir takes a large file (0.4 s of writing, at most 256 MiB, made durable and removed), "
                "against the size of a checkpoint and `spot.grace_seconds`",
                "",
                "one checkpoint takes longer than the grace period",
                "faster storage, a longer grace period, more frequent checkpoints",
            ),
            Check(
                "disk.scratch",
                check_mount.check_disk_scratch,
                "object mounts only: room on the node's own disk, where a checkpoint is made first",
                "less than one checkpoint needs",
                "",
                "`env: {TMPDIR: /local/disk}`",
            ),
            Check(
                "disk.durable",
                check_storage.check_disk_durable,
                "whether output_dir outlives the container",
                "",
                "it is on tmpfs, ramfs, aufs, or overlay inside a container",
                "a NAS, CPFS or OSS mount; a persistent volume; a bind mount",
            ),
            Check(
                "disk.shared",
                check_storage.check_disk_shared,
                "several nodes: whether all of them can share output_dir, locks included",
                "output_dir is on an object mount",
                "output_dir is on a disk of one machine (ext4, xfs, overlay, tmpfs, ...), or on a mount whose locks "
                "other machines may not see (NFS with `nolock`, unknown FUSE)",
                "storage that every node mounts at the same path, with locks: NAS, CPFS, NFS, Lustre",
            ),
        ),
    ),
    (
        "Network",
        (
            Check(
                "net.interface",
                check_network.check_interface,
                "the interface towards the other nodes: `cluster.interface`, else the one of the route to the master",
                "it does not exist or is down; several nodes: others cannot reach it (loopback, bridge of containers, "
                "link-local)",
                "",
                "the interfaces that are there",
            ),
            Check(
                "net.ifname_env",
                check_network.check_ifname_env,
                "`NCCL_SOCKET_IFNAME` (GPUs) and `GLOO_SOCKET_IFNAME` (CPU), set by you or the platform",
                "the one that this job uses names no interface with an address",
                "the same for the one that this job does not use",
                "unset it, or one of the interfaces that are there; ftlaunch never changes it",
            ),
            Check(
                "net.rdma",
                check_rdma.check_rdma,
                "several nodes with GPUs: RDMA devices, their ports and GID tables, `NCCL_IB_HCA`, "
                "`NCCL_IB_GID_INDEX`, "
                "`NCCL_IB_DISABLE`",
                "no port is active; the setting names no device, or an empty row of the GID table",
                "RDMA is switched off, or the container has no `/dev/infiniband/uverbs*`; the row is RoCE v1 where "
                "v2 is "
                "there",
                "the setting that fits; DLC: `Settings.EnableRDMA`",
            ),
            Check(
                "net.port",
                check_network.check_port,
                "`cluster.master_port`, where it is given (several nodes: looked at on node 0)",
                "it is taken",
                "",
                "`null` takes a free one",
            ),
            Check(
                "net.agent_port",
                check_network.check_agent_port,
                "several nodes: the port where the agents meet, on this node",
                "it is taken, and not by this run's own agent",
                "",
                "end its holder, or `cluster.agent_port`",
            ),
        ),
    ),
    (
        "Several nodes",
        (
            Check(
                "cluster.nodes",
                check_cluster.check_nodes,
                "which nodes came together for the check, within 10 s (`ftlaunch check` on each of them)",
                "",
                "some did not come",
                "the same command on every node at about the same time",
            ),
            Check(
                "cluster.same",
                check_cluster.check_differences,
                "versions, precision, ranks, job.yaml, cards, driver, kernel: which nodes differ",
                "",
                "they differ (what must be the same for a run is refused when the nodes meet)",
                "one image, one driver, one kind of card",
            ),
            Check(
                "cluster.clock",
                check_cluster.check_clock,
                "how far the nodes' clocks are apart",
                "",
                "more than 1 s",
                "chrony or ntpd",
            ),
            Check(
                "net.mtu",
                check_cluster.check_mtu,
                "the largest packet of each node's interface",
                "",
                "they differ",
                "the smallest one for all",
            ),
            Check(
                "net.reach",
                check_cluster.check_reach,
                "whether every node reaches every other on a port that the system chooses, as ranks do",
                "a way is closed",
                "",
                "firewall, security group, NetworkPolicy, `cluster.interface`",
            ),
            Check(
                "net.speed",
                check_cluster.check_link,
                "bandwidth (one TCP stream) and latency between pairs of nodes, in two rounds, of which the second "
                "pairs the "
                "slowest with the fastest; off with `check.speed: false`",
                "",
                "a node is slower than half of the median with both partners; more than 2 ms",
                "leave the node out; nodes in one place",
            ),
            Check(
                "net.scaling",
                check_cluster.check_scaling,
                "what all-reduce over the job's backend (gloo, NCCL; one rank a node) reaches, or else the slowest "
                "pair, "
                "against what a step sums up and how long it takes (from an earlier start on one node, or forecast "
                "from "
                "the cards): several nodes against one, nothing overlapping",
                "",
                "less than 0.9 x the number of nodes",
                "a faster network, more accumulation, lora, or one node",
            ),
            Check(
                "disk.visible",
                check_cluster.check_visible,
                "whether, and how late, the other nodes see what the first one has written below output_dir (a "
                "private file "
                "that is removed again)",
                "not at all, or not within 5 s",
                "later than 1 s",
                "the same volume at the same path; shorter caches",
            ),
        ),
    ),
    (
        "Model and data",
        (
            Check(
                "model.files",
                check_data.check_model_files,
                "the model's folder: config, tokenizer, every file of the index, the length that each safetensors head "
                "says; for a hub id: the hub's cache, and whether the hub answers within 3 s",
                "something is missing, cut short or a Git LFS pointer; the hub is offline (`HF_HUB_OFFLINE`) or out of "
                "reach and the model is not in the cache",
                "",
                "fetch it again; a folder as `model.path`; a mirror (`HF_ENDPOINT`)",
            ),
            Check(
                "data.records",
                check_data.check_records,
                "JSON, UTF-8, fields, empty texts; at a start for a second (every record of some 100,000, then the "
                "first ones of each MiB), all of them with `ftlaunch prepare`; file and line of the first ten",
                "a record cannot be used",
                "",
                "correct these lines",
            ),
            Check(
                "data.roles",
                check_data.check_roles,
                "the roles of conversations",
                "",
                "a role that chat templates do not know, `system` in the middle, the same side twice in a row",
                "system, user, assistant, tool",
            ),
            Check(
                "data.repeated",
                check_data.check_repeated,
                "records that are the same as an earlier one, byte by byte",
                "",
                "more than 1 % of the records",
                "remove them",
            ),
            Check(
                "data.length",
                check_data.check_length,
                "tokens of the records (at a start of 100 of them, where the folder has tokenizer.json) against "
                "`data.max_length` and the model's positions",
                "samples beyond a model's table of positions",
                "more than 5 % of the records are cut; nothing is learned of a record; samples beyond the positions "
                "that the model was trained for",
                "`data.max_length`, shorter records",
            ),
            Check(
                "data.tokens",
                check_data.check_tokens,
                "token ids of the data, and the size of the tokenizer, against `vocab_size` of the model",
                "an id of the data is beyond it (a device-side assert on a GPU)",
                "the tokenizer could give one",
                "the model's own tokenizer, or a resized embedding",
            ),
            Check(
                "data.template",
                check_data.check_template,
                "whether the tokenizer has a chat template, where the records are conversations",
                "",
                "it has none",
                "the model's chat_template.jinja",
            ),
        ),
    ),
)
