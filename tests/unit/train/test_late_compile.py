"""`torch.compile` of imported modules is put off, and does the same once it is called."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from launcher.train.forkserver import may_compile

_PROGRAM = """
import sys
import torch
from launcher.train.late_compile import compile_when_called

graphs = []

def backend(module, inputs):
    graphs.append(module)
    return module.forward

compile_now = torch.compile
with compile_when_called():
    @torch.compile(backend=backend, fullgraph=True)
    def inner(x):
        '''inside'''
        return x + 1

    @torch.compile(backend=backend, fullgraph=True)
    def outer(x):
        return inner(x) * 2

    module = torch.compile(torch.nn.Linear(2, 2), backend=backend)
assert torch.compile is compile_now
assert inner.__doc__ == "inside" and outer.__name__ == "outer"
assert not graphs
x = torch.arange(3.0)
assert outer(x).tolist() == [2.0, 4.0, 6.0], outer(x)
assert len(graphs) == 1, "outer is one graph, with inner in it"
assert inner(x).tolist() == [1.0, 2.0, 3.0] and len(graphs) == 2
assert type(module).__name__ == "OptimizedModule", "what is no function is compiled as ever"
"""


@pytest.mark.slow
def test_a_function_is_compiled_at_its_first_call_with_those_that_it_calls():
    ran = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 0, ran.stderr


_IMPORTS = """
import sys
from launcher.train.forkserver import import_stack
import_stack(sys.argv[1])
print("torch._inductor.compile_fx" in sys.modules)
"""


def _spec(folder: Path, method: str, optimizer: str) -> str:
    path = folder / "spec.json"
    path.write_text(json.dumps({"config": {"method": method, "training": {"optim": optimizer}}, "ds_config": {}}))
    return str(path)


@pytest.mark.slow
def test_the_training_stack_is_imported_without_inductor_where_no_step_compiles(tmp_path):
    spec = _spec(tmp_path, "lora", "adamw_torch")
    ran = subprocess.run(
        [sys.executable, "-c", _IMPORTS, spec], capture_output=True, text=True, timeout=300, check=True
    )
    assert ran.stdout.splitlines()[-1] == "False"


@pytest.mark.parametrize(
    ("method", "optimizer", "compiles"),
    [("full", "adamw_torch", False), ("qlora", "adamw_torch", True), ("full", "adamw_bnb_8bit", True)],
)
def test_what_steps_compile_is_known_from_the_spec(tmp_path, method, optimizer, compiles):
    assert may_compile(_spec(tmp_path, method, optimizer)) is compiles


def test_without_a_spec_everything_may_be_compiled():
    assert may_compile("")
