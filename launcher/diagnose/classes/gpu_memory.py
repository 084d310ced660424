"""GPU memory ran out: while loading, in forward or backward, in the optimizer, or inside NCCL."""

from __future__ import annotations

from collections.abc import Mapping

from launcher.diagnose.fault import Fault
from launcher.i18n import Text

# torch >= 2.1 and the older form; "more than 1EB" is a corrupted size after a desync, not a shortage.
_OOM = (
    r"(?:CUDA|HIP) out of memory\. Tried to allocate (?!more than 1EB)(?P<asked>[\d.]+ \w+)"
    r"(?:(?:\. | \()GPU (?P<gpu>\d+)(?: has a total capacity of |; )(?P<total>[\d.]+ \w+)"
    r"(?: of which (?P<free>[\d.]+ \w+) is free\.(?: Including non-PyTorch memory, this process has "
    r"(?P<own>[\d.]+ \w+) memory in use\.(?: Of the allocated memory (?P<allocated>[\d.]+ \w+))?)?)?)?",
    r"CUDA out of memory\. Allocation was preemptively rejected .{0,120}Requested size: (?P<asked>\S+)",
    r"expandable_segments: memory mapping failed with OOM on device (?P<gpu>\d+)",
    r"(?:CUDA|HIP|NPU) out of memory\.(?! Tried| Allocation)",
)
_STEP_FRAMES = (
    r"optimizer\.step\(|initialize_optimizer_states|exp_avg|_init_group|_multi_tensor_adam|torch/optim/(?!lr_)"
)
_FORWARD_FRAMES = (
    r"in forward\b|compute_loss|in training_step|_engine_run_backward|\.backward\(|cross_entropy|loss_function|"
    r"in _call_impl|in _wrapped_call_impl"
)
_LOAD_FRAMES = (
    r"from_pretrained|_load_pretrained_model|set_module_tensor_to_device|_move_model_to_device|_broadcast_model|"
    r"Loading (?:checkpoint shards|weights): +\d{1,2}%|in _apply\b|module\.to\(|model\.to\(|load_state_dict|"
    r"prepare_model"
)
_FOREIGN_SHARE = 0.25
_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


def _bytes(text: str) -> float:
    number, unit = text.split()
    return float(number) * _UNITS.get(unit, 1)


def someone_else_holds_it(values: Mapping[str, str]) -> bool:
    """Total minus free minus our own is what other processes hold; the message prints all three."""
    if not all(values.get(name) for name in ("total", "free", "own")):
        return False
    total, free, own = (_bytes(values[name]) for name in ("total", "free", "own"))
    own = max(own, _bytes(values.get("allocated", "0 bytes")))  # NVML cannot see our own use in some containers
    return total - free - own > _FOREIGN_SHARE * total


FAULTS: tuple[Fault, ...] = (
    Fault(
        cls="cuda_oom_load",
        action="adjust:nproc_per_node",
        errors=_OOM,
        applies=someone_else_holds_it,
        cause=Text(
            "{where}: another process holds GPU {gpu} ({free} of {total} free, ours uses {own}): a left-over "
            "process, or two ranks on one card.",
            "{where}：GPU {gpu} 被其他进程占用（共 {total}，仅剩 {free}，本进程只用了 {own}）：有残留进程，或两个 "
            "rank 用了同一张卡。",
        ),
        remedy=Text(
            "Look with `nvidia-smi`: end the left-over process, or give each rank its own card "
            "(cluster.nproc_per_node not above the number of visible GPUs).",
            "用 `nvidia-smi` 查看：结束残留进程，或保证每个 rank 独占一张卡（cluster.nproc_per_node 不超过可见 GPU "
            "数）。",
        ),
    ),
    Fault(
        cls="cuda_oom_optimizer",
        action="adjust:optimizer_memory",
        errors=_OOM,
        near=_STEP_FRAMES,
        cause=Text(
            "{where}: GPU memory ran out while the optimizer's states were made (asked for {asked}).",
            "{where}：创建优化器状态时显存不足（申请 {asked}）。",
        ),
        remedy=Text(
            "Shard or move the states: deepspeed.stage: 2 or 3, deepspeed.offload_optimizer: true, or "
            "training.optim: adamw_bnb_8bit; LoRA needs far less than full fine-tuning.",
            "切分或转移优化器状态：deepspeed.stage: 2 或 3，deepspeed.offload_optimizer: true，或 training.optim: "
            "adamw_bnb_8bit；LoRA 所需显存远小于全量微调。",
        ),
    ),
    Fault(
        cls="cuda_oom_forward",
        action="adjust:batch_size",
        errors=_OOM,
        near=_FORWARD_FRAMES,
        cause=Text(
            "{where}: GPU memory ran out in forward or backward (asked for {asked}).",
            "{where}：前向或反向计算时显存不足（申请 {asked}）。",
        ),
        remedy=Text(
            "Halve training.per_device_train_batch_size and double training.gradient_accumulation_steps; then "
            "training.gradient_checkpointing: true; then a smaller data.max_length (if it came late, a long sample "
            "did it).",
            "将 training.per_device_train_batch_size 减半并将 training.gradient_accumulation_steps 加倍；再开启 "
            "training.gradient_checkpointing: true；再减小 data.max_length（若训练一段时间后才出现，"
            "多半是长样本所致）。",
        ),
    ),
    Fault(
        cls="cuda_oom_load",
        action="adjust:model_memory",
        errors=_OOM,
        near=_LOAD_FRAMES,
        cause=Text(
            "{where}: the model does not fit on the GPU while it is loaded (asked for {asked}).",
            "{where}：加载模型时显存放不下（申请 {asked}）。",
        ),
        remedy=Text(
            "Use method: qlora, or deepspeed.stage: 3, or a card with more memory. If the card should be empty, "
            "look for a left-over process with `nvidia-smi`.",
            "使用 method: qlora，或 deepspeed.stage: 3，或换更大显存的卡。若该卡本应空闲，请用 `nvidia-smi` "
            "检查残留进程。",
        ),
    ),
    Fault(
        cls="cuda_oom_load",
        action="adjust:model_memory",
        errors=(r"Some modules are dispatched on the CPU or the disk",),
        cause=Text(
            "{where}: the quantized model does not fit on the GPU: parts of it would have to live in host memory.",
            "{where}：量化后的模型仍放不进显存：部分模块会被放到主机内存。",
        ),
        remedy=Text(
            "Use a card with more memory or a smaller model; look with `nvidia-smi` whether something else holds the "
            "card.",
            "换更大显存的卡或更小的模型；并用 `nvidia-smi` 检查该卡是否被其他进程占用。",
        ),
    ),
    Fault(
        cls="cuda_oom_forward",
        action="adjust:batch_size",
        errors=_OOM,
        cause=Text("{where}: GPU memory ran out (asked for {asked}).", "{where}：显存不足（申请 {asked}）。"),
        remedy=Text(
            "Halve training.per_device_train_batch_size and double training.gradient_accumulation_steps; then "
            "training.gradient_checkpointing: true; then a smaller data.max_length.",
            "将 training.per_device_train_batch_size 减半并将 training.gradient_accumulation_steps 加倍；再开启 "
            "training.gradient_checkpointing: true；再减小 data.max_length。",
        ),
    ),
    Fault(
        cls="cuda_oom_nccl",
        action="adjust:model_memory",
        errors=(
            r"Cuda failure (?:\d+ )?'out of memory'",
            r"Failed to CUDA (?:host )?calloc(?: async)? (?P<asked>\d+) bytes",
        ),
        cause=Text(
            "{where}: NCCL could not get GPU memory for its buffers; PyTorch had filled the card.",
            "{where}：NCCL 申请不到显存缓冲区；显存已被 PyTorch 占满。",
        ),
        remedy=Text(
            "Leave 1 to 2 GiB free on each card: a smaller batch, deepspeed.stage one higher, or method: qlora. "
            "Setting NCCL_BUFFSIZE lower in env helps a little.",
            "每张卡预留 1 到 2 GiB：减小 batch，提高一级 deepspeed.stage，或使用 method: qlora。在 env 中调小 "
            "NCCL_BUFFSIZE 也略有帮助。",
        ),
    ),
    Fault(
        cls="cuda_oom_load",
        action="adjust:model_memory",
        vague=(
            r"(?:CUDA error|cuda runtime error \(2\) ?|Triton Error \[CUDA\]): out of memory",
            r"CUDA_ERROR_OUT_OF_MEMORY|cudaErrorMemoryAllocation|hipErrorOutOfMemory",
        ),
        cause=Text(
            "{where}: the driver had no GPU memory left, outside PyTorch's own pool: the card is held by another "
            "process, or is ill.",
            "{where}：驱动层显存不足（不在 PyTorch 显存池内）：该卡被其他进程占用，或者硬件异常。",
        ),
        remedy=Text(
            "Look at the card with `nvidia-smi`: end left-over processes. If it is empty and this comes back, "
            "exclude the node.",
            "用 `nvidia-smi` 检查该卡并结束残留进程；若卡是空的且再次出现，请排除该节点。",
        ),
    ),
)
