"""What is known of the records before a run: from a sample at its start, or from all of them by `ftlaunch prepare`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from launcher.data.scan import Fault


@dataclass(frozen=True)
class DataFacts:
    """Of `data.train` or `data.eval`. Of each kind of fault the first ones are there, and `num_` says how many were
    found. Lengths are in tokens; those of a sample are estimates without the template's own tokens."""

    name: Literal["train", "eval"]
    num_records: int | None  # None: the files were not read to their end
    num_looked_at: int
    is_everything: bool  # every record was encoded
    max_length: int
    unusable: tuple[Fault, ...] = ()
    num_unusable: int = 0
    roles: tuple[Fault, ...] = ()
    num_roles: int = 0
    repeated: tuple[Fault, ...] = ()
    num_repeated: int = 0
    nothing_left: tuple[Fault, ...] = ()
    num_nothing_left: int = 0
    num_measured: int = 0  # records whose length is known
    num_cut: int = 0  # of these
    num_tokens: int = 0
    num_tokens_cut: int = 0
    longest: int = 0
    longest_at: str = ""
    largest_id: int = -1
    has_turns: bool = False  # conversations, not plain text

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(raw: Mapping[str, Any]) -> DataFacts:
        lists = {name: tuple(Fault(**fault) for fault in raw[name]) for name in _FAULTS}
        return DataFacts(**{**raw, **lists})


_FAULTS = ("unusable", "roles", "repeated", "nothing_left")
