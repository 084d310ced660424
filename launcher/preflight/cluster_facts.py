"""What the nodes of a job have found out together: `ftlaunch check` on each of them gathers it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from launcher.host.net_speed import PairSpeed


@dataclass(frozen=True)
class NodeReport:
    """`traits`: what should be the same on every node, in words. `findings`: (id, severity, measured) of those that are
    not in order. clock_offset_s: of this node against the first one; clock_error_s: how far that may be wrong."""

    name: str
    hostname: str
    traits: Mapping[str, str] = field(default_factory=dict)
    findings: tuple[tuple[str, str, str], ...] = ()
    clock_offset_s: float = 0.0
    clock_error_s: float = 0.0


@dataclass(frozen=True)
class ClusterFacts:
    """unreachable: (from, to, why). unseen: node -> why it does not see what the first one has written; seen_after_s:
    node -> how late it saw it. `speeds` is empty where `check.speed` is false."""

    num_wanted: int
    nodes: tuple[NodeReport, ...]
    unreachable: tuple[tuple[str, str, str], ...] = ()
    unseen: Mapping[str, str] = field(default_factory=dict)
    seen_after_s: Mapping[str, float] = field(default_factory=dict)
    speeds: tuple[PairSpeed, ...] = ()
    summed_bytes_per_s: float | None = None  # of all-reduce over the job's backend, one rank a node
    seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(raw: Mapping[str, Any]) -> ClusterFacts:
        return ClusterFacts(
            num_wanted=raw["num_wanted"],
            nodes=tuple(
                NodeReport(**{**node, "findings": tuple(tuple(finding) for finding in node["findings"])})
                for node in raw["nodes"]
            ),
            unreachable=tuple((source, target, why) for source, target, why in raw["unreachable"]),
            unseen=raw["unseen"],
            seen_after_s=raw["seen_after_s"],
            speeds=tuple(PairSpeed(**speed) for speed in raw["speeds"]),
            summed_bytes_per_s=raw["summed_bytes_per_s"],
            seconds=raw["seconds"],
        )


@dataclass(frozen=True)
class StepNeeds:
    """gradient_bytes: what all ranks sum up in an optimizer step; what they gather counts by what it sends. step_s:
    what a step takes on one node, without the network; `source` says how that is known."""

    gradient_bytes: int
    step_s: float
    world_size: int
    source: str
