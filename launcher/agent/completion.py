"""Proof that training reached its planned end: read from what the trainer itself left on disk, never from an exit
status."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from launcher.checkpoint.identity import differences
from launcher.checkpoint.manifest import MANIFEST_NAME, Manifest, hash_file, parse_manifest
from launcher.checkpoint.verify import list_checkpoints, verify_checkpoint


def proof_of_completion(output_dir: Path) -> str | None:
    """None when it is proven; else what is missing.

    Needed: `final/` is whole and its manifest's step has reached the planned steps; the newest checkpoint is whole, of
    that step, and the trainer's own state in it says that many steps were made. (A planned end that was lowered below a
    checkpoint's step counts as reached.)
    """
    final = read_final(output_dir)
    if final is None:
        return f"{output_dir / 'final'} is not there or not whole"
    if final.planned_steps is None or final.step < final.planned_steps:
        return f"final/ is of step {final.step} of {final.planned_steps}"
    return _missing_of_last_checkpoint(output_dir, final.step)


def _missing_of_last_checkpoint(output_dir: Path, final_step: int) -> str | None:
    checkpoints = list_checkpoints(output_dir)
    if not checkpoints or checkpoints[0][0] != final_step:
        return f"the last checkpoint is not of step {final_step}"
    step, path = checkpoints[0]
    # Whole includes that trainer_state.json was written by the trainer at this very step.
    verification = verify_checkpoint(path, step, hashes=False)
    return None if verification.whole else f"{path.name}: {verification.reason}"


def read_final(output_dir: Path, *, hashes: bool = True) -> Manifest | None:
    """The manifest of `final/` when every file in it is as it was written (its size only, without `hashes`)."""
    folder = output_dir / "final"
    try:
        manifest = parse_manifest((folder / MANIFEST_NAME).read_text("utf-8"))
        whole = all(
            (folder / name).stat().st_size == record.size_bytes and (not hashes or hash_file(folder / name) == record)
            for name, record in manifest.files.items()
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return manifest if whole else None


def finished_already(
    output_dir: Path, identity: Mapping[str, Any], training: Mapping[str, Any], *, hashes: bool = True
) -> Manifest | None:
    """The manifest of `final/` when this very job has nothing left to do; None when it is to be (further) trained."""
    final = read_final(output_dir, hashes=hashes)
    if final is None or final.planned_steps is None or final.step < final.planned_steps:
        return None
    if _missing_of_last_checkpoint(output_dir, final.step) is not None:
        return None
    wanted_steps = training.get("max_steps")
    beyond = isinstance(wanted_steps, int) and 0 < wanted_steps <= final.step
    same_length = beyond or all(training.get(key) == value for key, value in final.plan.items())
    return final if same_length and not differences(final.identity, identity) else None
