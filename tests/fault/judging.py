"""What a start makes of the checkpoints in a folder, without training: look, refuse, set aside, take."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from launcher.agent.events import EventLog, events_path, read_json_lines
from launcher.agent.resume import Resume, look_for_resume, take_resume
from launcher.checkpoint.choose import Choice
from launcher.checkpoint.manifest import MANIFEST_NAME, Manifest, read_manifest

GENERATION = 99  # above any that has staged


@dataclass(frozen=True)
class Judged:
    choice: Choice
    resume: Resume
    said: tuple[str, ...]
    rejected: tuple[Mapping[str, Any], ...]  # the events


def copy_checkpoints(source: Path, target: Path) -> Path:
    """The checkpoints of an output folder alone; no `final/`, no records."""
    target.mkdir(parents=True)
    for folder in source.glob("checkpoint-*"):
        shutil.copytree(folder, target / folder.name)
    return target


def identity_of(output_dir: Path) -> Mapping[str, Any]:
    """Of the run that wrote these checkpoints, from one that is never damaged here."""
    return read_manifest(output_dir / "checkpoint-3").identity


def start_looks(output_dir: Path, identity: Mapping[str, Any] | None = None, run_id: str = "") -> Judged:
    """By the functions that a start calls, in their order. Raises what they raise."""
    said: list[str] = []
    choice = look_for_resume(output_dir, identity or identity_of(output_dir), cancelled=lambda: False)
    log = EventLog(output_dir, "n0")
    resume = take_resume(output_dir, choice, GENERATION, log, said.append, run_id=run_id)
    events = read_json_lines(events_path(output_dir, "n0"))
    rejected = tuple(event for event in events if event["event"] == "checkpoint_rejected")
    return Judged(choice, resume, tuple(said), rejected)


def assert_refused(output_dir: Path, reason: str, *, newest: int = 6, before: int = 3) -> None:
    """A start refuses the newest checkpoint and says why, keeps it as it is under another name, and takes the one
    before."""
    damaged = output_dir / f"checkpoint-{newest}"
    there = _listed(damaged)
    judged = start_looks(output_dir)
    assert judged.resume.step == before
    (refused,) = judged.choice.refused
    assert refused.step == newest
    assert reason in refused.reason
    assert [event["reason"] for event in judged.rejected] == [refused.reason]
    assert any(f"checkpoint-{newest} is refused: {refused.reason}" in line for line in judged.said)
    assert not damaged.exists()
    assert _listed(output_dir / f"checkpoint-{newest}.rejected") == there


def assert_taken(output_dir: Path, step: int) -> Judged:
    judged = start_looks(output_dir)
    assert judged.resume.step == step
    return judged


def rewrite_manifest(folder: Path, **changes: Any) -> None:
    """As if the run had written these fields: with a manifest that agrees with itself."""
    manifest: Manifest = replace(read_manifest(folder), **changes)
    (folder / MANIFEST_NAME).write_text(manifest.to_json(), "utf-8")


def files_of(folder: Path) -> list[Path]:
    """Every file, the manifest among them, in a fixed order."""
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _listed(folder: Path) -> dict[str, tuple[int, int]]:
    """Name -> kind and size. Opens nothing: among them may be a pipe."""
    stats = {path.relative_to(folder).as_posix(): path.lstat() for path in folder.rglob("*")}
    return {name: (stat.st_mode, stat.st_size) for name, stat in stats.items()}
