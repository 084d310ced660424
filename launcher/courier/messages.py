"""What the agent asks of its courier, and what comes of it.

Agent to courier: `write`, `publish`, `discard`, `listen`, `send`, `fetch`, `ask_inventory`, each with an `id`; `cancel`
{id}; `answer` {question, ...}. Courier to agent: `done` or `failed`, once for each `id`; `progress` every PROGRESS_S
for each request that is not answered yet; `notice` {text}; and with a `question`: `may_publish` (is this generation
still the current one?), `wanted` (snapshots that another node asks for), `inventory` (which ones are there), `kept` (a
set of another node has arrived).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from launcher.checkpoint.manifest import FileRecord
from launcher.checkpoint.snapshot import SnapshotIdentity

FD_VARIABLE = "FTLAUNCH_COURIER_FD"
PROGRESS_S = 5.0
PERMIT_WAIT_S = 30.0  # the agent may have to hear from the other nodes first


class Cause(str, Enum):
    """Why a request came to nothing."""

    DAMAGED = "damaged"  # a slot does not hold what it should
    STORAGE = "storage"  # the output folder: full, read-only, broken
    INCOMPLETE = "incomplete"  # what is to be published lacks files
    REFUSED = "refused"  # not permitted, by this agent or another node
    NETWORK = "network"  # the other node: not there, stalled, cut off, without the token
    CANCELLED = "cancelled"  # as asked
    SUPERSEDED = "superseded"  # a newer step was to be sent before this one's turn came
    STUCK = "stuck"  # nothing has moved for too long; the courier was given up with it
    LOST = "lost"  # the courier died; worth asking again
    DEFECT = "defect"  # of the courier itself


class Failed(Exception):  # noqa: N818 - an outcome, not a defect
    """Inside the courier: the request comes to nothing."""

    def __init__(self, cause: Cause, reason: str) -> None:
        super().__init__(reason)
        self.cause = cause


@dataclass(frozen=True)
class Failure:
    """The answer to any request that came to nothing. `reason` is a sentence for people."""

    cause: Cause
    reason: str


@dataclass(frozen=True)
class Written:
    """Every file of the snapshots is in the output folder, durable, under no final name yet."""

    files: Mapping[str, FileRecord]
    num_bytes: int
    seconds: float

    def to_fields(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> Written:
        files = {name: FileRecord(**record) for name, record in fields["files"].items()}
        return cls(files, int(fields["num_bytes"]), float(fields["seconds"]))


@dataclass(frozen=True)
class Published:
    """The checkpoint has its name. `prune_error`: why older ones could not be removed; the new one is whole all the
    same."""

    path: Path
    num_bytes: int
    pruned: tuple[Path, ...]
    prune_error: str
    seconds: float

    def to_fields(self) -> dict[str, Any]:
        return {**asdict(self), "path": str(self.path), "pruned": [str(path) for path in self.pruned]}

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> Published:
        return cls(
            Path(fields["path"]),
            int(fields["num_bytes"]),
            tuple(Path(path) for path in fields["pruned"]),
            str(fields["prune_error"]),
            float(fields["seconds"]),
        )


@dataclass(frozen=True)
class Discarded:
    """What had been written of the checkpoint is removed."""

    path: Path


@dataclass(frozen=True)
class Progress:
    """`bytes_done` of `bytes_total`; both 0 where bytes are not what is waited for. `begun`: false while others come
    first."""

    begun: bool
    bytes_done: int
    bytes_total: int


def identities_from(raw: list[dict[str, Any]]) -> list[SnapshotIdentity]:
    return [SnapshotIdentity(**fields) for fields in raw]
