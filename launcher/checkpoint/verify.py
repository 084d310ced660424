"""Is this checkpoint folder whole? A pure question to the file system: nothing is changed here."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import xxhash

from launcher.checkpoint.in_place import is_set_apart
from launcher.checkpoint.manifest import MANIFEST_NAME, Manifest, hash_file, parse_manifest

_STEP_FOLDER = re.compile(r"^checkpoint-(\d+)$")


@dataclass(frozen=True)
class Verification:
    """`manifest` where the folder is whole; else `reason` says what is wrong, naming the file.

    `mark` tells the folder that was judged from a later one of the same name, see `mark_of`.
    """

    path: Path
    step: int
    manifest: Manifest | None
    reason: str = ""
    mark: str = ""

    @property
    def whole(self) -> bool:
        return self.manifest is not None

    def is_still_there(self) -> bool:
        """Whether the name still belongs to the folder that was judged. Raises OSError."""
        return self.path.is_dir() and mark_of(self.path) == self.mark


def mark_of(folder: Path) -> str:
    """Digest of the manifest, which says to the microsecond when it was made; "" without one.

    Not the inodes: object mounts make up new ones as they please. Two folders without a manifest have the same mark;
    neither was finished, and a commit writes the manifest before it gives the name.
    """
    try:
        return xxhash.xxh3_128_hexdigest((folder / MANIFEST_NAME).read_bytes())
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return ""


def list_checkpoints(output_dir: Path) -> list[tuple[int, Path]]:
    """(step, folder) of every `checkpoint-N`, highest step first. Steps come from names, never from mtimes. What an
    object mount has of unfinished and refused ones is left out."""
    return [(step, path) for step, path in folders_by_step(output_dir) if not is_set_apart(path)]


def folders_by_step(output_dir: Path) -> list[tuple[int, Path]]:
    """As `list_checkpoints`, with what only has the name of one."""
    if not output_dir.is_dir():
        return []
    found = [(int(m.group(1)), p) for p in output_dir.iterdir() if (m := _STEP_FOLDER.match(p.name)) and p.is_dir()]
    return sorted(found, reverse=True)


def verify_checkpoint(
    path: Path, step: int, *, hashes: bool = True, cancelled: Callable[[], bool] = lambda: False
) -> Verification:
    """Check manifest, sizes, hashes (unless `hashes=False`) and that every rank's state is there.

    Raises Cancelled (see `hash_file`), and OSError where the storage fails.
    """
    mark = mark_of(path)

    def refused(reason: str) -> Verification:
        return Verification(path, step, None, reason, mark)

    manifest_path = path / MANIFEST_NAME
    if not manifest_path.is_file():
        return refused(f"no {MANIFEST_NAME}: the save was not finished")
    try:
        manifest = parse_manifest(manifest_path.read_text("utf-8"))
    except (ValueError, KeyError, TypeError, OSError) as error:
        return refused(f"{MANIFEST_NAME} cannot be read ({error})")
    if manifest.step != step:
        return refused(f"{MANIFEST_NAME} is of step {manifest.step}, the folder's name says {step}")
    for name, record in manifest.files.items():
        file = path / name
        if not file.is_file():
            return refused(f"{name} is missing")
        try:
            size_bytes = file.stat().st_size
            if size_bytes != record.size_bytes:
                return refused(f"{name} has {size_bytes} bytes, {record.size_bytes} were written")
            if hashes and hash_file(file, cancelled).xxh3_128 != record.xxh3_128:
                return refused(f"{name} does not have the content that was written (XXH3 differs)")
        except FileNotFoundError:  # pruned, or set aside, by another node while it is read
            return refused(f"{name} is missing")
    missing = missing_state(
        path,
        manifest.step,
        manifest.world_size,
        zero_stage=manifest.identity.get("deepspeed.stage"),
        own_scheduler=manifest.own_scheduler,
    )
    if missing:
        return refused(missing)
    return Verification(path, step, manifest, mark=mark)


def missing_state(path: Path, step: int, world_size: int, *, zero_stage: int | None, own_scheduler: bool = True) -> str:
    """What a resume would need and this folder lacks, or an empty string.

    Transformers warns or says nothing and trains on with a fresh optimizer, scheduler or random state; here that is a
    refusal.
    """
    state_path = path / "trainer_state.json"
    try:
        recorded_step = json.loads(state_path.read_text("utf-8"))["global_step"]
    except (OSError, ValueError, KeyError, TypeError):
        return "trainer_state.json is missing or not readable"
    if recorded_step != step:
        return f"trainer_state.json is of step {recorded_step}, not {step}"
    if own_scheduler and not (path / "scheduler.pt").is_file():
        return "scheduler.pt (the learning-rate schedule) is missing"
    for rank in range(world_size):
        rng_name = f"rng_state_{rank}.pth" if world_size > 1 else "rng_state.pth"
        if not (path / rng_name).is_file():
            return f"{rng_name} (random state of rank {rank}) is missing"
    engine_folder = path / f"global_step{step}"
    if zero_stage == 0:  # without ZeRO the optimizer lies in the one file of model states
        there = (engine_folder / "mp_rank_00_model_states.pt").is_file()
        return "" if there else f"global_step{step}/mp_rank_00_model_states.pt (weights and optimizer) is missing"
    shards = sorted(engine_folder.glob("*_optim_states.pt"))
    if len(shards) != world_size:
        return f"{len(shards)} of {world_size} optimizer shards are there (global_step{step}/*_optim_states.pt)"
    return ""
