"""Is this checkpoint folder whole? A pure question to the file system: nothing is changed here."""

from __future__ import annotations

import errno
import json
import os
import re
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import xxhash

from launcher.checkpoint.in_place import is_set_apart
from launcher.checkpoint.manifest import MANIFEST_NAME, LaterVersion, Manifest, hash_file, parse_manifest

# As ftlaunch and Transformers write it: `checkpoint-099` would be a second name of step 99; no run makes 10^18 steps.
_STEP_FOLDER = re.compile(r"checkpoint-(0|[1-9][0-9]{0,17})")
_SHARD = re.compile(r".*zero_pp_rank_([0-9]+)_mp_rank_[0-9]+_optim_states\.pt")
_NOT_THERE = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP})
# A block that the medium has lost, or its checksum refuses; or a server that does not answer: who asks has to find out.
LOST_BLOCKS = frozenset({errno.EIO, errno.EBADMSG, errno.EUCLEAN, errno.EREMOTEIO})


@dataclass(frozen=True)
class Verification:
    """`manifest` where the folder is whole; else `reason` says what is wrong, naming the file.

    `mark` tells the folder that was judged from a later one of the same name, see `mark_of`. `of_later_version`: it
    cannot be judged here, a later version of ftlaunch has written it.
    """

    path: Path
    step: int
    manifest: Manifest | None
    reason: str = ""
    mark: str = ""
    of_later_version: bool = False

    @property
    def whole(self) -> bool:
        return self.manifest is not None

    def is_still_there(self) -> bool:
        """Whether the name still belongs to the folder that was judged. Raises OSError."""
        return self.path.is_dir() and mark_of(self.path) == self.mark


def mark_of(folder: Path) -> str:
    """Digest of the manifest, which says to the microsecond when it was made; "" without one that can be read.

    Not the inodes: object mounts make up new ones as they please. Two folders without a manifest have the same mark;
    neither was finished, and a commit writes the manifest before it gives the name.
    """
    try:
        return _digest(_manifest_bytes(folder))
    except OSError as error:
        if error.errno not in LOST_BLOCKS:
            raise
        return ""


def _digest(content: bytes | None) -> str:
    return "" if content is None else xxhash.xxh3_128_hexdigest(content)


def _manifest_bytes(folder: Path) -> bytes | None:
    """None where there is no such file. Raises OSError where the storage fails, or forbids."""
    path = folder / MANIFEST_NAME
    try:
        return path.read_bytes() if is_regular_file(path) else None
    except FileNotFoundError:  # in this moment
        return None
    except OSError as error:
        error.filename = os.fspath(path)  # which a failing read does not say
        raise


def is_regular_file(path: Path) -> bool:
    """Not a folder, pipe or device, nor a link to nothing or to itself. Raises OSError where nobody can tell: what the
    storage does not answer, or may not be seen by this user, is not missing."""
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except OSError as error:
        if error.errno not in _NOT_THERE:
            raise
        return False


def list_checkpoints(output_dir: Path) -> list[tuple[int, Path]]:
    """(step, folder) of every `checkpoint-N`, highest step first. Steps come from names, never from mtimes. What an
    object mount has of unfinished and refused ones is left out."""
    return [(step, path) for step, path in folders_by_step(output_dir) if not is_set_apart(path)]


def folders_by_step(output_dir: Path) -> list[tuple[int, Path]]:
    """As `list_checkpoints`, with what only has the name of one."""
    if not output_dir.is_dir():
        return []
    named = ((_STEP_FOLDER.fullmatch(path.name), path) for path in output_dir.iterdir())
    return sorted(((int(match[1]), path) for match, path in named if match and path.is_dir()), reverse=True)


def verify_checkpoint(
    path: Path, step: int, *, hashes: bool = True, cancelled: Callable[[], bool] = lambda: False
) -> Verification:
    """Check manifest, sizes, hashes (unless `hashes=False`) and that every rank's state is there.

    Raises Cancelled (see `hash_file`), and OSError where the storage fails.
    """
    content = _manifest_bytes(path)
    mark = _digest(content)

    def refused(reason: str, *, of_later_version: bool = False) -> Verification:
        return Verification(path, step, None, reason, mark, of_later_version)

    if content is None:
        return refused(f"no {MANIFEST_NAME}: the save was not finished")
    try:
        manifest = parse_manifest(content.decode("utf-8"))
    except LaterVersion as later:
        return refused(f"{MANIFEST_NAME} is of a later version of ftlaunch ({later})", of_later_version=True)
    except (ValueError, KeyError, TypeError) as error:
        return refused(f"{MANIFEST_NAME} cannot be read ({error})")
    if manifest.step != step:
        return refused(f"{MANIFEST_NAME} is of step {manifest.step}, the folder's name says {step}")
    for name, record in manifest.files.items():
        file = path / name
        if not is_regular_file(file):
            return refused(f"{name} is not a file" if os.path.lexists(file) else f"{name} is missing")
        try:
            size_bytes = file.stat().st_size
            if size_bytes != record.size_bytes:
                return refused(f"{name} has {size_bytes} bytes, {record.size_bytes} were written")
            if hashes and hash_file(file, cancelled).xxh3_128 != record.xxh3_128:
                return refused(f"{name} does not have the content that was written (XXH3 differs)")
        except FileNotFoundError:  # pruned, or set aside, by another node while it is read
            return refused(f"{name} is missing")
    missing = missing_of(path, manifest)
    if missing:
        return refused(missing)
    return Verification(path, step, manifest, mark=mark)


def missing_of(folder: Path, manifest: Manifest) -> str:
    """`missing_state` of a checkpoint with this manifest."""
    return missing_state(
        folder,
        manifest.step,
        manifest.world_size,
        zero_stage=manifest.identity.get("deepspeed.stage"),
        own_scheduler=manifest.own_scheduler,
    )


def missing_state(path: Path, step: int, world_size: int, *, zero_stage: int | None, own_scheduler: bool = True) -> str:
    """What a resume would need and this folder lacks, or an empty string. Raises OSError where the storage fails.

    Transformers warns or says nothing and trains on with a fresh optimizer, scheduler or random state; here that is a
    refusal.
    """
    state_path = path / "trainer_state.json"
    try:
        recorded_step = json.loads(state_path.read_text("utf-8"))["global_step"]
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError, ValueError, KeyError, TypeError):
        return "trainer_state.json is missing or not readable"
    if recorded_step != step:
        return f"trainer_state.json is of step {recorded_step}, not {step}"
    if own_scheduler and not is_regular_file(path / "scheduler.pt"):
        return "scheduler.pt (the learning-rate schedule) is missing"
    for rank in range(world_size):
        rng_name = f"rng_state_{rank}.pth" if world_size > 1 else "rng_state.pth"
        if not is_regular_file(path / rng_name):
            return f"{rng_name} (random state of rank {rank}) is missing"
    engine_folder = path / f"global_step{step}"
    if zero_stage == 0:  # without ZeRO the optimizer lies in the one file of model states
        there = is_regular_file(engine_folder / "mp_rank_00_model_states.pt")
        return "" if there else f"global_step{step}/mp_rank_00_model_states.pt (weights and optimizer) is missing"
    return _missing_shard(engine_folder, world_size)


def _missing_shard(engine_folder: Path, world_size: int) -> str:
    names = sorted(file.name for file in engine_folder.glob("*_optim_states.pt"))
    pattern = f"{engine_folder.name}/*_optim_states.pt"
    if len(names) != world_size:
        return f"{len(names)} of {world_size} optimizer shards are there ({pattern})"
    ranks = {int(match[1]) for name in names if (match := _SHARD.fullmatch(name))}
    lacking = sorted(set(range(world_size)) - ranks)
    return f"the optimizer shard of rank {lacking[0]} is missing ({pattern})" if lacking else ""
