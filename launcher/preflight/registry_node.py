"""Checks of the machine itself: software, cards, memory and limits."""

from __future__ import annotations

from launcher.preflight import (
    check_gpu_health,
    check_gpu_memory,
    check_gpus,
    check_host,
    check_limits,
    check_storage,
    check_versions,
)
from launcher.preflight.check import Check, Group

OF_THE_NODE: tuple[Group, ...] = (
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
                "gpu.memory",
                check_gpu_memory.check_gpu_memory,
                "the forecast of a step's memory ([sizing.md](sizing.md)) against the smallest card",
                "weights, optimizer and CUDA alone do not fit",
                "a step with rows of `data.max_length` tokens does not fit",
                "smaller micro-batch, shorter rows, ZeRO 3, offloading, QLoRA, more cards",
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
)
