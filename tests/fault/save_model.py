"""What must be in an output folder after kills: a model of its own, that knows nothing of the code under test but the
names of files and folders that are documented (docs/checkpoints.md).

`History` is told what processes were about to do and had done (`absorb`), then compares it with what is there (`look`),
and with what a resume takes. Raises BrokenPromise.
"""

from __future__ import annotations

import json
import os
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import xxhash

from tests.fault.save_script import TAG_FILE, Board, Kind, Operation, checkpoint_files, final_files

MANIFEST = "MANIFEST.json"
DISPLACED = ".displaced"
_NAME = re.compile(r"^checkpoint-(\d+)$")
_ASIDE = re.compile(r"^(?:checkpoint-(\d+)|final)\.rejected(?:-\d+)?$")
_FINAL = -1  # stands for a step where final/ is meant


class BrokenPromise(AssertionError):  # noqa: N818 - says what it is
    """What users rely on was not kept."""


@dataclass
class Saved:
    """One save. `files`: the content it must have, the manifest left out until it has been seen. `countable`: whole as
    far as sizes can say, so that pruning counts it."""

    tag: str
    step: int
    files: dict[str, bytes]
    begun: int
    returned: int  # 0: its commit has not
    whole: bool = True
    countable: bool = True
    seen: bool = False  # under a final name, or moved away from one
    pruned: bool = False


@dataclass(frozen=True)
class Found:
    """A folder that has, or had, a final name."""

    path: Path
    step: int
    place: str  # "name"; "displaced": between two names; "replaced": in the one that has its name now; "aside"
    files: Mapping[str, bytes]

    @property
    def tag(self) -> str:
        return self.files.get(TAG_FILE, b"").decode("utf-8", "replace")


@dataclass
class History:
    """Of one output folder."""

    saves: dict[str, Saved] = field(default_factory=dict)
    holders: dict[int, str] = field(default_factory=dict)  # step -> tag of the save that has, or must get, the name

    def copied(self) -> History:
        return History({tag: replace(s, files=dict(s.files)) for tag, s in self.saves.items()}, dict(self.holders))

    # -- what the processes have done ----------------------------------------------------------------------------------

    def absorb(self, runs: Sequence[tuple[Sequence[Operation], Board]]) -> None:
        prunes: list[int] = []
        begun_now: list[str] = []
        for operations, board in runs:
            for index, operation in enumerate(operations):
                begun, returned, step = board.row(index)
                if not begun:
                    continue
                if operation.kind in (Kind.COMMIT, Kind.COMMIT_FINAL):
                    begun_now.append(operation.tag)
                if operation.kind is Kind.COMMIT:
                    files = checkpoint_files(operation.tag, step)
                    self.saves[operation.tag] = Saved(operation.tag, step, files, begun, returned)
                elif operation.kind is Kind.COMMIT_FINAL:
                    files = final_files(operation.tag)
                    self.saves[operation.tag] = Saved(operation.tag, _FINAL, files, begun, returned)
                elif operation.kind is Kind.PRUNE:
                    prunes.append(operation.keep)
        if prunes:
            there = [self.saves[tag] for tag in {*self.holders.values(), *begun_now}]
            for save in there:
                higher = {other.step for other in there if other.countable and other.step > save.step}
                save.pruned |= save.step != _FINAL and save.countable and len(higher) >= min(prunes)

    # -- what is there -------------------------------------------------------------------------------------------------

    def look(self, output_dir: Path, *, when: str) -> None:
        """Right after a kill (something may stand between two names) or, a generation later, after everything."""
        found = list(find(output_dir))
        for folder in found:
            self._judge(folder, when)
        held = {f.step: f.tag for f in sorted(found, key=_by_claim) if f.place in ("displaced", "name")}
        there = {folder.tag for folder in found}
        for save in self.saves.values():
            lost = (save.returned or save.seen) and save.tag not in there and not save.pruned
            if lost and save.step != _FINAL:
                raise BrokenPromise(f"{when}: the save {save.tag} of step {save.step} is nowhere any more")
        for step, tag in list(self.holders.items()):
            if step in held:
                continue
            if self.saves[tag].whole and not self.saves[tag].pruned:
                raise BrokenPromise(f"{when}: nothing has the name of step {step} any more, {tag} had it")
            del self.holders[step]
        self._require_latest(held, when)
        for step, tag in held.items():
            self.holders[step] = tag
            self.saves[tag].seen, self.saves[tag].pruned = True, False

    def _judge(self, folder: Found, when: str) -> None:
        if folder.place == "replaced" and folder.step == _FINAL:
            return  # on its way out: the new one is durable
        save = self.saves.get(folder.tag)
        if save is None:
            names = sorted(folder.files)
            raise BrokenPromise(f"{when}: {folder.path} holds what nobody had begun to commit: {folder.tag!r} {names}")
        if save.step != folder.step:
            raise BrokenPromise(f"{when}: {folder.path} holds {save.tag}, which is of step {save.step}")
        expected = dict(save.files)
        if MANIFEST not in expected and save.whole:
            _require_agreement(folder, save, when)
            save.files[MANIFEST] = expected[MANIFEST] = folder.files[MANIFEST]
        differing = sorted(n for n in {*expected, *folder.files} if expected.get(n) != folder.files.get(n))
        if differing:
            raise BrokenPromise(f"{when}: {folder.path} is torn or changed: {', '.join(differing)} of {save.tag}")
        if folder.place == "aside" and save.whole and not self._has_rival(save):
            raise BrokenPromise(f"{when}: {folder.path} was set aside and is whole ({save.tag})")

    def _has_rival(self, save: Saved) -> bool:
        return any(other.step == save.step and other is not save for other in self.saves.values())

    def _require_latest(self, held: Mapping[int, str], when: str) -> None:
        """What has a name is no older than the last save of it that had returned before another one began."""
        for save in self.saves.values():
            if not save.returned or save.pruned or not save.whole:
                continue
            tag = held.get(save.step)
            if tag is None and save.step == _FINAL:
                raise BrokenPromise(f"{when}: there is no final/, {save.tag} was one")
            holder = self.saves[tag] if tag is not None else None
            if holder is not None and holder.returned and holder.returned < save.begun:
                raise BrokenPromise(f"{when}: {holder.tag} has a name that {save.tag} had got after it")

    # -- what a resume takes -------------------------------------------------------------------------------------------

    def newest(self) -> int:
        """The step that a resume must take; 0 for the beginning."""
        return max((step for step, tag in self.holders.items() if step > 0 and self.saves[tag].whole), default=0)

    def require_taken(self, board: Board, when: str) -> None:
        """Before what the generation has done itself is absorbed."""
        step, tag = board.taken or (None, "")
        if step != self.newest():
            raise BrokenPromise(f"{when}: step {step} is taken, the newest whole one is of step {self.newest()}")
        if step and tag != self.holders[step]:
            raise BrokenPromise(f"{when}: {tag} is taken, {self.holders[step]} has the name of step {step}")

    def require_not_overtaken(self, late: Sequence[Operation], board: Board, when: str) -> None:
        """Nothing that a late process has saved is newer than what the next generation (`board`) has taken."""
        if board.taken is None:
            return
        step, tag = board.taken
        of_late = {operation.tag for operation in late if operation.kind is Kind.COMMIT}
        for held_step, holder in self.holders.items():
            if holder in of_late and (held_step > step or (held_step == step and holder != tag)):
                raise BrokenPromise(f"{when}: {holder} of step {held_step} appeared after {tag or 'nothing'} was taken")

    def require_tidy(self, output_dir: Path, when: str) -> None:
        """After a generation has begun and saved: nothing of earlier ones is left but checkpoints and what was set
        aside."""
        for path in output_dir.iterdir():
            if not (_NAME.match(path.name) or _ASIDE.match(path.name) or path.name in ("final", "ftlaunch")):
                raise BrokenPromise(f"{when}: {path} is left over")
        for path in output_dir.rglob("*"):
            if path.name in (DISPLACED, MANIFEST + ".tmp"):
                raise BrokenPromise(f"{when}: {path} is left over")
        for path in (output_dir / "ftlaunch" / "staging").glob("*/*"):
            raise BrokenPromise(f"{when}: {path} is left over")
        if len(left := list((output_dir / "ftlaunch" / "staging").glob("*"))) > 1:
            raise BrokenPromise(f"{when}: {left} are left over")

    def require_pruned(self, keep: int, when: str) -> None:
        """After a prune that has returned, by the only process."""
        counted = sorted((s for s, tag in self.holders.items() if s > 0 and self.saves[tag].countable), reverse=True)
        if len(counted) > keep:
            raise BrokenPromise(f"{when}: {keep} are to be kept, there are {counted}")

    # -- damage from outside -------------------------------------------------------------------------------------------

    def damage(self, output_dir: Path, rng: random.Random) -> str:
        """Somebody harms the newest checkpoint, or puts a folder of his own there; returns what was done."""
        newest = self.newest()
        kind = rng.choice(("flipped", "cut short", "no manifest", "foreign") if newest else ("foreign",))
        if kind == "foreign":
            step = max((step for step in self.holders if step > 0), default=0) + rng.choice((5, 1000))
            tag = f"foreign-{len(self.saves)}-0"
            files = {TAG_FILE: tag.encode(), "notes.txt": b"half"}
            folder = output_dir / f"checkpoint-{step}"
            if folder.exists():
                return "nothing"
            folder.mkdir(parents=True)
            for name, content in files.items():
                (folder / name).write_bytes(content)
            self.saves[tag] = Saved(tag, step, files, 0, 0, whole=False, countable=False, seen=True)
            return f"{folder.name} of another tool"
        save = self.saves[self.holders[newest]]
        path = output_dir / f"checkpoint-{newest}"
        if not path.is_dir():
            return "nothing"  # it stands between two names
        if kind == "no manifest":
            (path / MANIFEST).unlink()
            del save.files[MANIFEST]
        else:
            names = ["adapter_model.safetensors", "scheduler.pt", *([MANIFEST] if kind == "cut short" else [])]
            name = rng.choice(names)
            content = save.files[name]
            at = rng.randrange(len(content))
            changed = content[:at] + (bytes([content[at] ^ 1]) + content[at + 1 :] if kind == "flipped" else b"")
            (path / name).write_bytes(changed)
            save.files[name] = changed
        save.whole = False
        save.countable = kind == "flipped"
        return f"checkpoint-{newest} {kind}"


def find(output_dir: Path) -> Iterator[Found]:
    """Every folder that has a final name, was set aside, or was moved away from its name by a commit."""
    for entry in os.scandir(output_dir):
        path = Path(entry.path)
        if (match := _NAME.match(entry.name)) or entry.name == "final":
            step = int(match[1]) if match else _FINAL
            yield Found(path, step, "name", _read(path))
            if (path / DISPLACED).is_dir():
                yield Found(path / DISPLACED, step, "replaced", _read(path / DISPLACED))
        elif match := _ASIDE.match(entry.name):
            yield Found(path, int(match[1] or _FINAL), "aside", _read(path))
    for path in (output_dir / "ftlaunch" / "staging").glob(f"*/*/{DISPLACED}"):
        if (match := _NAME.match(path.parent.name)) or path.parent.name == "final":
            yield Found(path, int(match[1]) if match else _FINAL, "displaced", _read(path))


def _by_claim(folder: Found) -> int:
    """What has the name comes last, so that it counts."""
    return int(folder.place == "name")


def _read(folder: Path) -> dict[str, bytes]:
    """Relative name -> content, without what was moved into the folder."""
    return {name: _content(path) for name, path in _files(str(folder), "") if not name.startswith(DISPLACED + "/")}


def _files(folder: str, prefix: str) -> Iterator[tuple[str, str]]:
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                yield from _files(entry.path, f"{prefix}{entry.name}/")
            else:
                yield prefix + entry.name, entry.path


def _content(path: str) -> bytes:
    with open(path, "rb", buffering=0) as stream:
        return stream.read()


def copy_folder(source: str, target: str) -> None:
    """Folders and contents, nothing else: as a kill has left them."""
    os.mkdir(target)
    with os.scandir(source) as entries:
        for entry in entries:
            to = os.path.join(target, entry.name)
            if entry.is_dir(follow_symlinks=False):
                copy_folder(entry.path, to)
            else:
                with open(to, "wb", buffering=0) as stream:
                    stream.write(_content(entry.path))


def _require_agreement(folder: Found, save: Saved, when: str) -> None:
    """The manifest says what was written, and nothing else."""
    try:
        recorded = json.loads(folder.files[MANIFEST])
    except (KeyError, ValueError) as error:
        raise BrokenPromise(f"{when}: {folder.path} has its name without a manifest that can be read") from error
    expected = {
        name: {"size_bytes": len(content), "xxh3_128": xxhash.xxh3_128_hexdigest(content)}
        for name, content in save.files.items()
    }
    if recorded["files"] != expected or recorded["run_id"] != save.tag:
        raise BrokenPromise(f"{when}: {folder.path} has a manifest that does not agree with what {save.tag} wrote")
