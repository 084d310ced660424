"""Which steps are whole in memory: all ranks of one generation have a snapshot of it. Pure; no torch, no files."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from launcher.checkpoint.snapshot import SnapshotIdentity


@dataclass(frozen=True)
class WholeStep:
    """A step that every rank 0..world_size-1 of one generation has."""

    run_id: str
    config_sha: str
    generation: int
    step: int
    world_size: int

    def has(self, identity: SnapshotIdentity) -> bool:
        return _step_of(identity) == self


def whole_steps(identities: Iterable[SnapshotIdentity]) -> list[WholeStep]:
    """Newest first: the highest generation, in it the highest step. From any number of nodes, with repetitions.

    The generation comes first: what an earlier one has written beyond the step that a later one resumed from is of a
    past that was given up.
    """
    ranks: dict[WholeStep, set[int]] = {}
    for identity in identities:
        ranks.setdefault(_step_of(identity), set()).add(identity.rank)
    whole = [step for step, has in ranks.items() if len(has) == step.world_size and has == set(range(len(has)))]
    return sorted(whole, key=lambda step: (step.generation, step.step), reverse=True)


def newest_whole_step(identities: Iterable[SnapshotIdentity]) -> WholeStep | None:
    return next(iter(whole_steps(identities)), None)


def _step_of(identity: SnapshotIdentity) -> WholeStep:
    return WholeStep(identity.run_id, identity.config_sha, identity.generation, identity.step, identity.world_size)
