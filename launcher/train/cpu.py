"""DeepSpeed on plain CPUs: what differs from GPUs."""

from __future__ import annotations


def without_shm_operator() -> None:
    """Keep DeepSpeed from compiling and using its shared-memory all-reduce on CPUs.

    Why: it needs a C++ compiler on the node and half a minute at the first start, and leaves
    `deepspeed_allreduce_buffer_*` in /dev/shm when a rank is killed. gloo does the same sums; on CPUs correctness is
    what counts here.
    """
    import importlib

    # Not `import deepspeed.comm.torch as ...`: that name is the torch library, which the package imports into itself.
    backend = importlib.import_module("deepspeed.comm.torch")
    backend.build_shm_op = lambda: None  # type: ignore[attr-defined]
