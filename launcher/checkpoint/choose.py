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
from launcher.errors import UserError

REJECTED_SUFFIX = ".rejected"


@dataclass(frozen=True)
class Choice:
    """`taken` is None when the run starts from step 0. `refused` are the newer folders that are not whole."""

    taken: Verification | None
    refused: tuple[Verification, ...] = field(default=())

    @property
    def manifest(self) -> Manifest | None:
        return self.taken.manifest if self.taken else None


def choose_checkpoint(output_dir: Path, identity: Mapping[str, Any], *, hashes: bool = True) -> Choice:
    """Newest whole checkpoint first. A whole one that belongs to another job is an error, not a fresh start; one of
    another number of ranks is taken, the ranks divide its state anew.

    Raises UserError when the newest whole checkpoint cannot be continued by this job: silently starting over, or
    silently mixing two runs in one folder, would cost the user the progress that is there.
    """
    refused: list[Verification] = []
    for step, path in list_checkpoints(output_dir):
        verification = verify_checkpoint(path, step, hashes=hashes)
        if verification.manifest is None:
            refused.append(verification)
            continue
        _require_same_job(path, verification.manifest, identity)
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


def _require_same_job(path: Path, manifest: Manifest, identity: Mapping[str, Any]) -> None:
    changed = differences(manifest.identity, identity)
    if changed:
        listed = "\n".join(f"  {key}: {old!r} there, {new!r} now" for key, old, new in changed)
        raise UserError(
            f"{path.parent} holds another run: its {path.name} was made with\n{listed}\n"
            "A run is known by its output folder. Set these back to continue it, or choose another output_dir."
        )
