"""Every fault that ftlaunch can name. Classes are those of docs/faults; order decides between entries on one line.

To add one: an entry in the module of its field, and its log in tests/unit/diagnose/fault_examples.py.
"""

from __future__ import annotations

from launcher.diagnose.classes import environment, files, gpu, gpu_memory, network, training
from launcher.diagnose.fault import Fault
from launcher.i18n import Text

CATALOGUE: tuple[Fault, ...] = (
    *environment.HUB,
    *network.PIPES,
    *gpu_memory.FAULTS,
    *files.FAULTS,
    *training.FAULTS,
    *gpu.FAULTS,
    *network.FAULTS,
    *environment.FAULTS,
)

UNKNOWN = Fault(
    cls="unknown",
    action="retry",
    cause=Text(
        "{where} ended ({exit}) and left no line that names a cause.",
        "{where} 已退出（{exit}），没有留下任何能说明原因的日志。",
    ),
    remedy=Text(
        "Read the end of its log and the kernel log of that node (`dmesg -T`). If it happens again at the same "
        "step, treat it as a bug of the program, not of the machine.",
        "请查看该 rank 日志的末尾和该节点的内核日志（`dmesg -T`）。如果在同一步再次出现，请按程序缺陷处理，"
        "而不是机器问题。",
    ),
)

EXITED = Fault(
    cls="user_code",
    action="stop",
    cause=Text(
        "{where} ended by itself ({exit}) without printing an exception.",
        "{where} 自行退出（{exit}），没有打印任何异常。",
    ),
    remedy=Text(
        "Look for `sys.exit` or an option the program refuses; run the command by hand on one node to see its message.",
        "请检查程序中的 `sys.exit` 或不被接受的命令行参数；可在单个节点上手动运行该命令查看输出。",
    ),
)

KILLED_FROM_OUTSIDE = Fault(
    cls="unknown",
    action="retry",
    cause=Text(
        "{where} was killed from outside with SIGKILL; nothing shows that the kernel did it for memory.",
        "{where} 被外部以 SIGKILL 杀死；没有迹象表明是内核因内存不足所为。",
    ),
    remedy=Text(
        "Nothing in the job needs to change. If it repeats, ask who sends it: the scheduler, a node agent, or a "
        "person.",
        "作业本身无需修改。如果反复出现，请查明是谁发出的信号：调度器、节点代理，还是人工操作。",
    ),
)


def exit_faults() -> dict[int, Fault]:
    """The fault that a signal stands for when nothing else was printed."""
    return {signal: fault for fault in CATALOGUE for signal in fault.signals}
