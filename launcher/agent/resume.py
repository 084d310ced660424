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
    """`path` None and `step` 0: from the beginning."""

    path: str | None
    step: int
    samples_seen: int = 0


def prepare_resume(
    output_dir: Path,
    identity: Mapping[str, Any],
    world_size: int,
    events: EventLog,
    say: Callable[[str], None],
    *,
    frozen: Mapping[str, Any] = MappingProxyType({}),
) -> Resume:
    """Verify, choose, set refused folders aside. Called while no rank runs. Raises UserError (see
    choose_checkpoint)."""
    clear_staging(output_dir)
    choice = choose_checkpoint(output_dir, identity, world_size)
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
    return Resume(str(choice.taken.path), choice.taken.step, choice.manifest.samples_seen)


def newest_step(output_dir: Path) -> int:
    """Step of the newest checkpoint folder; 0 when there is none."""
    found = list_checkpoints(output_dir)
    return found[0][0] if found else 0
