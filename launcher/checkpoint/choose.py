"""Which checkpoint a run resumes from: the newest whole one that fits the job. Refused ones are set aside, never
deleted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launcher.checkpoint.identity import differences
from launcher.checkpoint.manifest import Manifest
from launcher.checkpoint.verify import Verification, list_checkpoints, verify_checkpoint
from launcher.errors import PreflightRefused, UserError

REJECTED_SUFFIX = ".rejected"


@dataclass(frozen=True)
class Choice:
    """`taken` is None when the run starts from step 0. `refused` are the newer folders that are not whole."""

    taken: Verification | None
    refused: tuple[Verification, ...] = field(default=())

    @property
    def manifest(self) -> Manifest | None:
        return self.taken.manifest if self.taken else None


def choose_checkpoint(output_dir: Path, identity: Mapping[str, Any], world_size: int, *, hashes: bool = True) -> Choice:
    """Newest whole checkpoint first. A whole one that belongs to another job or world size is an error, not a fresh
    start.

    Raises UserError, or PreflightRefused for another number of ranks, when the newest whole checkpoint cannot be
    continued by this job: silently starting over, or
    silently mixing two runs in one folder, would cost the user the progress that is there.
    """
    refused: list[Verification] = []
    for step, path in list_checkpoints(output_dir):
        verification = verify_checkpoint(path, step, hashes=hashes)
        if verification.manifest is None:
            refused.append(verification)
            continue
        _require_same_job(path, verification.manifest, identity, world_size)
        return Choice(verification, tuple(refused))
    return Choice(None, tuple(refused))


def set_aside(path: Path) -> Path:
    """Rename `checkpoint-N` to `checkpoint-N.rejected` (`.rejected-2`, ... when that name is taken); returns the new
    name."""
    for attempt in range(1, 1000):
        target = path.with_name(path.name + REJECTED_SUFFIX + (f"-{attempt}" if attempt > 1 else ""))
        if not target.exists():
            path.rename(target)
            return target
    raise UserError(f"{path}: 999 rejected copies of this checkpoint lie beside it; remove some of them")


def _require_same_job(path: Path, manifest: Manifest, identity: Mapping[str, Any], world_size: int) -> None:
    changed = differences(manifest.identity, identity)
    if changed:
        listed = "\n".join(f"  {key}: {old!r} there, {new!r} now" for key, old, new in changed)
        raise UserError(
            f"{path.parent} holds another run: its {path.name} was made with\n{listed}\n"
            "A run is known by its output folder. Set these back to continue it, or choose another output_dir."
        )
    if manifest.world_size != world_size:
        raise PreflightRefused(
            f"{path} was saved by {manifest.world_size} ranks and this start has {world_size}. Resuming with another "
            f"number of ranks is not in this version: start where {manifest.world_size} ranks run "
            "(cluster.nproc_per_node), or choose another output_dir to begin anew."
        )
