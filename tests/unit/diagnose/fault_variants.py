"""The same faults as other launchers, versions and consoles show them: (class, log, line of the proof, rank).

Composed from the formats in the libraries' own sources, with names and numbers of our own.
"""

from __future__ import annotations

from typing import NamedTuple


class Variant(NamedTuple):
    cls: str
    log: str
    proof: int
    rank: int | None = None
    action: str = ""  # where the class has several


TORCHRUN_SUMMARY = """\
E1130 10:00:09.100000 77 torch/distributed/elastic/multiprocessing/api.py:1003] failed (exitcode: 1) local_rank: 5 \
(pid: 4711) of binary: /opt/venv/bin/python3
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
train.py FAILED
------------------------------------------------------------
Failures:
  <NO_OTHER_FAILURES>
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-11-30_10:00:09
  host      : n1
  rank      : 5 (local_rank: 5)
  exitcode  : 1 (pid: 4711)
  error_file: <N/A>
  traceback : To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html
============================================================"""
STOPPING = "W1130 10:00:08.000001 77 torch/distributed/elastic/multiprocessing/api.py:1029] Sending process {pid} closing signal SIGTERM"
SEVEN_STOPPED = "\n".join(STOPPING.format(pid=4700 + i) for i in range(7))


def watchdogs(ranks: range, prefix: str = "[rank{r}]:") -> str:
    """What every rank prints that waits in a collective for one that never comes."""
    line = (
        "[E1130 10:10:00.{r}00000000 ProcessGroupNCCL.cpp:632] [Rank {r}] Watchdog caught collective operation timeout: "
        "WorkNCCL(SeqNum=812, OpType=_ALLGATHER_BASE, NumelIn=4194304, NumelOut=33554432, Timeout(ms)=600000) ran for "
        "600012 milliseconds before timing out."
    )
    return "\n".join(prefix.format(r=r) + line.format(r=r) for r in ranks)


VARIANTS: tuple[Variant, ...] = (
    # One cause, seven victims that speak first or louder.
    Variant(
        "user_code",
        watchdogs(range(7))
        + "\n[rank7]: Traceback (most recent call last):\n"
        + '[rank7]:   File "/opt/app/train.py", line 88, in collate\n[rank7]:     weights = table[row["kind"]]\n'
        + "[rank7]: KeyError: 'kind'\n"
        + TORCHRUN_SUMMARY,
        11,
        7,
    ),
    Variant(
        "host_oom",
        "\n".join(
            f"[rank{r}]: RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by "
            f"peer [10.0.0.1]:4021{r}"
            for r in range(7)
        )
        + "\nE1130 10:00:09.1 77 torch/distributed/elastic/multiprocessing/api.py:1003] failed (exitcode: -9) "
        "local_rank: 7 (pid: 4707) of binary: /usr/bin/python3",
        8,
        7,
    ),
    Variant(
        "cuda_oom_forward",
        watchdogs(range(1, 8), "{r}: [rank{r}]:")
        + '\n0: Traceback (most recent call last):\n0:   File "/opt/app/model.py", line 40, in forward\n'
        "0: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 3.12 GiB. GPU 0 has a total capacity of 79.15 "
        "GiB of which 900.00 MiB is free. Including non-PyTorch memory, this process has 78.20 GiB memory in use.",
        10,
        0,
    ),
    Variant(
        "gpu_ecc",
        "2026-11-30T10:00:00.000000001Z [rank1]: torch.distributed.DistBackendError: NCCL error in: "
        "/pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:77, remote process exited or there was a network error, "
        "NCCL version 2.29.7\n"
        "2026-11-30T10:00:00.000000002Z ncclRemoteError: A call failed possibly due to a network error or a remote process "
        "exiting prematurely.\n2026-11-30T10:00:00.000000003Z Last error:\n"
        "2026-11-30T10:00:00.000000004Z socketProgress: Connection closed by remote peer n2<40211>\n"
        "2026-11-30T09:59:58.000000001Z [rank3]: torch.AcceleratorError: CUDA error: uncorrectable ECC error encountered",
        5,
        3,
    ),
    # torchrun's first observed failure is the one that left first, not the one that failed first.
    Variant(
        "data_bad_record",
        "[default3]:pyarrow.lib.ArrowInvalid: JSON parse error: Missing a closing quotation mark in string. in row 17\n"
        "[default5]:[rank5]:[E1130 10:10:00.1 ProcessGroupNCCL.cpp:632] [Rank 5] Watchdog caught collective operation "
        "timeout: WorkNCCL(SeqNum=1, OpType=BROADCAST, NumelIn=1, NumelOut=1, Timeout(ms)=600000) ran for 600001 "
        "milliseconds before timing out.\n" + TORCHRUN_SUMMARY,
        1,
        3,
    ),
    Variant(
        "import_abi",
        SEVEN_STOPPED + "\nTraceback (most recent call last):\n"
        '  File "/opt/app/train.py", line 3, in <module>\n    import flash_attn\n'
        "ImportError: /opt/venv/lib/python3.11/site-packages/flash_attn_2_cuda.so: undefined symbol: "
        "_ZN3c105ErrorC2ENS_14SourceLocationESs\n" + TORCHRUN_SUMMARY,
        11,
    ),
    # Consoles.
    Variant(
        "no_space",
        "Epoch 1:  37%|###7      | 370/1000 [05:00<08:31,  1.23it/s]\r"
        "Epoch 1:  38%|###8      | 380/1000 [05:08<08:23,  1.23it/s]OSError: [Errno 28] No space left on device",
        1,
    ),
    Variant("fd_limit", "\x1b[31m[rank2]: OSError: [Errno 24] Too many open files: '/data/shard-7.arrow'\x1b[0m", 1, 2),
    Variant("port_in_use", "n2: torch.distributed.DistNetworkError: The server socket has failed to listen on any local network address. port: 29500, useIpv6: false, code: -98, name: EADDRINUSE, message: address already in use", 1),
    Variant("ckpt_corrupt", "[1,6]<stderr>:EOFError: Ran out of input", 1, 6),
    Variant(
        "user_code",
        "(RayTrainWorker pid=991, ip=10.0.0.9) Traceback (most recent call last):\n"
        '(RayTrainWorker pid=991, ip=10.0.0.9)   File "/opt/app/loop.py", line 7, in step\n'
        "(RayTrainWorker pid=991, ip=10.0.0.9) ZeroDivisionError: float division by zero",
        3,
    ),
    Variant(
        "data_empty",
        "[pod/job-worker-0/pytorch] 2026-11-30T10:00:00.1Z ValueError: num_samples should be a positive integer value, but "
        "got num_samples=0",
        1,
    ),
    Variant(
        "tokenizer_mismatch",
        "╭──────────── Traceback (most recent call last) ────────────╮\n"
        "│ /opt/app/tok.py:9 in load                                  │\n"
        "╰────────────────────────────────────────────────────────────╯\n"
        "Exception: data did not match any variant of untagged enum PyPreTokenizerTypeWrapper at line 69 column 3",
        4,
    ),
    Variant(
        "preempted",
        "3: step 410/1000 loss 1.2\n3: step 420/1000 loss 1.1\n"
        "slurmstepd: error: *** JOB 991 ON gpu-7 CANCELLED AT 2026-11-30T10:00:00 DUE TO PREEMPTION ***\n"
        "3: Traceback (most recent call last):\n3: KeyboardInterrupt",
        3,
    ),
    # GPU memory
    Variant(
        "cuda_oom_load",
        'Loading checkpoint shards:  50%|#####     | 2/4 [00:08<00:08]\n  File "/opt/venv/lib/python3.11/site-packages/'
        'transformers/modeling_utils.py", line 5200, in _load_pretrained_model\n'
        "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 224.00 MiB (GPU 0; 23.69 GiB total capacity; "
        "22.80 GiB already allocated; 90.00 MiB free; 22.90 GiB reserved in total by PyTorch)",
        3,
    ),
    Variant(
        "cuda_oom_optimizer",
        '  File "/opt/venv/lib/python3.11/site-packages/deepspeed/runtime/zero/stage_1_and_2.py", line 660, in '
        "initialize_optimizer_states\n"
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 12.55 GiB. GPU 3 has a total capacity of 79.15 GiB "
        "of which 8.00 GiB is free. Including non-PyTorch memory, this process has 71.10 GiB memory in use.",
        2,
    ),
    Variant(
        "cuda_oom_optimizer",
        '  File "/opt/venv/lib/python3.11/site-packages/torch/optim/adamw.py", line 182, in _init_group\n'
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 64.00 MiB. GPU 0 has a total capacity of 23.64 GiB "
        "of which 10.00 MiB is free. Including non-PyTorch memory, this process has 23.60 GiB memory in use.",
        2,
    ),
    Variant("cuda_oom_nccl", "n1:9:9 [2] enqueue.cc:1451 NCCL WARN Cuda failure 'out of memory'\n[rank2]: torch.distributed.DistBackendError: NCCL error in: /x/NCCLUtils.hpp:268, unhandled cuda error (run with NCCL_DEBUG=INFO for details), NCCL version 2.21.5", 1),
    # Host memory and shared memory
    Variant("host_oom", "[Mon Nov 30 10:00:00 2026] Out of memory: Killed process 4711 (pt_main_thread) total-vm:1kB, anon-rss:9kB, UID:0 oom_score_adj:0", 1),
    Variant("host_oom", "slurmstepd: error: Detected 3 oom_kill events in StepId=7.0. Some of the step tasks have been OOM Killed.\nsrun: error: gpu-7: task 3: Out Of Memory", 1),
    Variant("host_oom", "[2026-11-30 10:00:00,000] [INFO] [launch.py:319:sigkill_handler] Killing subprocess 4711\n[2026-11-30 10:00:01,000] [ERROR] [launch.py:325:sigkill_handler] ['python3', 'train.py'] exits with return code = -9", 2),
    Variant("host_oom", "    State:          Terminated\n      Reason:       OOMKilled\n      Exit Code:    137", 2),
    Variant("host_oom", "ray.exceptions.OutOfMemoryError: Task was killed due to the node running low on memory.", 1),
    Variant("host_oom", "RuntimeError: [enforce fail at alloc_cpu.cpp:114] data. DefaultCPUAllocator: can't allocate memory: you tried to allocate 8589934592 bytes. Error code 12 (Cannot allocate memory)", 1),
    Variant("host_oom", "numpy._core._exceptions._ArrayMemoryError: Unable to allocate 12.0 GiB for an array with shape (1610612736,) and data type float64", 1),
    Variant("host_oom", "concurrent.futures.process.BrokenProcessPool: A process in the process pool was terminated abruptly while the future was running or pending.\nkernel: Memory cgroup out of memory: Killed process 99 (python3) total-vm:1kB", 2),
    Variant("shm_exhausted", "RuntimeError: unable to allocate shared memory(shm) for file </torch_4711_2983_0>: Resource temporarily unavailable (11)", 1),
    Variant("shm_exhausted", "OSError: [Errno 28] No space left on device: '/dev/shm/torch_99_1'", 1),
    Variant("shm_exhausted", "n1:9:9 [0] misc/shmutils.cc:72 NCCL WARN Error: failed to extend /dev/shm/nccl-aBcDeF to 9637892 bytes\n[rank0]: torch.distributed.DistBackendError: NCCL error in: /x/NCCLUtils.hpp:268, unhandled system error (run with NCCL_DEBUG=INFO for details), NCCL version 2.21.5\n[rank0]: ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error.\n[rank0]: Last error:\n[rank0]: Error: failed to extend /dev/shm/nccl-aBcDeF to 9637892 bytes", 1),
    Variant("shm_exhausted", "n1:9:9 [0] misc/shmutils.cc:87 NCCL WARN Error while creating shared memory segment /dev/shm/nccl-x (size 9637892), error: No space left on device (28)", 1),
    Variant("shm_exhausted", "Fatal Python error: Bus error\n\nThread 0x00007f (most recent call first):\n  File \"/opt/x.py\", line 1 in f", 1),
    Variant("fd_limit", "RuntimeError: received 0 items of ancdata", 1),
    Variant("fd_limit", "OpenBLAS blas_thread_init: pthread_create failed for thread 63 of 64: Resource temporarily unavailable", 1, action="stop"),
    Variant("disk_quota", "OSError: [Errno 122] Disk quota exceeded: '/home/ann/.cache/huggingface/hub/x'", 1, action="adjust:cache_dir"),
    Variant("no_space", "safetensors._safetensors_rust.SafetensorError: Error while serializing: I/O error: No space left on device (os error 28)", 1),
    Variant("no_space", "RuntimeError: [enforce fail at inline_container.cc:626] . unexpected pos 4480 vs 4374\n[rank0]: RuntimeError: PytorchStreamWriter failed writing file data/12: file write failed", 2),
    Variant("permission", "OSError: PermissionError at /root/.cache/huggingface/hub when downloading ann/model. Check cache directory permissions.", 1, action="adjust:cache_dir"),
    Variant("permission", "mkdir: cannot create directory '/mnt/out': Permission denied", 1, action="stop"),
    # NCCL and networks
    Variant("nccl_watchdog_timeout", watchdogs(range(2)), 1),
    Variant("nccl_watchdog_timeout", "[rank1]:[F1130 10:00:00.1 ProcessGroupNCCL.cpp:1557] [PG ID 0 PG GUID 0(default_pg) Rank 1] [PG ID 0 PG GUID 0(default_pg) Rank 1] ProcessGroupNCCL's watchdog got stuck for 480 seconds without making progress in monitoring enqueued collectives.", 1),
    Variant("nccl_watchdog_timeout", "RuntimeError: [Rank 3] Caught collective operation timeout: WorkNCCL(SeqNum=5, OpType=ALLREDUCE, TensorShape=[1], Timeout(ms)=1800000) ran for 1806406 milliseconds before timing out.", 1),
    Variant("nccl_remote_exited", "n1:9:9 [1] misc/socket.cc:58 NCCL WARN socketProgress: Connection closed by remote peer n2.cluster<34567>", 1),
    Variant("nccl_connection_refused", "n1:9:9 [0] os/linux.cc:290 NCCL WARN ncclOsSocketConnect: connect to 10.3.4.5<4021> failed : Connection refused", 1),
    Variant("nccl_connection_refused", "n1:9:9 [0] misc/socket.cc:483 NCCL WARN socketStartConnect: Connect to 10.3.4.5<52117> failed : Connection refused", 1),
    Variant("nccl_connection_refused", "n1:9:9 [0] misc/socket.cc:452 NCCL WARN socketPollConnect: Connect to 10.3.4.5<52117> returned 111(Connection refused) errno 115(Operation now in progress)", 1),
    Variant("nccl_wrong_interface", "n1:9:9 [0] bootstrap.cc:120 NCCL WARN Bootstrap : no socket interface found", 1),
    Variant("nccl_wrong_interface", "n1:9:9 [0] NCCL INFO Bootstrap : Using docker0:172.17.0.1<0>\nn1:9:9 [0] misc/socket.cc:483 NCCL WARN socketStartConnect: Connect to 172.17.0.1<40123> failed : Connection refused", 2),
    Variant("nccl_wrong_interface", "n1:9:9 [0] misc/socket.cc:483 NCCL WARN socketStartConnect: Connect to 192.168.122.1<40123> failed : No route to host", 1),
    Variant("nccl_wrong_interface", "n1:9:9 [0] bootstrap.cc:577 NCCL WARN NET/Socket : No usable listening interface found", 1),
    Variant("nccl_ib_failure", "n1:9:9 [0] transport/net_ib.cc:1295 NCCL WARN NET/IB : Got completion from peer 10.0.0.2<4021> with error 12, opcode 129, len 32600, vendor err 129 (Recv) localGid fe80::1 remoteGid fe80::2", 1, action="retry_excluding_node"),
    Variant("nccl_ib_failure", "n1:9:9 [0] transport/net_ib.cc:93 NCCL WARN NET/IB : mlx5_3:1 Got async event : port error", 1, action="retry_excluding_node"),
    Variant("nccl_ib_failure", "n1:9:9 [0] misc/ibvwrap.cc:262 NCCL WARN Call to ibv_create_qp failed with error Cannot allocate memory", 1),
    Variant("nccl_ib_failure", "n1:9:9 [0] nccl_net_ofi_rdma.c:1201 NCCL WARN NET/OFI Request 0x7f completed with error. RC: 103. Error: Software caused connection abort", 1, action="retry_excluding_node"),
    Variant("nccl_ib_failure", "n1:9:9 [0] misc/ibvwrap.cc:160 NCCL WARN Call to ibv_open_device failed", 1),
    Variant("nccl_init_store_timeout", "[rank3]: torch.distributed.DistBackendError: [3] is setting up NCCL communicators and retrieving ncclUniqueIds from roots via TCPStore by key '0', but got error: wait timeout after 600000ms", 1, 3),
    Variant("nccl_init_store_timeout", "RuntimeError: [1] is setting up NCCL communicator and retreiving ncclUniqueId from [0] via c10d key-value store by key '0', but store->get('0') got error: Connection reset by peer", 1),
    Variant("nccl_version_mismatch", "n1:9:9 [0] init.cc:1043 NCCL WARN Mismatched NCCL version detected : rank 0 version 22907 rank 4 version 22105", 1),
    Variant("nccl_system_error", "RuntimeError: NCCL error in: /pytorch/torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:1275, unhandled system error, NCCL version 2.19.3\nncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error.", 1),
    Variant("gloo_connection", "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:598] Connection closed by peer [10.0.0.4]:59113", 1, action="retry"),
    Variant("gloo_connection", "RuntimeError: Gloo connectFullMesh failed with [../third_party/gloo/gloo/transport/tcp/pair.cc:144] no error", 1, action="adjust:GLOO_SOCKET_IFNAME"),
    Variant("gloo_connection", "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 1800000ms for recv operation to complete", 1, action="retry"),
    Variant("rdzv_timeout", "torch.distributed.elastic.rendezvous.api.RendezvousTimeoutError", 1),
    Variant("rdzv_timeout", "torch.distributed.DistStoreError: Timed out after 901 seconds waiting for clients. 1/2 clients joined.", 1),
    Variant("rdzv_timeout", "RuntimeError: Timed out initializing process group in store based barrier on rank: 1, for key: store_based_barrier_key:1 (world_size=4, worker_count=2, timeout=0:30:00)", 1),
    Variant("rdzv_connection_lost", "torch.distributed.elastic.rendezvous.api.RendezvousConnectionError: The connection to the C10d store has failed. See inner exception for details.", 1),
    Variant("host_unresolved", "[W1130 10:00:00.1 socket.cpp:755] [c10d] The IPv6 network addresses of (job-master-0, 29500) cannot be retrieved (gai error: -2 - Name or service not known).\ntorch.distributed.DistNetworkError: The client socket has timed out after 900000ms while trying to connect to (job-master-0, 29500).", 2),
    Variant("port_in_use", "[W1130 10:00:00.1 socket.cpp:464] [c10d] The server socket has failed to bind to [::]:29500 (errno: 98 - Address already in use).\nRuntimeError: The server socket has failed to listen on any local network address. The server socket has failed to bind to [::]:29500 (errno: 98 - Address already in use).", 1),
    # GPUs
    Variant("gpu_off_bus", "kernel: NVRM: The NVIDIA GPU 0000:5d:00.0\nkernel: NVRM: (PCI ID: 10de:2330) installed in this system has\nkernel: NVRM: fallen off the bus and is not responding to commands.", 3),
    Variant("gpu_off_bus", "Unable to determine the device handle for GPU0000:5D:00.0: Unknown Error", 1),
    Variant("nvlink_error", "NVRM: Xid (PCI:0000:5d:00): 74, pid='<unknown>', name=<unknown>, NVLink: fatal error detected on link 6(0x10000, 0x0, 0x0, 0x0, 0x0, 0x0, 0x0)", 1),
    Variant("nvlink_error", "nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 20034, Fatal, Link 28 LTSSM Fault Up", 1),
    Variant("nvlink_error", "NVRM: Xid (PCI:0000:5d:00): 145, NVLink: RLW_REMAP Nonfatal XC0 i0 Link 04", 1),
    Variant("gpu_unhealthy", "NVRM: Xid (PCI:0000:5d:00): 119, pid=4711, name=python3, Timeout after 45s of waiting for RPC response from GPU4 GSP! Expected function 76 (GSP_RM_CONTROL)", 1),
    Variant("gpu_unhealthy", "[rank4]: RuntimeError: CUDA error: CUDA-capable device(s) is/are busy or unavailable", 1, 4),
    Variant("gpu_unhealthy", "RuntimeError: Unexpected error from cudaGetDeviceCount(). Did you run some cuda functions before calling NumCudaDevices() that might have already set an error? Error 802: system not yet initialized", 1),
    Variant("gpu_unhealthy", "torch.AcceleratorError: CUDA error: initialization error", 1),
    Variant("gpu_ecc", "NVRM: Xid (PCI:0000:5d:00): 64, pid='<unknown>', name=<unknown>, Failed to store the row remapping", 1),
    Variant("cuda_illegal_memory", "terminate called after throwing an instance of 'c10::DistBackendError'\n  what():  [PG ID 0 PG GUID 0(default_pg) Rank 6] Process group watchdog thread terminated with exception: CUDA error: an illegal memory access was encountered", 2, 6),
    Variant("cuda_illegal_memory", "n1:9:9 [0] NCCL WARN Cuda failure 700 'an illegal memory access was encountered'", 1),
    Variant("cuda_illegal_memory", "NVRM: Xid (PCI:0000:01:00): 31, pid=100, name=python3, Ch 00000010, intr 00000000. MMU Fault: ENGINE GRAPHICS GPCCLIENT_T1_0 faulted @ 0x7f_a0000000. Fault is of type FAULT_PDE ACCESS_TYPE_VIRT_READ\nNVRM: Xid (PCI:0000:01:00): 31, pid=222, name=python3, Ch 00000010, intr 00000000. MMU Fault: ENGINE GRAPHICS GPCCLIENT_T1_0 faulted @ 0x7f_a0000000. Fault is of type FAULT_PDE ACCESS_TYPE_VIRT_READ", 1, action="stop"),
    Variant("cuda_launch_failure", "NVRM: Xid (PCI:0000:5d:00): 109, pid=4711, name=python3, Ch 00000008, errorString CTX SWITCH TIMEOUT, Info 0x3c046", 1),
    Variant("cuda_launch_failure", "torch.AcceleratorError: CUDA error: the launch timed out and was terminated", 1),
    Variant("cublas_cudnn", "RuntimeError: cuDNN error: CUDNN_STATUS_INTERNAL_ERROR", 1, action="retry"),
    Variant("cublas_cudnn", "RuntimeError: CUDA error: CUBLAS_STATUS_NOT_SUPPORTED when calling `cublasGemmEx( handle, opa, opb, m, n, k)`", 1, action="stop"),
    Variant("device_assert_index", "/pytorch/aten/src/ATen/native/cuda/Indexing.cu:1422: indexSelectSmallIndex: block: [8,0,0], thread: [32,0,0] Assertion `srcIndex < srcSelectDimSize` failed.\n[rank0]: RuntimeError: CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`", 1),
    Variant("device_assert_index", "/pytorch/aten/src/ATen/native/cuda/IndexKernelUtils.cu:16: vectorized_gather_kernel: block: [0,0,0], thread: [0,0,0] Assertion `ind >=0 && ind < ind_dim_size && \"vectorized gather kernel index out of bounds\"` failed.", 1),
    Variant("device_assert_index", "../aten/src/ATen/native/cuda/ScatterGatherKernel.cu:144: operator(): block: [1,0,0], thread: [3,0,0] Assertion `idx_dim >= 0 && idx_dim < index_size && \"index out of bounds\"` failed.\nRuntimeError: CUDA error: device-side assert triggered", 1),
    Variant("device_assert_label", "IndexError: Target 32000 is out of bounds.", 1),
    Variant("device_assert_label", "/pytorch/aten/src/ATen/native/cuda/Loss.cu:250: nll_loss_forward_reduce_cuda_kernel_2d: block: [0,0,0], thread: [5,0,0] Assertion `t >= 0 && t < n_classes` failed.\nRuntimeError: CUDA error: device-side assert triggered", 1),
    Variant("device_assert_prob", "../aten/src/ATen/native/cuda/TensorCompare.cu:110: _assert_async_cuda_kernel: block: [0,0,0], thread: [0,0,0] Assertion `probability tensor contains either `inf`, `nan` or element < 0` failed.\n[rank1]: RuntimeError: CUDA error: device-side assert triggered", 1),
    Variant("device_assert_prob", "../aten/src/ATen/native/cuda/MultinomialKernel.cu:112: binarySearchForMultinomial: block: [0,0,0], thread: [0,0,0] Assertion `cumdist[size - 1] > static_cast<scalar_t>(0)` failed.", 1),
    Variant("no_kernel_image", "NVIDIA H200 with CUDA capability sm_90 is not compatible with the current PyTorch installation.\nRuntimeError: CUDA error: no kernel image is available for execution on the device", 2),
    Variant("bf16_unsupported", "ValueError: Your setup doesn't support bf16/gpu. You need torch>=1.10, using Ampere GPU with cuda>=11.0", 1),
    Variant("bf16_unsupported", "ValueError: Bfloat16 is only supported on GPUs with compute capability of at least 8.0. Your Tesla V100-SXM2-32GB GPU has compute capability 7.0.", 1),
    Variant("bf16_unsupported", "RuntimeError: \"addmm_impl_cpu_\" not implemented for 'BFloat16'", 1),
    Variant("driver_mismatch", "RuntimeError: Unexpected error from cudaGetDeviceCount(). Error 804: forward compatibility was attempted on non supported HW", 1),
    Variant("gpu_count", "torch.AcceleratorError: CUDA error: invalid device ordinal\nGPU device may be out of range, do you have enough GPUs?", 1),
    Variant("gpu_count", "n1:9:9 [1] init.cc:902 NCCL WARN Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 5d000", 1),
    Variant("segfault", "Fatal Python error: Segmentation fault\n\nCurrent thread 0x00007f (most recent call first):", 1),
    Variant("segfault", "[2026-11-30 10:00:01,000] [ERROR] [launch.py:325:sigkill_handler] ['python3', 'train.py'] exits with return code = -11", 1),
    Variant("segfault", "[n1:4711] *** Process received signal ***\n[n1:4711] Signal: Segmentation fault (11)", 2),
    Variant("segfault", "srun: error: gpu-7: task 3: Segmentation fault (core dumped)", 1),
    # DeepSpeed
    Variant("ds_config", "AssertionError: Gradient accumulation steps: 0 has to be greater than 0", 1),
    Variant("ds_config", "pydantic_core._pydantic_core.ValidationError: 1 validation error for DeepSpeedZeroConfig\nstage\n  Input should be less than or equal to 3", 1),
    Variant("ds_launcher_host", "[2026-11-30 10:00:00,000] [WARNING] [runner.py:214:fetch_hostfile] Unable to find hostfile, will proceed with training with local resources only.", 1),
    Variant("ds_launcher_host", "ssh: connect to host n2 port 22: Connection refused", 1, action="retry"),
    Variant("ds_launcher_host", "ssh: connect to host n2 port 22: No route to host\npdsh@n1: n2: ssh exited with exit code 255", 1, action="retry"),
    Variant("ds_launcher_ssh", "Host key verification failed.\npdsh@n1: n2: ssh exited with exit code 255", 1),
    Variant("fp16_scale_min", "Exception: Current loss scale already at minimum - cannot decrease scale anymore. Exiting run.", 1),
    Variant("loss_nan", "RuntimeError: Function 'MulBackward0' returned nan values in its 0th output.", 1),
    Variant("loss_nan", "AssertionError: Rank 3: found NaN in local grad norm in backward pass before data-parallel communication collective. Device: 3, node: n1", 1, 3),
    # Checkpoints, tokenizers, data
    Variant("ckpt_corrupt", "safetensors_rust.SafetensorError: Error while deserializing header: HeaderTooLarge", 1),
    Variant("ckpt_corrupt", "OSError: Unable to load weights from pytorch checkpoint file for '/m/pytorch_model-1.bin' at '/m/pytorch_model-1.bin'. If you tried to load a PyTorch model from a TF 2.0 checkpoint, please set from_tf=True.", 1),
    Variant("ckpt_corrupt", "RuntimeError: unexpected EOF, expected 2123456 more bytes. The file might be corrupted.", 1),
    Variant("ckpt_corrupt", "_pickle.UnpicklingError: invalid load key, 'v'.", 1),
    Variant("ckpt_weights_only", "[rank0]: _pickle.UnpicklingError: Weights only load failed. This file can still be loaded, to do so you have two options, \x1b[1mdo those steps only if you trust the source of the checkpoint\x1b[0m.", 1, 0),
    Variant("ckpt_weights_only", "ValueError: Due to a serious vulnerability issue in `torch.load`, even with `weights_only=True`, we now require users to upgrade torch to at least v2.6 in order to use the function.", 1),
    Variant("ckpt_missing_latest", "FileNotFoundError: [Errno 2] No such file or directory: '/runs/a/checkpoint-40/trainer_state.json'", 1),
    Variant("ckpt_world_size", "deepspeed.runtime.zero.utils.ZeRORuntimeException: The checkpoint being loaded used a DP world size of 16 but the current world size is 8. Automatic adjustment of ZeRO's optimizer state partitioning with a new world size is not currently supported.", 1),
    Variant("data_bad_record", "json.decoder.JSONDecodeError: Expecting ',' delimiter: line 1 column 88 (char 87)", 1),
    Variant("data_bad_record", "pyarrow.lib.ArrowInvalid: Could not convert 'x' with type str: tried to convert to int64\n\nThe above exception was the direct cause of the following exception:\n\ndatasets.exceptions.DatasetGenerationError: An error occurred while generating the dataset", 1),
    Variant("data_bad_record", "datasets.exceptions.DatasetGenerationCastError: An error occurred while generating the dataset\n\nAll the data files must have the same columns, but at some point there are 1 new columns ({'meta'})", 1),
    Variant("data_bad_record", "PIL.UnidentifiedImageError: cannot identify image file <_io.BytesIO object at 0x7f>", 1),
    Variant("data_empty", "IndexError: Invalid key: 0 is out of bounds for size 0", 1),
    Variant("data_empty", "RuntimeError: Cannot find valid samples, check `data/README.md` for the data format.", 1),
    Variant("data_empty", "ValueError: No columns in the dataset match the model's forward method signature. The following columns have been ignored: [text].", 1),
    Variant("data_too_long", "Token indices sequence length is longer than the specified maximum sequence length for this model (3122 > 1024). Running this sequence through the model will result in indexing errors\nIndexError: index out of range in self", 2),
    # Hub, environment, user code
    Variant("hub_auth", "huggingface_hub.errors.RepositoryNotFoundError: 401 Client Error. (Request ID: Root=1-x)\n\nRepository Not Found for url: https://huggingface.co/ann/x/resolve/main/config.json.", 1),
    Variant("hub_auth", "OSError: You are trying to access a gated repo.\nMake sure to have access to it at https://huggingface.co/ann/x.", 1),
    Variant("hub_auth", "OSError: ann/x is not a local folder and is not a valid model identifier listed on 'https://huggingface.co/models'", 1),
    Variant("hub_auth", "huggingface_hub.errors.HFValidationError: Repo id must be in the form 'repo_name' or 'namespace/repo_name': '/models/qwen'. Use `repo_type` argument if needed.", 1),
    Variant("hub_transient", "huggingface_hub.errors.HfHubHTTPError: 504 Server Error: Gateway Time-out for url: https://huggingface.co/api/models/ann/x", 1),
    Variant("hub_unreachable", "requests.exceptions.SSLError: HTTPSConnectionPool(host='huggingface.co', port=443): Max retries exceeded with url: /x (Caused by SSLError(1))", 1),
    Variant("import_abi", "[rank0]: ModuleNotFoundError: No module named 'flash_attn'", 1, 0),
    Variant("import_abi", "AttributeError: module 'torch.distributed' has no attribute 'device_mesh'", 1),
    Variant("import_abi", "ValueError: numpy.dtype size changed, may indicate binary incompatibility. Expected 96 from C header, got 88 from PyObject", 1),
    Variant("import_abi", "/usr/lib/x86_64-linux-gnu/libstdc++.so.6: version `GLIBCXX_3.4.32' not found (required by /opt/x.so)", 1),
    Variant("import_abi", "ImportError: Using `bitsandbytes` 4-bit quantization requires bitsandbytes: `pip install -U bitsandbytes>=0.46.1`", 1),
    Variant("user_code", "[rank2]: TypeError: Trainer.__init__() got an unexpected keyword argument 'tokenizer'", 1, 2),
    Variant("user_code", "train.py: error: unrecognized arguments: --lr 1", 1),
    Variant("user_code", "RuntimeError: mat1 and mat2 shapes cannot be multiplied (8x128 and 64x32)", 1),
    Variant("user_code", "RuntimeError: Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cuda:1!", 1),
    Variant("user_code", "hydra.errors.ConfigCompositionException: Could not override 'a.b'", 1),
    Variant("user_code", "omegaconf.errors.ConfigAttributeError: Key 'lr' is not in struct", 1),
    Variant("user_code", "yaml.scanner.ScannerError: mapping values are not allowed here", 1),
    Variant("user_code", "RuntimeError: Inplace update to inference tensor outside InferenceMode is not allowed.", 1),
    Variant("user_code", "torch._dynamo.exc.Unsupported: call_function args", 1),
    Variant("preempted", "[2026-11-30 10:00:00,000] torch.distributed.elastic.agent.server.api: [WARNING] Received Signals.SIGTERM death signal, shutting down workers\ntorch.distributed.elastic.multiprocessing.api.SignalException: Process 77 got signal: 15", 1),
    Variant("preempted", "slurmstepd: error: *** STEP 991.0 ON gpu-7 CANCELLED AT 2026-11-30T10:00:00 DUE TO NODE FAILURE, SEE SLURMCTLD LOG FOR DETAILS ***", 1),
    Variant("preempted", "Warning  Preempted  3s  default-scheduler  Preempted by pod 77 on node gpu-7", 1),
    Variant("preempted", "The node was low on resource: ephemeral-storage. Pod was evicted from node gpu-7", 1),
)
