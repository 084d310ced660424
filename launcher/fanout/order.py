"""The order that a head gives to the machine of a node: one line of JSON that never is an argument of a command.

Only the standard library: the process that reads it first (node.py) is small, and answers soon.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, MutableMapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from launcher import __version__
from launcher.errors import PreflightRefused, UserError
from launcher.platforms.told import NODE_VARIABLE

STDIN = "-"
AGENT = ("-m", "launcher", "run")  # for the interpreter; then `--as-node` and perhaps where the order is

# What DeepSpeed's launch.py gives to the one process that it starts on a node. The agent is no rank of it, and it sees
# all GPUs of the node: launch.py shows it as many as the hostfile has slots, which is one.
_OF_LAUNCH_PY = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_SIZE",
    "CROSS_RANK",
    "CROSS_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "CUDA_VISIBLE_DEVICES",
)


class OtherVersion(PreflightRefused):
    """The head runs another version: trying again changes nothing. `marker` begins what is said to that head."""

    def __init__(self, message: str, marker: str) -> None:
        super().__init__(message)
        self.marker = marker


@dataclass(frozen=True)
class NodeOrder:
    """`places`: `FTLAUNCH_NODE` of each node, by rank. `rank` is None where DeepSpeed says it. `start` is False where
    only an agent that runs already is meant. `marker` begins every line that is not the agent's own output."""

    run: str  # names this node's agent on its machine, see presence.py
    name: str
    rank: int | None
    places: tuple[str, ...]
    head: str
    head_name: str
    marker: str
    folder: str
    environ: Mapping[str, str]
    job: Mapping[str, Any]
    agent: tuple[str, ...] = AGENT
    start: bool = True
    version: str = __version__

    def to_line(self) -> bytes:
        return json.dumps(asdict(self), separators=(",", ":")).encode("utf-8", "surrogateescape") + b"\n"

    @classmethod
    def from_line(cls, line: bytes) -> NodeOrder:
        """Raises UserError for anything but an order of this version."""
        try:
            fields = json.loads(line.decode("utf-8", "surrogateescape"))
            version = fields["version"]
            if version != __version__:
                raise OtherVersion(
                    f"the head runs ftlaunch {version}, this machine has {__version__}: install the same on both",
                    str(fields["marker"]),
                )
            return cls(**{**fields, "places": tuple(fields["places"]), "agent": tuple(fields["agent"])})
        except (ValueError, KeyError, TypeError):
            raise UserError(
                "what came on standard input is no order of a head: this command is not for people"
            ) from None

    def enter(self, environ: MutableMapping[str, str]) -> None:
        """Makes `environ` that of the node's agent."""
        rank = self.rank
        if rank is None:
            if "CROSS_RANK" not in environ:
                raise UserError("this order is for agents that DeepSpeed starts, and CROSS_RANK is not set")
            rank = int(environ["CROSS_RANK"])
            for name in _OF_LAUNCH_PY:
                environ.pop(name, None)
        environ.update(self.environ)
        environ[NODE_VARIABLE] = self.places[rank]


def read_order(source: str) -> NodeOrder:
    """From standard input (`-`), which is nobody's afterwards, or from a file."""
    if source == STDIN:
        with os.fdopen(os.dup(0), "rb") as stream:
            line = stream.readline()
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)
    else:
        try:
            line = Path(source).read_bytes()
        except OSError as error:
            raise UserError(f"the order {source} cannot be read ({error.strerror}): do all nodes share it?") from error
    return NodeOrder.from_line(line)


def without_start(order: NodeOrder) -> NodeOrder:
    return replace(order, start=False)
