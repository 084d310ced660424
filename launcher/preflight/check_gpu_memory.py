"""Will a step fit on the card: the forecast that `ftlaunch plan` shows, against the smallest card that ranks get."""

from __future__ import annotations

from launcher.i18n import Text
from launcher.preflight.finding import Finding, Severity, show_bytes
from launcher.preflight.inputs import PreflightInputs


def check_gpu_memory(inputs: PreflightInputs) -> tuple[Finding, ...]:
    """An error only where what is there all the time is too much for the card: activations are forecast for rows of
    data.max_length tokens, and the data's own rows may all be shorter."""
    needed, states = inputs.gpu_needed_bytes, inputs.gpu_states_bytes
    if inputs.device != "cuda" or not inputs.visible or needed is None or states is None:
        return ()
    smallest = min(gpu.memory_total_bytes for gpu in inputs.visible)
    measured, bound = f"{show_bytes(needed)} at the peak of a step", f"<= {show_bytes(smallest)}"
    if needed <= smallest:
        return (Finding("gpu.memory", Severity.OK, measured, bound, Text("fits", "可容纳")),)
    remedy = Text(
        "in this order: training.per_device_train_batch_size: 1 with more gradient_accumulation_steps, a smaller "
        "data.max_length, deepspeed.stage: 3, deepspeed.offload_optimizer: true, method: qlora, more or larger cards; "
        "`ftlaunch plan` shows what each stage needs",
        "依次尝试：training.per_device_train_batch_size: 1 并增大 gradient_accumulation_steps，减小 "
        "data.max_length，deepspeed.stage: 3，deepspeed.offload_optimizer: true，method: qlora，更多或更大的卡；"
        "`ftlaunch plan` 会显示各 stage 所需显存",
    )
    if states > smallest:
        message = Text(
            f"weights, optimizer and CUDA alone take {show_bytes(states)} of each card: loading or the first step runs "
            "out of memory",
            f"仅权重、优化器和 CUDA 本身在每块卡上就需要 {show_bytes(states)}：加载时或第一步就会显存不足",
        )
        return (Finding("gpu.memory", Severity.ERROR, measured, bound, message, remedy),)
    message = Text(
        "a micro-batch of rows of data.max_length tokens does not fit; shorter rows may",
        "长度为 data.max_length 的一个 micro-batch 放不下；较短的样本也许可以",
    )
    return (Finding("gpu.memory", Severity.WARNING, measured, bound, message, remedy),)
