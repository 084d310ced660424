"""Which checkpoint a run resumes from: the newest whole one that fits the job. Refused ones are set aside, never
deleted."""

from __future__ import annotations

import errno
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launcher.checkpoint.identity import differences
from launcher.checkpoint.manifest import Manifest
from launcher.checkpoint.verify import LOST_BLOCKS, Verification, list_checkpoints, mark_of, verify_checkpoint
from launcher.errors import UserError

REJECTED_SUFFIX = ".rejected"
_MAX_LOOKS = 20  # each but the first because another node has changed what was being read


@dataclass(frozen=True)
class Choice:
    """`taken` is None when the run starts from step 0. `refused` are the newer folders that are not whole."""

    taken: Verification | None
    refused: tuple[Verification, ...] = field(default=())

    @property
    def manifest(self) -> Manifest | None:
        return self.taken.manifest if self.taken else None


def choose_checkpoint(
    output_dir: Path,
    identity: Mapping[str, Any],
    *,
    hashes: bool = True,
    cancelled: Callable[[], bool] = lambda: False,
) -> Choice:
    """Newest whole checkpoint first. A whole one that belongs to another job is an error, not a fresh start; one of
    another number of ranks is taken, the ranks divide its state anew.

    Raises UserError when the newest whole checkpoint cannot be continued by this job, or a later version of ftlaunch
    has written it: silently starting over, or silently mixing two runs in one folder, would cost the user the progress
    that is there. Raises Cancelled as soon as `cancelled()`, and OSError where the storage fails. Changes nothing.
    """
    for _ in range(_MAX_LOOKS):
        choice = _choose(output_dir, hashes=hashes, cancelled=cancelled)
        if choice is not None:
            if choice.taken is not None and choice.manifest is not None:
                _require_same_job(choice.taken.path, choice.manifest, identity)
            return choice
    raise OSError(errno.ESTALE, f"the checkpoints in {output_dir} change each time they are read ({_MAX_LOOKS} times)")


def _choose(output_dir: Path, *, hashes: bool, cancelled: Callable[[], bool]) -> Choice | None:
    """None where another node has pruned, set aside or replaced what was being read: then the rest is old news."""
    refused: list[Verification] = []
    unread: list[tuple[int, Path]] = []
    for step, path in list_checkpoints(output_dir):
        try:
            verification = verify_checkpoint(path, step, hashes=hashes, cancelled=cancelled)
        except OSError as error:
            if not path.is_dir():
                return None
            if error.errno not in LOST_BLOCKS:
                raise
            unread.append((step, path))
            continue
        if not verification.is_still_there():
            return None
        if verification.of_later_version:
            raise UserError(
                f"{path}: {verification.reason}. Update ftlaunch to continue from it; to go on from an older "
                f"checkpoint, move {path.name} out of {output_dir}."
            )
        if verification.whole:
            for lost in unread:
                judged = _judge_lost(*lost, older=path, cancelled=cancelled)
                if judged is None:
                    return None
                refused.append(judged)
            return Choice(verification, tuple(sorted(refused, key=lambda judged: -judged.step)))
        refused.append(verification)
    for step, path in unread:  # nothing older shows that the storage itself is well
        verify_checkpoint(path, step, hashes=hashes, cancelled=cancelled)
        return None  # it can be read now
    return Choice(None, tuple(refused))


def _judge_lost(step: int, path: Path, *, older: Path, cancelled: Callable[[], bool]) -> Verification | None:
    """Every byte of an older one has just been read, so the storage answers; what it still does not give is lost. None
    where it gives it now."""
    try:
        verify_checkpoint(path, step, cancelled=cancelled)
    except OSError as error:
        if error.errno not in LOST_BLOCKS:
            raise
        name = Path(error.filename).name if error.filename else "a file"
        reason = f"{name} cannot be read ({error.strerror}), while all of {older.name} can"
        return Verification(path, step, None, reason, mark_of(path))
    return None


def set_judged_aside(judged: Verification) -> Path | None:
    """Set the refused folder aside; None where it has gone, or its name belongs to another one by now."""
    if not judged.is_still_there():
        return None
    try:
        kept_as = set_aside(judged.path)
    except FileNotFoundError:
        return None
    if mark_of(kept_as) != judged.mark and not judged.path.exists():
        kept_as.rename(judged.path)  # another node was faster, in the moment between the question and the rename
        return None
    return kept_as


def set_aside(path: Path, like: Path | None = None) -> Path:
    """Rename `checkpoint-N` to `checkpoint-N.rejected` (`.rejected-2`, ... when that name is taken); returns the new
    name. With `like`, `path` gets the name that `like` would have got."""
    like = like or path
    for attempt in range(1, 1000):
        target = like.with_name(like.name + REJECTED_SUFFIX + (f"-{attempt}" if attempt > 1 else ""))
        if target.exists():
            continue
        try:
            path.rename(target)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            continue  # another node has just taken this name
        return target
    raise UserError(f"{like}: 999 rejected copies of this checkpoint lie beside it; remove some of them")


def _require_same_job(path: Path, manifest: Manifest, identity: Mapping[str, Any]) -> None:
    changed = differences(manifest.identity, identity)
    if changed:
        listed = "\n".join(f"  {key}: {old!r} there, {new!r} now" for key, old, new in changed)
        raise UserError(
            f"{path.parent} holds another run: its {path.name} was made with\n{listed}\n"
            "A run is known by its output folder. Set these back to continue it, or choose another output_dir. If "
            f"{path.name} does not belong to this run, move it out of that folder."
        )
