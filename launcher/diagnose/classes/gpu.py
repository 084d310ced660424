"""GPU hardware, driver, and errors of CUDA programs. Xid numbers: NVIDIA's Xid catalogue."""

from __future__ import annotations

from launcher.diagnose.fault import Fault
from launcher.i18n import Text

_OTHER_NODE = Text(
    "Run it again without this node. Have the card drained and reset or replaced (`nvidia-smi -q`, `dmesg | grep -i "
    "xid`).",
    "请排除该节点后重新运行。请对该卡做下线、复位或更换（`nvidia-smi -q`、`dmesg | grep -i xid`）。",
)


def _xid(*codes: str) -> str:
    """The kernel's line for these Xid numbers, and its echo "caused by previous Xid N"."""
    any_of = "|".join(codes)
    return rf"NVRM: Xid \([^)]*\): (?:{any_of}),|caused by previous Xid (?:{any_of})\b"


FAULTS: tuple[Fault, ...] = (
    Fault(
        cls="gpu_ecc",
        action="retry_excluding_node",
        kernel=(_xid("48", "63", "64", "92", "94", "95", "140", "171", "172"),),
        errors=(r"uncorrectable ECC error", r"cudaErrorECCUncorrectable", r"CUDA_ERROR_ECC_UNCORRECTABLE"),
        cause=Text(
            "{where}: a GPU's memory has an error that ECC cannot correct: the card is at fault, not the program.",
            "{where}：GPU 显存出现 ECC 无法纠正的错误：是硬件故障，不是程序问题。",
        ),
        remedy=_OTHER_NODE,
    ),
    Fault(
        cls="gpu_off_bus",
        action="retry_excluding_node",
        kernel=(_xid("79"), r"fallen off the bus"),
        errors=(r"Unable to determine the device handle for [gG][pP][uU]", r"GPU is lost\b"),
        cause=Text(
            "{where}: a GPU has fallen off the PCI bus; the host can no longer reach it.",
            "{where}：GPU 已从 PCI 总线掉卡，主机无法再访问。",
        ),
        remedy=_OTHER_NODE,
    ),
    Fault(
        cls="nvlink_error",
        action="retry_excluding_node",
        kernel=(
            _xid("74", "14[4-9]", "150"),
            r"SXid \([^)]*\): \d+, (?:Fatal|Non-fatal)",
        ),
        errors=(
            r"uncorrectable NVLink error",
            r"P2P is disabled between NVLINK connected GPUs",
            r"NVSwitch (?:non-)?fatal error",
            r"Nvlink.{0,40}(?:fatal|link is down)",
        ),
        cause=Text("{where}: an NVLink or NVSwitch link failed.", "{where}：NVLink 或 NVSwitch 链路故障。"),
        remedy=_OTHER_NODE,
    ),
    Fault(
        cls="gpu_unhealthy",
        action="retry_excluding_node",
        kernel=(
            _xid("32", "38", "46", "54", "61", "62", "69", "110", "119", "12[0-6]", "143", "15[4-8]"),
            r"GPU recovery action changed from",
            r"NVRM: (?:GPU \S+ )?RmInitAdapter failed",
        ),
        errors=(
            r"CUDA error: unknown error|CUDA unknown error|CUDA_ERROR_UNKNOWN|cuda runtime error \(30\)",
            r"CUDA-capable device\(s\) is/are busy or unavailable|cudaErrorDevicesUnavailable",
            r"CUDA error: (?:initialization error|hardware stack error)|cudaErrorHardwareStackError",
            r"CUDA error: system not yet initialized|cuda runtime error \(802\)|Error 802: system not yet initialized",
            r"\bGPU [Hh]ang\b|HW Exception by GPU node|[Gg][Pp][Uu] requires reset",
        ),
        cause=Text(
            "{where}: a GPU, its firmware or its driver is in a bad state.",
            "{where}：GPU、其固件或驱动处于异常状态。",
        ),
        remedy=_OTHER_NODE,
    ),
    Fault(
        cls="gpu_unhealthy",
        action="retry_excluding_node",
        vague=(r"NVRM: Xid \([^)]*\): 31,",),
        near=r"NVRM: Xid \([^)]*\): 43,",
        cause=Text(
            "{where}: a GPU faulted on a memory access and stopped (Xid 31 with 43), and no rank printed an error "
            "of its own.",
            "{where}：GPU 访存出错后停止工作（Xid 31 与 43），且没有任何 rank 打印自身错误。",
        ),
        remedy=_OTHER_NODE,
    ),
    Fault(
        cls="cuda_illegal_memory",
        action="stop",
        vague=(
            r"NVRM: Xid \([^)]*\): 31, pid=(?P<pid>\d+),[^\n]*faulted @ (?P<at>\S+)\."
            r"(?=[\s\S]{0,20000}?Xid \([^)]*\): 31, pid=(?!(?P=pid)\b)\d+,[^\n]*faulted @ (?P=at)\.)",
        ),
        cause=Text(
            "{where}: two processes after each other faulted at the same GPU address ({at}): the program does it, not "
            "the card.",
            "{where}：先后两个进程在同一 GPU 地址（{at}）出错：是程序问题，不是显卡问题。",
        ),
        remedy=Text(
            "Run with env.CUDA_LAUNCH_BLOCKING: 1 to see the frame; suspect custom kernels (flash-attn, triton, "
            "bitsandbytes) first.",
            "设置 env.CUDA_LAUNCH_BLOCKING: 1 运行以查看调用栈；"
            "优先怀疑自定义核函数（flash-attn、triton、bitsandbytes）。",
        ),
    ),
    Fault(
        cls="cuda_illegal_memory",
        action="retry",
        errors=(
            r"an illegal memory access was encountered|CUDA_ERROR_ILLEGAL_ADDRESS",
            r"(?:CUDA error|Triton Error \[CUDA\]): misaligned address|an illegal instruction was encountered",
            r"Warp Illegal Address|cudaErrorIllegalAddress",
            r"Memory access fault by GPU node",
        ),
        vague=(r"NVRM: Xid \([^)]*\): (?:13|31),",),
        cause=Text(
            "{where}: a GPU kernel accessed memory that is not its own; once may be chance, at the same step it is "
            "a bug.",
            "{where}：GPU 核函数访问了非法显存；一次可能是偶然，若总在同一步则是程序缺陷。",
        ),
        remedy=Text(
            "Run it again once. If it comes back at the same step: run with env.CUDA_LAUNCH_BLOCKING: 1 to see the "
            "real frame, and suspect custom kernels (flash-attn, triton, bitsandbytes) first.",
            "先重新运行一次。若在同一步再次出现：设置 env.CUDA_LAUNCH_BLOCKING: 1 查看真实调用栈，"
            "优先怀疑自定义核函数（flash-attn、triton、bitsandbytes）。",
        ),
    ),
    Fault(
        cls="cuda_launch_failure",
        action="retry",
        kernel=(_xid("8", "109"),),
        errors=(
            r"unspecified launch failure|CUDA_ERROR_LAUNCH_FAILED",
            r"the launch timed out and was terminated|CUDA_ERROR_LAUNCH_TIMEOUT",
        ),
        cause=Text("{where}: a GPU kernel failed or hung.", "{where}：GPU 核函数执行失败或卡死。"),
        remedy=Text(
            "Run it again once. If the same card fails again, exclude its node; if every card does, suspect the "
            "kernel (CUDA_LAUNCH_BLOCKING=1).",
            "先重新运行一次。若同一张卡再次失败，请排除该节点；若每张卡都失败，"
            "则怀疑核函数（CUDA_LAUNCH_BLOCKING=1）。",
        ),
    ),
    Fault(
        cls="device_assert_index",
        action="stop",
        errors=(
            r"Assertion `?(?:srcIndex < srcSelectDimSize|dstIndex < dstAddDimSize|ind >= ?0 && ind < |"
            r"-sizes\[i\] <= index|idx_dim >= 0|index >= -sizes|idx >= 0|input\[.{0,20}\] >= 0)",
            r"index out of bounds\"?`? failed|index out of bounds: 0 <= \w+ < ",
            r"IndexError: index out of range in self",
        ),
        vague=(r"device-side assert triggered|cudaErrorAssert\b",),
        cause=Text(
            "{where}: an index is outside its table: most often a token id not below the embedding's rows "
            "(tokenizer and model do not fit), or a position beyond the model's length.",
            "{where}：索引越界：通常是 token id 不小于词表嵌入行数（分词器与模型不匹配），或位置超过模型最大长度。",
        ),
        remedy=Text(
            "Use the tokenizer of this very model, call resize_token_embeddings after adding tokens, keep "
            "data.max_length within max_position_embeddings. The Python frame is asynchronous: trust the assertion.",
            "使用与模型配套的分词器；新增 token 后调用 resize_token_embeddings；data.max_length 不超过 "
            "max_position_embeddings。Python 调用栈是异步的，请以断言文本为准。",
        ),
    ),
    Fault(
        cls="device_assert_label",
        action="stop",
        errors=(
            r"Assertion `?(?:t >= 0 && t < n_classes|cur_target >= 0|target_val >= zero|input_val >= (?:zero|0))",
            r"IndexError: Target -?\d+ is out of bounds",
        ),
        cause=Text(
            "{where}: a label is outside 0 .. number of classes - 1 (and is not the ignored -100).",
            "{where}：标签不在 0 到 类别数-1 的范围内（且不是被忽略的 -100）。",
        ),
        remedy=Text(
            "Check the labels and num_labels; for language models the labels are token ids below the vocabulary "
            "size, or -100.",
            "检查标签和 num_labels；语言模型的标签应为小于词表大小的 token id，或 -100。",
        ),
    ),
    Fault(
        cls="device_assert_prob",
        action="stop",
        errors=(
            r"probability tensor contains either `?inf`?, `?nan`? or element < 0",
            r"Assertion `?(?:cumdist\[size - 1\] > |probability tensor)",
            r"invalid multinomial distribution",
            r"Assertion `?(?:!\(?isnan|p >= 0|val >= zero)",
        ),
        cause=Text(
            "{where}: sampling met probabilities that are nan, inf or negative: the weights or the logits "
            "overflowed before.",
            "{where}：采样时概率为 nan、inf 或负数：权重或 logits 之前已溢出。",
        ),
        remedy=Text(
            "Use precision: bf16 instead of fp16, check that the loaded weights are finite, lower "
            "training.learning_rate.",
            "用 precision: bf16 代替 fp16，检查加载的权重是否有限，降低 training.learning_rate。",
        ),
    ),
    Fault(
        cls="cublas_cudnn",
        action="adjust:batch_size",
        errors=(
            r"CUBLAS_STATUS_(?:NOT_INITIALIZED|ALLOC_FAILED)",
            r"CUDNN_STATUS_(?:NOT_INITIALIZED|ALLOC_FAILED)",
            r"Unable to find a valid cuDNN algorithm|was unable to find an engine to execute this computation",
        ),
        cause=Text(
            "{where}: cuBLAS or cuDNN could not start, mostly because no GPU memory was left for its workspace.",
            "{where}：cuBLAS 或 cuDNN 无法初始化，多半是没有剩余显存作为工作区。",
        ),
        remedy=Text(
            "Halve training.per_device_train_batch_size (double the accumulation). If memory was free, run once "
            "with CUDA_LAUNCH_BLOCKING=1: an earlier device assert can look like this.",
            "将 training.per_device_train_batch_size 减半（累积步数加倍）。若显存充足，请用 CUDA_LAUNCH_BLOCKING=1 "
            "运行一次：更早的设备断言也会表现成这样。",
        ),
    ),
    Fault(
        cls="cublas_cudnn",
        action="retry",
        errors=(
            r"CUBLAS_STATUS_(?:EXECUTION_FAILED|INTERNAL_ERROR)",
            r"CUDNN_STATUS_(?:EXECUTION_FAILED|INTERNAL_ERROR)\w*",
        ),
        cause=Text(
            "{where}: cuBLAS or cuDNN failed while it ran: the driver, the card, or an earlier error of this process.",
            "{where}：cuBLAS 或 cuDNN 执行失败：驱动、硬件，或本进程更早的错误所致。",
        ),
        remedy=Text(
            "Run it again once. On the same card again: exclude the node. Everywhere: the CUDA libraries do not fit "
            "the driver.",
            "先重新运行一次。若同一张卡再次出现，请排除该节点；若到处都有，则是 CUDA 库与驱动不匹配。",
        ),
    ),
    Fault(
        cls="cublas_cudnn",
        action="stop",
        errors=(
            r"CUBLAS_STATUS_\w+ when calling",
            r"cuDNN error: CUDNN_\w+",
            r"cu(?:solver|sparse|fft)\w* error: CU\w+",
            r"cublasLt ran into an error|cuBLAS API failed with status \d+",  # bitsandbytes
        ),
        cause=Text(
            "{where}: cuBLAS or cuDNN refused the call: shapes or types it does not support on this card.",
            "{where}：cuBLAS 或 cuDNN 拒绝了该调用：本卡不支持该形状或数据类型。",
        ),
        remedy=Text(
            "Check shapes (empty or not aligned), precision, and that the CUDA libraries in the image are those of "
            "this torch.",
            "检查张量形状（为空或未对齐）、精度设置，以及镜像中的 CUDA 库是否与 torch 配套。",
        ),
    ),
    Fault(
        cls="no_kernel_image",
        action="stop",
        errors=(
            r"no kernel image is available",
            r"cudaErrorNoKernelImageForDevice",
            r"CUDA error: invalid device function",
        ),
        hints=(r"is not compatible with the current PyTorch installation", r"which is of compute capability \(CC\)"),
        cause=Text(
            "{where}: torch, or an extension, was not built for this GPU's architecture.",
            "{where}：torch 或某个扩展没有为该 GPU 架构编译。",
        ),
        remedy=Text(
            "Install a torch build that lists this sm_NN (`torch.cuda.get_arch_list()`), rebuild extensions with "
            "TORCH_CUDA_ARCH_LIST, or use another GPU type.",
            "安装支持该 sm_NN 的 torch（`torch.cuda.get_arch_list()`），用 TORCH_CUDA_ARCH_LIST 重新编译扩展，"
            "或换用其他型号 GPU。",
        ),
    ),
    Fault(
        cls="driver_mismatch",
        action="retry_excluding_node",
        errors=(r"UserWarning: CUDA initialization: The NVIDIA driver on your system is too old",),
        fatal_as_warning=True,
        cause=Text(
            "{where}: this node's NVIDIA driver is older than the CUDA of this image, and torch goes on without a GPU.",
            "{where}：该节点的 NVIDIA 驱动低于镜像中 CUDA 的要求，torch 会在没有 GPU 的情况下继续运行。",
        ),
        remedy=Text(
            "Run it again on nodes with a newer driver (`nvidia-smi` shows it). If all nodes are alike, use an image "
            "whose CUDA fits the driver.",
            "请换到驱动较新的节点运行（用 `nvidia-smi` 查看）。若所有节点都一样，请使用与驱动匹配的 CUDA 镜像。",
        ),
    ),
    Fault(
        cls="driver_mismatch",
        action="stop",
        errors=(
            r"NVIDIA driver on your system is too old",
            r"CUDA driver version is insufficient for CUDA runtime version",
            r"not supported in the installed CUDA driver",
        ),
        cause=Text(
            "{where}: the NVIDIA driver is older than the CUDA that this torch was built for.",
            "{where}：NVIDIA 驱动版本低于 torch 所需的 CUDA 版本。",
        ),
        remedy=Text(
            "Use an image whose CUDA fits the driver, or have the driver updated; where one node only is older, "
            "leave that node out.",
            "使用与驱动匹配的 CUDA 镜像，或升级驱动；若只有个别节点较旧，请排除该节点。",
        ),
    ),
    Fault(
        cls="driver_mismatch",
        action="retry_excluding_node",
        errors=(
            r"forward compatibility was attempted on non supported HW",
            r"Driver/library version mismatch",
            r"couldn't communicate with the NVIDIA driver",
            r"unsupported display driver / cuda driver combination",
            r"Found no NVIDIA driver on your system",
        ),
        cause=Text(
            "{where}: the driver in the kernel and the driver libraries in the container do not fit on this node.",
            "{where}：该节点内核驱动与容器内驱动库不匹配。",
        ),
        remedy=Text(
            "Run it again without this node. On every node: take libcuda of another version out of the image "
            "(/usr/local/cuda/compat, LD_LIBRARY_PATH); after a driver update the node needs a reboot.",
            "请排除该节点后重新运行。若所有节点都如此：移除镜像内其他版本的 libcuda（/usr/local/cuda/compat、"
            "LD_LIBRARY_PATH）；驱动升级后节点需要重启。",
        ),
    ),
    Fault(
        cls="bf16_unsupported",
        action="adjust:precision",
        errors=(
            r"Your setup doesn't support bf16",
            r"[Bb][Ff](?:loat)?16 (?:is|are) (?:only supported|not supported)",
            r"does not support (?:bfloat16|bf16)|(?:device|GPU|card) does not support BF16",
            r"not implemented for '(?:BFloat16|Half)'",
        ),
        cause=Text(
            "{where}: bf16 was asked for, but this card or build has none (or no GPU is visible).",
            "{where}：要求使用 bf16，但该卡或该版本不支持（或没有可见的 GPU）。",
        ),
        remedy=Text(
            "Set precision: auto, or fp16 for cards before Ampere; check that `nvidia-smi` sees the cards at all.",
            "设置 precision: auto，Ampere 之前的卡用 fp16；并确认 `nvidia-smi` 能看到 GPU。",
        ),
    ),
    Fault(
        cls="gpu_count",
        action="adjust:nproc_per_node",
        errors=(
            r"invalid device ordinal",
            r"no CUDA-capable device is detected",
            r"no GPUs found!",
            r"Duplicate GPU detected",
            r"GPU device may be out of range",
        ),
        cause=Text(
            "{where}: there are more ranks on this node than GPUs that they may see.",
            "{where}：该节点的 rank 数多于可见 GPU 数。",
        ),
        remedy=Text(
            "Set cluster.nproc_per_node: auto, or mend CUDA_VISIBLE_DEVICES and the number of GPUs the job asks for.",
            "设置 cluster.nproc_per_node: auto，或修正 CUDA_VISIBLE_DEVICES 及作业申请的 GPU 数。",
        ),
    ),
    Fault(
        cls="gpu_unhealthy",
        action="retry_excluding_node",
        victims=(r"NVRM: Xid \([^)]*\): (?:43|45),",),
        cause=Text(
            "{where}: the GPU stopped a program (Xid 43 or 45): an echo of another fault, which no log shows.",
            "{where}：GPU 终止了程序（Xid 43 或 45）：这是其他故障的回声，但日志中没有原因。",
        ),
        remedy=_OTHER_NODE,
    ),
    Fault(
        cls="segfault",
        action="retry",
        signals=(11, 4, 8),
        vague=(
            r"segfault at [0-9a-f]+ ip",
            r"Unexpected segmentation fault encountered in worker",
            r"Fatal Python error: (?:Segmentation fault|Illegal instruction)",
            r"^Segmentation fault\b|(?:: line \d+: +\d+|tasks? [\d,\-]+:) Segmentation fault\b",
            r"Caught signal 11 \(Segmentation fault|Signal: Segmentation fault \(11\)|exited on signal 11\b",
            r"killed by signal: Segmentation fault",
            r"double free or corruption|free\(\): invalid|munmap_chunk\(\): invalid|malloc\(\): (?:corrupted|invalid)",
            r"corrupted size vs\. prev_size|stack smashing detected",
        ),
        cause=Text(
            "{where}: native code crashed (segmentation fault or illegal instruction); Python could print nothing.",
            "{where}：本地代码崩溃（段错误或非法指令），Python 来不及打印任何信息。",
        ),
        remedy=Text(
            "Run it again once. If every rank crashes at the start, libraries do not fit (one libnccl, one CUDA, "
            "extensions built for this torch); env.PYTHONFAULTHANDLER: 1 prints the frame.",
            "先重新运行一次。若所有 rank 一启动就崩溃，则是库不匹配（只保留一个 libnccl、一个 CUDA，扩展需针对当前 "
            "torch 编译）；设置 env.PYTHONFAULTHANDLER: 1 可打印调用栈。",
        ),
    ),
)
