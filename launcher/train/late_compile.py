"""`torch.compile` at a module's top level, put off until the function is called.

DeepSpeed (Muon) and bitsandbytes decorate functions with it that most jobs never call. The decoration alone imports
TorchInductor: of the training stack's imports that is a fifth of the time.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def compile_when_called() -> Iterator[None]:
    """What is decorated meanwhile is compiled once one of these functions is called: then all of them, because one that
    is compiled may call another, and what is traced must not compile."""
    import torch

    compile_now = torch.compile
    put_off: list[Callable[[], None]] = []

    def compile_later(model: Any = None, **options: Any) -> Any:
        if model is None:
            return functools.partial(compile_later, **options)
        if not inspect.isfunction(model):
            return compile_now(model, **options)
        compiled: Any = None

        def compile_this() -> None:
            nonlocal compiled
            compiled = compile_now(model, **options)

        @functools.wraps(model)
        def call(*args: Any, **kwargs: Any) -> Any:
            while put_off:
                put_off.pop()()
            return compiled(*args, **kwargs)

        put_off.append(compile_this)
        return call

    torch.compile = compile_later
    try:
        yield
    finally:
        torch.compile = compile_now
