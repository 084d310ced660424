"""A log for every entry of the catalogue: (class, action, log, number of the line that proves it).

Composed from the formats in the libraries' own sources, with names and numbers of our own.
"""

from __future__ import annotations

from typing import NamedTuple


class Example(NamedTuple):
    cls: str
    action: str
    log: str
    proof: int = 1


_OOM = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.50 GiB. GPU 1 has a total capacity of 79.10 "
    "GiB of which 1.20 GiB "
    "is free. Including non-PyTorch memory, this process has 77.60 GiB memory in use. Of the allocated memory "
    "75.00 GiB is "
    "allocated by PyTorch, and 1.10 GiB is reserved by PyTorch but unallocated."
)
_OOM_FOREIGN = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 200.00 MiB. GPU 0 has a total capacity of "
    "79.10 GiB of which 90.00 MiB "
    "is free. Including non-PyTorch memory, this process has 4.00 GiB memory in use. Of the allocated memory "
    "3.50 GiB is "
    "allocated by PyTorch, and 10.00 MiB is reserved by PyTorch but unallocated."
)
_NCCL = "n1:77:901 [1] NCCL WARN "
_CLIENT_TIMEOUT = (
    "torch.distributed.DistNetworkError: The client socket has timed out after 60000ms "
    "while trying to connect to (head, 29500)."
)
_MODEL_FORWARD = '  File "/opt/app/model.py", line 12, in forward'

EXAMPLES: tuple[Example, ...] = (
    # Hub
    Example(
        "hub_auth", "stop", "huggingface_hub.errors.GatedRepoError: 403 Client Error. Cannot access gated repo for url"
    ),
    Example(
        "hub_transient",
        "retry",
        "huggingface_hub.errors.HfHubHTTPError: 502 Server Error: Bad Gateway for url: https://hub/x",
    ),
    Example(
        "hub_unreachable",
        "adjust:hub_offline",
        "httpx2.ConnectError: [Errno 111] Connection refused\n\n"
        "OSError: We couldn't connect to 'http://127.0.0.1:9' to load the files, and couldn't find them in the "
        "cached files.",
        3,
    ),
    # GPU memory
    Example("cuda_oom_load", "adjust:nproc_per_node", _OOM_FOREIGN),
    Example(
        "cuda_oom_optimizer",
        "adjust:optimizer_memory",
        f"    self.optimizer.step()\n    state['exp_avg'] = torch.zeros_like(p)\n{_OOM}",
        3,
    ),
    Example("cuda_oom_forward", "adjust:batch_size", f"{_MODEL_FORWARD}\n    return a @ b\n{_OOM}", 3),
    Example("cuda_oom_load", "adjust:model_memory", f"    model = AutoModel.from_pretrained(path)\n{_OOM}", 2),
    Example("cuda_oom_forward", "adjust:batch_size", _OOM),
    Example("cuda_oom_nccl", "adjust:model_memory", f"{_NCCL}Cuda failure 2 'out of memory'"),
    Example("cuda_oom_load", "adjust:model_memory", "torch.AcceleratorError: CUDA error: out of memory"),
    Example(
        "cuda_oom_load",
        "adjust:model_memory",
        "ValueError: Some modules are dispatched on the CPU or the disk. Make sure you have enough GPU RAM to fit the "
        "quantized model.",
    ),
    # Host memory and files
    Example(
        "host_oom",
        "adjust:host_memory",
        "[ 1200.5] Memory cgroup out of memory: Killed process 4242 (pt_main_thread) total-vm:99kB, anon-rss:88kB",
    ),
    Example(
        "host_oom",
        "adjust:host_memory",
        "Loading checkpoint shards:  40%|####      | 2/5 [00:20<00:30, 10.0s/it]\nW0101 Sending process 31 "
        "closing signal SIGTERM",
    ),
    Example(
        "shm_exhausted",
        "adjust:shm_size",
        "RuntimeError: DataLoader worker (pid 31) is killed by signal: Bus error. It is possible that "
        "dataloader's workers are out of "
        "shared memory. Please try to raise your shared memory limit.",
    ),
    Example("fd_limit", "adjust:ulimit_nofile", "OSError: [Errno 24] Too many open files: '/data/a.bin'"),
    Example("fd_limit", "stop", "RuntimeError: can't start new thread"),
    Example(
        "disk_quota",
        "adjust:cache_dir",
        '  File "/opt/env/triton/runtime/cache.py", line 9, in put\nOSError: [Errno 122] Disk quota exceeded',
        2,
    ),
    Example("disk_quota", "adjust:disk_space", "OSError: [Errno 122] Disk quota exceeded: '/data/out/optim.pt'"),
    Example(
        "no_space",
        "adjust:disk_space",
        "RuntimeError: basic_ios::clear: iostream error\n\nDuring handling of the above exception, another "
        "exception occurred:\n\n"
        "RuntimeError: [enforce fail at inline_container.cc:672] . unexpected pos 576 vs 534",
        5,
    ),
    Example("no_space", "adjust:disk_space", "RuntimeError: basic_ios::clear: iostream error"),
    Example(
        "permission",
        "retry",
        "Traceback (most recent call last):\n"
        '  File "/opt/env/transformers/trainer.py", line 3400, in _save_checkpoint\n'
        "OSError: [Errno 30] Read-only file system: '/mnt/nas/run/ftlaunch/staging/gen-1/checkpoint-40'",
        3,
    ),
    Example(
        "permission",
        "retry",
        '  File "/opt/env/transformers/trainer.py", line 3400, in _save_checkpoint\n'
        "safetensors_rust.SafetensorError: Error while serializing: I/O error: Read-only file system (os error 30)",
        2,
    ),
    Example(
        "permission",
        "adjust:master_port",
        "torch.distributed.DistNetworkError: The server socket has failed to bind. port: 81, useIpv6: 0, code: "
        "-13, name: EACCES, "
        "message: permission denied",
    ),
    Example(
        "permission",
        "adjust:cache_dir",
        "PermissionError: [Errno 13] Permission denied: '/home/bob/.cache/huggingface/x'",
    ),
    Example(
        "permission",
        "retry",
        " 40%|####      | 40/100 [10:00<15:00, 2.0s/it]\nPermissionError: [Errno 13] Permission denied: "
        "'/mnt/nfs/train.bin'",
        2,
    ),
    Example("permission", "stop", "PermissionError: [Errno 13] Permission denied: '/srv/models/config.json'"),
    Example("permission", "retry_excluding_node", "OSError: [Errno 116] Stale file handle: '/mnt/nas/data/train.bin'"),
    # DeepSpeed, numerics
    Example(
        "ds_config",
        "stop",
        "AssertionError: Check batch related parameters. train_batch_size is not equal to micro_batch_per_gpu * "
        "gradient_acc_step * "
        "world_size 8 != 3 * 1 * 1",
    ),
    Example(
        "ds_config",
        "adjust:batch_size",
        "│ AssertionError: Check batch related parameters. train_batch_size is not equal\n"
        "│ to micro_batch_per_gpu * gradient_acc_step * world_size 48 != 4 *\n│ 2 * 4",
    ),
    Example(
        "ds_config",
        "stop",
        "ValueError: Please correct the following DeepSpeed config values that mismatch TrainingArguments values:",
    ),
    Example("ds_launcher_ssh", "stop", "n2: user@n2: Permission denied (publickey,password)."),
    Example("ds_launcher_host", "retry", "RuntimeError: Using hostfile at /h but host=n2 was not reachable via ssh."),
    Example("ds_launcher_host", "adjust:master_addr", "[INFO] [runner.py:509:main] Using IP address of  for node n1"),
    Example(
        "ds_launcher_host",
        "stop",
        "ValueError: Hostfile is empty or not formatted correctly, unable to proceed with launching",
    ),
    Example(
        "fp16_scale_min",
        "adjust:precision",
        "Exception: Current loss scale already at minimum - cannot decrease scale anymore.",
    ),
    Example(
        "loss_nan",
        "adjust:precision",
        "{'loss': 0.0, 'grad_norm': nan, 'epoch': 0.1}\nTraceback (most recent call last):\n"
        "RuntimeError: probability tensor contains either `inf`, `nan` or element < 0",
    ),
    Example("loss_nan", "adjust:precision", "FloatingPointError: Loss is nan at step 12"),
    # Checkpoints, tokenizer, data
    Example(
        "ckpt_weights_only",
        "stop",
        "_pickle.UnpicklingError: Weights only load failed. This file can still be loaded, to do so you have two "
        "options, \x1b[1mdo those "
        "steps only if you trust the source of the checkpoint\x1b[0m.",
    ),
    Example(
        "ckpt_corrupt",
        "adjust:checkpoint",
        "safetensors_rust.SafetensorError: Error while deserializing header: incomplete metadata, file not fully "
        "covered",
    ),
    Example(
        "commit_refused",
        "retry",
        "launcher.train.commit_permit.CommitRefused: checkpoint-10 of step 10 was not committed: generation 3 is over "
        "for this node: another may be training already",
    ),
    Example(
        "ckpt_world_size",
        "adjust:checkpoint",
        "deepspeed.runtime.zero.utils.ZeRORuntimeException: The checkpoint being loaded used a DP world size of "
        "6 but the current world "
        "size is 3.",
    ),
    Example(
        "ckpt_missing_latest", "adjust:checkpoint", "ValueError: Can't find a valid checkpoint at /runs/a/checkpoint-9"
    ),
    Example(
        "peft_key_mismatch",
        "stop",
        "RuntimeError: Error(s) in loading state_dict for PeftModelForCausalLM:\n"
        "\tsize mismatch for base_model.model.q_proj.lora_A.default.weight: copying a param with shape "
        "torch.Size([8, 32])",
        2,
    ),
    Example(
        "tokenizer_mismatch",
        "stop",
        "Exception: data did not match any variant of untagged enum ModelUntagged at line 1 column 9",
    ),
    Example(
        "data_too_long",
        "adjust:seq_length",
        "Token indices sequence length is longer than the specified maximum sequence length for this model (900 "
        "> 512).\n"
        "Traceback (most recent call last):\nIndexError: index out of range in self",
        3,
    ),
    Example(
        "data_bad_record", "stop", "pyarrow.lib.ArrowInvalid: JSON parse error: Invalid encoding in string. in row 1"
    ),
    Example("data_empty", "stop", "ValueError: num_samples should be a positive integer value, but got num_samples=0"),
    # GPUs
    Example(
        "gpu_ecc",
        "retry_excluding_node",
        "[9.1] NVRM: Xid (PCI:0000:3b:00): 94, pid=77, name=python3, Contained: SM (0x1).",
    ),
    Example(
        "gpu_off_bus",
        "retry_excluding_node",
        "[9.1] NVRM: Xid (PCI:0000:3b:00): 79, pid=77, GPU has fallen off the bus.",
    ),
    Example(
        "nvlink_error",
        "retry_excluding_node",
        "torch.AcceleratorError: CUDA error: uncorrectable NVLink error detected",
    ),
    Example(
        "gpu_unhealthy",
        "retry_excluding_node",
        "[9.1] NVRM: Xid (PCI:0000:3b:00): 119, pid=77, Timeout after 6s of waiting",
    ),
    Example(
        "gpu_unhealthy",
        "retry_excluding_node",
        "[9.1] NVRM: Xid (PCI:0000:3b:00): 31, pid=77, MMU Fault\n[9.2] NVRM: Xid (PCI:0000:3b:00): 43, pid=77, Ch 8",
    ),
    Example("gpu_unhealthy", "retry_excluding_node", "[9.2] NVRM: Xid (PCI:0000:3b:00): 45, pid=77, Ch 00000008"),
    Example(
        "cuda_illegal_memory", "retry", "torch.AcceleratorError: CUDA error: an illegal memory access was encountered"
    ),
    Example(
        "cuda_illegal_memory",
        "stop",
        "[9.1] NVRM: Xid (PCI:0000:3b:00): 31, pid=77, name=python, MMU Fault: faulted @ 0x10_0020. Fault is of type\n"
        "[99.1] NVRM: Xid (PCI:0000:3b:00): 31, pid=88, name=python, MMU Fault: faulted @ 0x10_0020. Fault is of type",
    ),
    Example("cuda_launch_failure", "retry", "torch.AcceleratorError: CUDA error: unspecified launch failure"),
    Example(
        "device_assert_index",
        "stop",
        "Indexing.cu:1290: indexSelectLargeIndex: block: [1,0,0], thread: [2,0,0] Assertion `srcIndex < "
        "srcSelectDimSize` failed.\n"
        "torch.AcceleratorError: CUDA error: device-side assert triggered",
    ),
    Example(
        "device_assert_label",
        "stop",
        "  0%|          | 0/90 [00:00<?, ?it/s]Loss.cu:245: nll_loss: block: [0,0,0] Assertion `t >= 0 && t < "
        "n_classes` failed.",
    ),
    Example(
        "device_assert_prob", "stop", "RuntimeError: probability tensor contains either `inf`, `nan` or element < 0"
    ),
    Example(
        "cublas_cudnn",
        "adjust:batch_size",
        "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(h)`",
    ),
    Example("cublas_cudnn", "retry", "RuntimeError: cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"),
    Example(
        "cublas_cudnn",
        "stop",
        "RuntimeError: CUDA error: CUBLAS_STATUS_INVALID_VALUE when calling `cublasSgemm( h, a )`",
    ),
    Example(
        "no_kernel_image",
        "stop",
        "torch.AcceleratorError: CUDA error: no kernel image is available for execution on the device",
    ),
    Example(
        "driver_mismatch", "stop", "RuntimeError: The NVIDIA driver on your system is too old (found version 11040)."
    ),
    Example(
        "driver_mismatch",
        "retry_excluding_node",
        "/opt/torch/cuda/__init__.py:129: UserWarning: CUDA initialization: The NVIDIA driver on your system is too "
        "old (found version 11040).",
    ),
    Example("driver_mismatch", "retry_excluding_node", "Failed to initialize NVML: Driver/library version mismatch"),
    Example("bf16_unsupported", "adjust:precision", "ValueError: Your setup doesn't support bf16/gpu."),
    Example("gpu_count", "adjust:nproc_per_node", "torch.AcceleratorError: CUDA error: invalid device ordinal"),
    Example(
        "segfault",
        "retry",
        "[88.0] pt_main_thread[77]: segfault at 7f00 ip 00007f01 sp 00007f02 error 4 in libnccl.so.2[7f00+d3]",
    ),
    # Network
    Example(
        "nccl_version_mismatch",
        "stop",
        "ImportError: /opt/torch/lib/libtorch_cuda.so: undefined symbol: ncclCommRegister",
    ),
    Example(
        "nccl_wrong_interface",
        "adjust:NCCL_SOCKET_IFNAME",
        f"{_NCCL}ncclOsSocketConnect: connect to fe80::1%eth9<4021> failed : Network is unreachable",
    ),
    Example(
        "nccl_connection_refused", "adjust:firewall", f"{_NCCL}Connect to 10.9.8.7<4021> failed : Connection refused"
    ),
    Example(
        "nccl_ib_failure",
        "adjust:ib_gdr",
        f"{_NCCL}NET/IB : Got completion from peer 10.9.8.7<1> with error 4, opcode 1, len 1",
    ),
    Example(
        "nccl_ib_failure",
        "adjust:NCCL_IB_GID_INDEX",
        f"{_NCCL}Call to ibv_modify_qp failed with 22 Invalid argument, on dev a:1",
    ),
    Example(
        "nccl_ib_failure",
        "adjust:NCCL_IB_HCA",
        f"{_NCCL}Call to ibv_modify_qp failed with error Network is unreachable",
    ),
    Example(
        "nccl_ib_failure",
        "adjust:NCCL_CROSS_NIC",
        f"{_NCCL}Call to ibv_modify_qp failed with 110 Connection timed out, on dev a",
    ),
    Example(
        "nccl_ib_failure",
        "retry_excluding_node",
        f"{_NCCL}NET/IB: Got completion from peer 10.9.8.7<1> with status=IBV_WC_RETRY_EXC_ERR(12) "
        "opcode=IBV_WC_SEND(0) vendor_err=129",
    ),
    Example(
        "rdzv_connection_lost",
        "retry",
        '  File "/opt/python/multiprocessing/connection.py", line 399, in _recv\n    raise EOFError\nEOFError',
        3,
    ),
    Example("nccl_network_reset", "retry", f"{_NCCL}Call to recv from 10.9.8.7<4021> failed : Connection timed out"),
    Example("nccl_remote_exited", "retry", f"{_NCCL}socketProgress: Connection closed by remote peer n2<4021>"),
    Example(
        "nccl_init_store_timeout",
        "adjust:data_prep",
        "torch.distributed.DistBackendError: [2] is setting up NCCL communicator and retrieving ncclUniqueId "
        "from [0] via c10d key-value "
        "store by key '0', but store->get('0') got error: Socket Timeout",
    ),
    Example(
        "nccl_watchdog_timeout",
        "retry",
        "[rank2]:[E101 10:00:00.1 ProcessGroupNCCL.cpp:632] [Rank 2] Watchdog caught collective operation "
        "timeout: WorkNCCL(SeqNum=77, "
        "OpType=ALLREDUCE, NumelIn=9, NumelOut=9, Timeout(ms)=600000) ran for 600010 milliseconds before timing out.",
    ),
    Example(
        "nccl_system_error",
        "retry",
        "torch.distributed.DistBackendError: NCCL error in: a.cpp:1, unhandled system error, NCCL",
    ),
    Example(
        "gloo_connection",
        "adjust:GLOO_SOCKET_IFNAME",
        "RuntimeError: Gloo connectFullMesh failed with [a/pair.cc:144] no error",
    ),
    Example(
        "gloo_connection",
        "retry",
        "RuntimeError: [/pytorch/gloo/transport/tcp/pair.cc:538] Connection closed by peer [10.9.8.7]:44",
    ),
    Example(
        "host_unresolved",
        "adjust:master_addr",
        "[W socket.cpp:755] [c10d] The IPv6 network addresses of (head, 29500) cannot be retrieved (gai error: "
        "-2 - Name or service "
        f"not known).\n{_CLIENT_TIMEOUT}",
        2,
    ),
    Example(
        "host_unresolved",
        "adjust:master_addr",
        "ssh: Could not resolve hostname n7: Temporary failure in name resolution",
    ),
    Example(
        "port_in_use",
        "adjust:master_port",
        "torch.distributed.DistNetworkError: The server socket has failed to listen on any local network "
        "address. port: 29511, useIpv6: "
        "false, code: -98, name: EADDRINUSE, message: address already in use",
    ),
    Example(
        "rdzv_timeout",
        "adjust:rdzv_id",
        "WARNING: config has no run_id, generated a random run_id: "
        "5\ntorch.distributed.elastic.rendezvous.api.RendezvousTimeoutError",
        1,
    ),
    Example("rdzv_timeout", "adjust:rdzv_endpoint", _CLIENT_TIMEOUT),
    Example("rdzv_connection_lost", "retry", "RendezvousConnectionError: The connection to the C10d store has failed."),
    # Environment, user code, scheduler
    Example("import_abi", "stop", "ImportError: /opt/env/flash.so: undefined symbol: _ZN3c105ErrorC2E"),
    Example(
        "user_code",
        "adjust:ddp_settings",
        "RuntimeError: Expected to have finished reduction in the prior iteration before",
    ),
    Example("user_code", "stop", "python3: can't open file '/opt/app/python': [Errno 2] No such file or directory"),
    Example("user_code", "stop", "torch._dynamo.exc.BackendCompilerFailed: backend='inductor' raised:"),
    Example("user_code", "adjust:data_prep", "FileExistsError: [Errno 17] File exists: '/data/cache'"),
    Example(
        "preempted",
        "retry",
        "slurmstepd: error: *** JOB 77 ON n1 CANCELLED AT 2026-01-02T03:04:05 DUE TO PREEMPTION ***",
    ),
    Example(
        "user_code",
        "stop",
        'Traceback (most recent call last):\n  File "/opt/app/a.py", line 3, in f\nZeroDivisionError: division',
        3,
    ),
)
