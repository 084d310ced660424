"""Texts of the hostfile and of `.deepspeed_env`, as DeepSpeed's own parsers take them."""

from __future__ import annotations

from collections.abc import Sequence

from launcher.diagnose.redact import is_secret_name, redact_text
from launcher.errors import UserError
from launcher.plan.environment import Variable

# What every node must set for itself, or what only makes sense inside one process.
_NOT_FOR_OTHER_NODES = frozenset({"CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "PYTHONUNBUFFERED"})


def hostfile_text(nodes: Sequence[tuple[str, int]], names: Sequence[str] = ()) -> str:
    """One `IP slots=N` line a node, in node order. Two nodes at one address cannot be told apart, by DeepSpeed or by
    the agents: refused, with what the list of machines calls them (`names`, in the same order)."""
    addresses = [address for address, _ in nodes]
    doubled = sorted({address for address in addresses if addresses.count(address) > 1})
    if doubled:
        same = [index for index, address in enumerate(addresses) if address == doubled[0]]
        who = " and ".join(names[index] if index < len(names) else f"n{index}" for index in same)
        raise UserError(
            f"{who} are one machine: both have the address {doubled[0]}. Name each machine once; where they are two, "
            f"correct the addresses (name server, /etc/hosts)."
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
