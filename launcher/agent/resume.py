"""Before each attempt: which checkpoint to continue from, what to set aside, and saying so."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from launcher.agent.events import EventLog
from launcher.checkpoint.choose import choose_checkpoint, set_aside
from launcher.checkpoint.commit import clear_staging
from launcher.checkpoint.identity import differences
from launcher.checkpoint.verify import list_checkpoints


@dataclass(frozen=True)
class Resume:
    """`path` None and `step` 0: from the beginning. `world_size`: how many ranks wrote the checkpoint;
    `global_batch_size`: the samples of an optimizer step, which the run keeps for life (0 from the beginning)."""

    path: str | None
    step: int
    samples_seen: int = 0
    world_size: int = 0
    global_batch_size: int = 0


def prepare_resume(
    output_dir: Path,
    identity: Mapping[str, Any],
    generation: int,
    events: EventLog,
    say: Callable[[str], None],
    *,
    frozen: Mapping[str, Any] = MappingProxyType({}),
) -> Resume:
    """Verify, choose, set refused folders aside. Called before `generation` starts, while none of its ranks runs.
    Raises UserError (see choose_checkpoint)."""
    clear_staging(output_dir, below=generation)
    choice = choose_checkpoint(output_dir, identity)
    for refused in choice.refused:
        kept_as = set_aside(refused.path)
        events.emit("checkpoint_rejected", path=str(refused.path), reason=refused.reason, kept_as=str(kept_as))
        say(f"{refused.path.name} is refused: {refused.reason}. It is kept as {kept_as.name}")
    if choice.taken is None or choice.manifest is None:
        return Resume(None, 0)
    for key, old, new in differences(choice.manifest.training, frozen):
        say(
            f"note: training.{key} was {old!r} and is {new!r} now; the optimizer's saved state wins, so this "
            f"has no effect"
        )
    manifest = choice.manifest
    return Resume(
        str(choice.taken.path), choice.taken.step, manifest.samples_seen, manifest.world_size, manifest.batch_of_run
    )


def newest_step(output_dir: Path) -> int:
    """Step of the newest checkpoint folder; 0 when there is none."""
    found = list_checkpoints(output_dir)
    return found[0][0] if found else 0
