"""What one generation does to the output folder, as agent and rank 0 do it, without a training: resume, saves, pruning,
final/. The real code on real files, in one place; whoever adds a way to save adds it here (`Code`).

The process may be killed anywhere in it. What it was about to do, and what it had done, stands in a `Board`: memory
that it shares with whoever kills it.
"""

from __future__ import annotations

import mmap
import struct
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

from launcher.agent import resume
from launcher.agent.resume import LookAgain, Resume, look_for_resume, take_resume
from launcher.checkpoint.choose import Choice, set_judged_aside
from launcher.checkpoint.commit import FINAL_NAME, Committed, clear_staging, commit_folder, prune, staging_root
from launcher.checkpoint.manifest import FileRecord, Manifest, record_files
from launcher.checkpoint.publish import prune_published, publication
from launcher.host.storage import StorageKind

IDENTITY: Mapping[str, Any] = {"model.path": "/models/base", "method": "lora", "deepspeed.stage": 2}
TAG_FILE = "README.md"  # holds the tag alone: says which save a folder is of, whatever else has happened to it
STEP_SIZE = 10
MAX_LOOKS = 50
MAX_OPERATIONS = 32


class Phase(Enum):
    CHOICE = "resume: choice"
    CLEAR = "resume: clear staging"
    SET_ASIDE = "resume: set aside"
    LOAD = "resume: load"
    SAVE = "save"
    COMMIT = "commit"
    REPLACE = "commit over a taken name"
    PRUNE = "prune"
    FINAL = "final/"


PHASES = tuple(Phase)


class Kind(Enum):
    RESUME = 0
    LOAD = 1
    WRITE = 2
    COMMIT = 3
    PRUNE = 4
    WRITE_FINAL = 5
    COMMIT_FINAL = 6


@dataclass(frozen=True)
class Operation:
    """`tag`: of the save that is written or committed, see `tag_of`; `ahead`: its step, from the one that was resumed,
    in units of `STEP_SIZE`; `keep`: of `prune`."""

    kind: Kind
    tag: str = ""
    ahead: int = 0
    keep: int = 0


@dataclass(frozen=True)
class Code:
    """The code under test, and the way in which a save gets to its name.

    `write(output_dir, generation, name, files)` writes `checkpoint-N` or final/, still nameless, and returns what a
    manifest must say of it; `commit(output_dir, generation, name, manifest, replace=, may_commit=)` gives the name.
    """

    write: Callable[[Path, int, str, Mapping[str, bytes]], Mapping[str, FileRecord]]
    commit: Callable[..., object]
    look: Callable[..., Choice] = look_for_resume
    prune: Callable[..., object] = prune
    clear_staging: Callable[..., object] = clear_staging
    set_judged_aside: Callable[..., object] = set_judged_aside


def write_staged(output_dir: Path, generation: int, name: str, files: Mapping[str, bytes]) -> Mapping[str, FileRecord]:
    """As the ranks do: straight into the staged folder, with several writes."""
    folder = staging_root(output_dir, generation) / name
    write_files(folder, files)
    return record_files(folder)


def commit_staged(output_dir: Path, generation: int, name: str, manifest: Manifest, **options: Any) -> Committed:
    return commit_folder(staging_root(output_dir, generation) / name, output_dir / name, manifest, **options)


def write_files(folder: Path, files: Mapping[str, bytes]) -> None:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        with (folder / name).open("wb", buffering=0) as stream:
            half = len(content) // 2
            stream.write(content[:half])
            stream.write(content[half:])


def write_published(
    output_dir: Path, generation: int, name: str, files: Mapping[str, bytes]
) -> Mapping[str, FileRecord]:
    """As the courier does."""
    way = publication(StorageKind.POSIX, output_dir, generation, name)
    return {
        file: way.put(file, [content[: len(content) // 2], content[len(content) // 2 :]])
        for file, content in files.items()
    }


def commit_published(output_dir: Path, generation: int, name: str, manifest: Manifest, **options: Any) -> Committed:
    return publication(StorageKind.POSIX, output_dir, generation, name).publish(manifest, **options)


STAGED = Code(write_staged, commit_staged)
PUBLISHED = Code(write_published, commit_published, prune=partial(prune_published, StorageKind.POSIX))
WAYS = (STAGED, PUBLISHED)  # every way in which a save gets to its name


class Over(RuntimeError):  # noqa: N818 - an outcome, not a defect
    """Another generation has begun: what an agent hears from the others, and answers to its rank 0."""


class NotWhole(AssertionError):  # noqa: N818 - says what it is
    """What was taken is not what was written."""


def tag_of(generation: int, number: int, big_bytes: int = 0) -> str:
    """What tells a save from all others of a history; its weights are `big_bytes` longer than they need be."""
    return f"g{generation}-{number}-{big_bytes}"


def checkpoint_files(tag: str, step: int) -> dict[str, bytes]:
    """Relative name -> content of a whole checkpoint; no file of it but the marker `latest` occurs in another save."""
    return {
        "adapter_model.safetensors": _weights(tag),
        TAG_FILE: tag.encode(),
        f"global_step{step}/bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt": f"optimizer {tag} ".encode() * 100,
        "latest": f"global_step{step}".encode(),
        "rng_state.pth": f"random state {tag}".encode(),
        "scheduler.pt": f"schedule {tag}".encode(),
        "trainer_state.json": b'{"global_step": %d, "tag": "%s"}' % (step, tag.encode()),
    }


def final_files(tag: str) -> dict[str, bytes]:
    return {"adapter_model.safetensors": _weights(tag), TAG_FILE: tag.encode(), "config.json": b"{}"}


def _weights(tag: str) -> bytes:
    return f"weights {tag} ".encode() * 40 + bytes(int(tag.rpartition("-")[2]))


class Board:
    """Where a process says what it is doing; without system calls, and readable after SIGKILL."""

    _HEAD = struct.Struct("=qqqqq40sq")  # started, phase, resumed, taken step, length of the outcome, taken tag, over
    _ROW = struct.Struct("=qqq")  # of each operation: begun and returned (monotonic ns, 0: not), step
    _OUTCOME_AT = 4096
    _SIZE_BYTES = 16384

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, self._SIZE_BYTES)

    def clear(self) -> None:
        self._memory[:] = bytes(self._SIZE_BYTES)

    def _get(self, index: int) -> Any:
        return self._HEAD.unpack_from(self._memory, 0)[index]

    def _set(self, index: int, value: Any) -> None:
        fields = list(self._HEAD.unpack_from(self._memory, 0))
        fields[index] = value
        self._HEAD.pack_into(self._memory, 0, *fields)

    def start(self) -> None:
        self._set(0, 1)

    @property
    def started(self) -> bool:
        return bool(self._get(0))

    @property
    def phase(self) -> Phase:
        index: int = self._get(1)
        return PHASES[index]

    def enter(self, phase: Phase) -> None:
        self._set(1, PHASES.index(phase))

    def resumed(self, step: int, tag: str) -> None:
        self._set(3, step)
        self._set(5, tag.encode())
        self._set(2, 1)

    @property
    def taken(self) -> tuple[int, str] | None:
        """(step, tag) of what `take_resume` has returned, (0, "") for nothing; None where it has not returned."""
        return (self._get(3), self._get(5).rstrip(b"\0").decode()) if self._get(2) else None

    def begins(self, index: int, step: int) -> None:
        self._ROW.pack_into(self._memory, self._HEAD.size + index * self._ROW.size, time.monotonic_ns(), 0, step)

    def returned(self, index: int) -> None:
        begun, _, step = self.row(index)
        at = self._HEAD.size + index * self._ROW.size
        self._ROW.pack_into(self._memory, at, begun, time.monotonic_ns(), step)

    def row(self, index: int) -> tuple[int, int, int]:
        """(begun, returned, step) of an operation; times 0 where it has not."""
        begun, returned, step = self._ROW.unpack_from(self._memory, self._HEAD.size + index * self._ROW.size)
        return begun, returned, step

    def end(self, outcome: str) -> None:
        data = outcome.encode()[-(self._SIZE_BYTES - self._OUTCOME_AT) :]
        self._memory[self._OUTCOME_AT : self._OUTCOME_AT + len(data)] = data
        self._set(4, len(data))

    @property
    def outcome(self) -> str:
        """ "" where it was killed before the end."""
        return self._memory[self._OUTCOME_AT : self._OUTCOME_AT + self._get(4)].decode("utf-8", "replace")


class Events:
    """In place of the run's event log."""

    def emit(self, event: str, **fields: Any) -> None:
        pass


@dataclass(frozen=True)
class Aim:
    """A phase of the operation numbered `index`."""

    index: int
    phase: Phase


DONE = "done"
OVER = "over"


class Generation:
    """One generation's turn. `is_over`: whether a later one has begun, as the agents would say."""

    def __init__(
        self,
        output_dir: Path,
        number: int,
        operations: Sequence[Operation],
        board: Board,
        code: Code,
        is_over: Callable[[], bool] = lambda: False,
    ) -> None:
        self.output_dir, self.number, self.operations = output_dir, number, operations
        self.board, self.code, self.is_over = board, code, is_over
        self._resumed_step = 0

    def run(self, begin: Callable[[], None] = lambda: None, *, aim: Aim | None = None) -> None:
        """All operations; `begin` is called at `aim`. How it ended stands on the board: DONE; OVER where a later
        generation has begun and this one noticed; else what went wrong."""
        self._begin = begin
        try:
            for index, operation in enumerate(self.operations):
                self._awaited = aim.phase if aim and aim.index == index else None
                step = 0 if operation.kind is Kind.RESUME else self._step(operation)
                self.board.begins(index, step)
                self._do(operation, step)
                self.board.returned(index)
            self.board.end(DONE)
        except Exception as error:  # noqa: BLE001 - the edge of a process: whoever watches it reads the board
            # A late one finds its folder, or what it has read, gone: it is told so, or stumbles over it.
            writes = operation.kind in (Kind.WRITE, Kind.WRITE_FINAL) and isinstance(error, OSError)
            late = writes or isinstance(error, (Over, NotWhole, FileNotFoundError))
            self.board.end(OVER if late and self.is_over() else traceback.format_exc())

    def _enter(self, phase: Phase) -> None:
        """Which of the two kinds a commit is shows only then: whoever waits for one takes the other as well."""
        self.board.enter(phase)
        if phase is self._awaited or {phase, self._awaited} == {Phase.COMMIT, Phase.REPLACE}:
            self._awaited = None
            self._begin()

    def _step(self, operation: Operation) -> int:
        return self._resumed_step + STEP_SIZE * (operation.ahead or (0 if self._resumed_step else 1))

    def _do(self, operation: Operation, step: int) -> None:
        name = f"checkpoint-{step}"
        if operation.kind is Kind.RESUME:
            self._resume()
        elif operation.kind is Kind.LOAD:
            self._load()
        elif operation.kind is Kind.WRITE:
            self._enter(Phase.SAVE)
            self._written = self.code.write(self.output_dir, self.number, name, checkpoint_files(operation.tag, step))
        elif operation.kind is Kind.COMMIT:
            self._enter(Phase.REPLACE if (self.output_dir / name).exists() else Phase.COMMIT)
            self._commit(name, step, operation.tag)
        elif operation.kind is Kind.PRUNE:
            self._enter(Phase.PRUNE)
            self.code.prune(self.output_dir, keep=operation.keep, generation=self.number)
        elif operation.kind is Kind.WRITE_FINAL:
            self._enter(Phase.FINAL)
            self._written = self.code.write(self.output_dir, self.number, FINAL_NAME, final_files(operation.tag))
        elif operation.kind is Kind.COMMIT_FINAL:
            self._enter(Phase.FINAL)
            self._commit(FINAL_NAME, step, operation.tag, replace=True)

    def _resume(self) -> None:
        """As `Supervisor._resume`."""
        for _ in range(MAX_LOOKS):
            self._enter(Phase.CHOICE)
            choice = self.code.look(self.output_dir, IDENTITY, cancelled=lambda: False)
            if self.is_over():
                raise Over
            try:
                taken = self._take(choice)
            except LookAgain:
                continue
            self._resumed_step = taken.step
            self._taken = Path(taken.path) if taken.path else None
            self.board.resumed(taken.step, choice.manifest.run_id if choice.manifest else "")
            return
        raise RuntimeError(f"no checkpoint could be taken in {MAX_LOOKS} looks")

    def _take(self, choice: Choice) -> Resume:
        with patch.multiple(
            resume,
            clear_staging=partial(self._within, Phase.CLEAR, self.code.clear_staging),
            set_judged_aside=partial(self._within, Phase.SET_ASIDE, self.code.set_judged_aside),
        ):
            return take_resume(self.output_dir, choice, self.number, Events(), lambda line: None)  # type: ignore[arg-type]

    def _within(self, phase: Phase, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._enter(phase)
        result = call(*args, **kwargs)
        self.board.enter(Phase.CHOICE)
        return result

    def _load(self) -> None:
        """What the ranks read is what was written in one save, to the last byte."""
        self._enter(Phase.LOAD)
        if self._taken is None:
            return
        tag = (self._taken / TAG_FILE).read_text()
        if tag != (self.board.taken or (0, ""))[1]:
            raise NotWhole(f"{self._taken} says that it is {tag}, its manifest says {self.board.taken}")
        for name, content in checkpoint_files(tag, self._resumed_step).items():
            if (self._taken / name).read_bytes() != content:
                raise NotWhole(f"{self._taken / name} is not what {tag} wrote")

    def _commit(self, name: str, step: int, tag: str, *, replace: bool = False) -> None:
        self.code.commit(
            self.output_dir,
            self.number,
            name,
            self._manifest(step, tag, "final" if replace else "checkpoint"),
            replace=replace,
            may_commit=self._may_commit,
        )

    def _may_commit(self) -> None:
        if self.is_over():
            raise Over

    def _manifest(self, step: int, tag: str, kind: str) -> Manifest:
        return Manifest(
            kind=kind,
            step=step,
            world_size=1,
            num_nodes=1,
            precision="bf16",
            run_id=tag,
            config_sha="0123456789abcdef",
            identity=IDENTITY,
            samples_seen=step * 8,
            versions={},
            files=self._written,
            global_batch_size=8,
        )
