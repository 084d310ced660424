"""Before each attempt: which checkpoint to continue from (`look_for_resume`, reads only), then what to set aside, and
saying so (`take_resume`, short)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from launcher.agent.events import EventLog
from launcher.checkpoint.choose import Choice, choose_checkpoint, set_judged_aside
from launcher.checkpoint.commit import clear_staging
from launcher.checkpoint.identity import differences
from launcher.checkpoint.publish import raise_fence, set_judged_apart
from launcher.checkpoint.verify import list_checkpoints
from launcher.checkpoint.whole_step import WholeStep
from launcher.host.storage import StorageKind


@dataclass(frozen=True)
class Resume:
    """`path` None and `step` 0: from the beginning. `world_size`: how many ranks wrote the checkpoint;
    `global_batch_size`: the samples of an optimizer step, which the run keeps for life (0 from the beginning); `tier`:
    where it was found; `snapshots`: what every node has to put together, where `path` is of this node alone."""

    path: str | None
    step: int
    samples_seen: int = 0
    world_size: int = 0
    global_batch_size: int = 0
    tier: str = "disk"
    snapshots: WholeStep | None = None


class LookAgain(Exception):  # noqa: N818 - an outcome, not a defect
    """Between looking and taking another node has changed the checkpoints: the choice may not be the best any more."""


def look_for_resume(output_dir: Path, identity: Mapping[str, Any], *, cancelled: Callable[[], bool]) -> Choice:
    """Verify and choose. Only reads, as long as that takes: meant to be called aside.

    Raises Cancelled as soon as `cancelled()`, asked for every block that is hashed; UserError (see choose_checkpoint);
    OSError where the storage fails.
    """
    return choose_checkpoint(output_dir, identity, cancelled=cancelled)


def begin_generation(output_dir: Path, generation: int, kind: StorageKind) -> None:
    """From now on no earlier generation commits anything, and what they have left half-written is gone."""
    clear_staging(output_dir, below=generation)
    if kind is StorageKind.OBJECT:
        raise_fence(output_dir, generation)


def take_resume(
    output_dir: Path,
    choice: Choice,
    generation: int,
    events: EventLog,
    say: Callable[[str], None],
    *,
    frozen: Mapping[str, Any] = MappingProxyType({}),
    kind: StorageKind = StorageKind.POSIX,
    run_id: str = "",
) -> Resume:
    """Clear the staging of earlier generations, set refused folders aside, and say so. Called before `generation`
    starts, while none of its ranks runs, and only by a leader whose turn is still on.

    Raises LookAgain unless the newest folder is the chosen one then: a rank of an earlier generation that was allowed
    to commit can do so until the staging is cleared, not later.
    """
    begin_generation(output_dir, generation, kind)
    for refused in choice.refused:
        kept_as = set_judged_apart(refused) if kind is StorageKind.OBJECT else set_judged_aside(refused)
        if kept_as is None:
            continue  # another node was faster
        events.emit("checkpoint_rejected", path=str(refused.path), reason=refused.reason, kept_as=str(kept_as))
        kept = "It stays where it is, and is no checkpoint any more" if kept_as == refused.path else "It is kept as "
        say(
            f"{refused.path.name} is refused: {refused.reason}. {kept}{'' if kept_as == refused.path else kept_as.name}"
        )
    _require_still_newest(output_dir, choice)
    if choice.taken is None or choice.manifest is None:
        if choice.refused:
            say("none of the checkpoints is whole: training begins at step 0; they are kept for you to look at")
        return Resume(None, 0)
    if run_id and choice.manifest.run_id != run_id:
        say(
            f"note: {choice.taken.path.name} was written by run {choice.manifest.run_id}, in another output folder or "
            f"before the records in this one; this is run {run_id}. It fits this job, and is continued here"
        )
    for key, old, new in differences(choice.manifest.training, frozen):
        say(
            f"note: training.{key} was {old!r} and is {new!r} now; the optimizer's saved state wins, so this "
            f"has no effect"
        )
    manifest = choice.manifest
    return Resume(
        str(choice.taken.path), choice.taken.step, manifest.samples_seen, manifest.world_size, manifest.batch_of_run
    )


def _require_still_newest(output_dir: Path, choice: Choice) -> None:
    found = list_checkpoints(output_dir)
    newest = found[0][1] if found else None
    taken = choice.taken.path if choice.taken else None
    if newest != taken or (choice.taken is not None and not choice.taken.is_still_there()):
        raise LookAgain(f"{newest or 'nothing'} is the newest checkpoint now, {taken or 'nothing'} was chosen")


def newest_step(output_dir: Path) -> int:
    """Step of the newest checkpoint folder; 0 when there is none."""
    found = list_checkpoints(output_dir)
    return found[0][0] if found else 0
