"""hostfile and .deepspeed_env as DeepSpeed's own parsers take them."""

from __future__ import annotations

import pytest

from launcher.errors import UserError
from launcher.plan.environment import Variable
from launcher.plan.launch_files import deepspeed_env_text, hostfile_text


def variables(**values: str) -> list[Variable]:
    return [Variable(name, value, "job.yaml") for name, value in values.items()]


def test_one_line_a_node_in_order() -> None:
    assert hostfile_text([("10.0.0.2", 8), ("10.0.0.1", 4)]) == "10.0.0.2 slots=8\n10.0.0.1 slots=4\n"


def test_the_same_address_twice_is_refused() -> None:
    with pytest.raises(UserError, match=r"^gpu-1 and gpu-3 are one machine: both have the address 10\.0\.0\.1"):
        hostfile_text([("10.0.0.1", 8), ("10.0.0.2", 8), ("10.0.0.1", 8)], ["gpu-1", "gpu-2", "gpu-3"])


def test_nothing_but_name_and_value_in_the_environment_file() -> None:
    text = deepspeed_env_text(variables(NCCL_DEBUG="WARN", EMPTY="", EQUALS="a=b=c", SPACES="a b # c"))
    assert text == "NCCL_DEBUG=WARN\nEMPTY=\nEQUALS=a=b=c\nSPACES=a b # c\n"


@pytest.mark.parametrize("value", ["a\nb", "a\rb", "\n", "end\n"])
def test_a_line_break_is_refused_and_the_variable_named(value: str) -> None:
    with pytest.raises(UserError, match=r"env\.BANNER holds a line break"):
        deepspeed_env_text(variables(BANNER=value))


def test_a_line_break_in_what_is_not_written_does_not_matter() -> None:
    assert deepspeed_env_text(variables(OMP_NUM_THREADS="4\n")) == ""


@pytest.mark.parametrize("value", ["a\x0bb", "a\x0cb", "a\x1cb", "a\x85b", "a\u2028b"])
def test_characters_that_only_python_takes_for_line_breaks_stay_in_their_line(value: str) -> None:
    """DeepSpeed reads with `readlines`, which knows \\n alone (and \\r, \\r\\n in text mode)."""
    assert deepspeed_env_text(variables(A=value)).count("\n") == 1


@pytest.mark.parametrize("name", ["CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS"])
def test_what_each_node_sets_for_itself_is_not_exported(name: str) -> None:
    assert deepspeed_env_text(variables(**{name: "0"})) == ""


def test_deepspeeds_own_parsers_take_both() -> None:
    runner = pytest.importorskip("deepspeed.launcher.runner", reason="DeepSpeed is not installed")
    nodes = [("10.0.0.2", 8), ("10.0.0.1", 4), ("node-3.example", 1)]
    parsed = runner._parse_hostfile(hostfile_text(nodes).splitlines(keepends=True))
    assert list(parsed.items()) == nodes

    values = {"NCCL_DEBUG": "WARN", "EMPTY": "", "EQUALS": "a=b=c", "SPACES": "a b # c", "中文": "保险", "HASH": "#1"}
    exports = {}
    for line in deepspeed_env_text(variables(**values)).splitlines(keepends=True):
        key, value = line.split("=", maxsplit=1)  # deepspeed/launcher/runner.py, main()
        exports[key] = value.strip()  # MultiNodeRunner.add_export
    assert exports == values
