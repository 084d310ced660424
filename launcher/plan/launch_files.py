"""Texts of the hostfile and of `.deepspeed_env`, as DeepSpeed's own parsers take them."""

from __future__ import annotations

from collections.abc import Sequence

from launcher.diagnose.redact import is_secret_name, redact_text
from launcher.errors import UserError
from launcher.plan.environment import Variable

# What every node must set for itself, or what only makes sense inside one process.
_NOT_FOR_OTHER_NODES = frozenset({"CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "PYTHONUNBUFFERED"})


def hostfile_text(nodes: Sequence[tuple[str, int]]) -> str:
    """One `IP slots=N` line a node, in node order. DeepSpeed refuses the same host twice, so that is an error here
    too."""
    addresses = [address for address, _ in nodes]
    doubled = sorted({address for address in addresses if addresses.count(address) > 1})
    if doubled:
        raise UserError(
            f"two nodes have the address {doubled[0]}; DeepSpeed's hostfile needs one address for each node"
        )
    return "".join(f"{address} slots={slots}\n" for address, slots in nodes)


def deepspeed_env_text(variables: Sequence[Variable]) -> str:
    """`NAME=value` lines, nothing else: DeepSpeed 0.19 splits every line at `=`; a blank line or a comment makes it
    raise.

    Values with a line break cannot be written and are refused. Secrets (by name, or a password in a URL) are left
    out: the file lies in the output folder.
    """
    lines = []
    for variable in variables:
        secret = is_secret_name(variable.name) or redact_text(variable.value) != variable.value
        if variable.name in _NOT_FOR_OTHER_NODES or secret:
            continue
        if "\n" in variable.value or "\r" in variable.value:
            raise UserError(f"env.{variable.name} holds a line break, which .deepspeed_env cannot carry")
        lines.append(f"{variable.name}={variable.value}\n")
    return "".join(lines)
