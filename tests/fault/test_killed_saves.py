"""Killed at any system call, the code that saves and resumes takes nothing torn and loses nothing whole; and the search
for broken promises finds them in code that breaks them. `scripts/kill_saves.py` does the same ten thousand times."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from launcher.checkpoint.choose import Choice, choose_checkpoint, set_aside
from launcher.checkpoint.commit import DISPLACED_NAME, STAGING_NAME, Committed, prune, staging_root
from launcher.checkpoint.manifest import MANIFEST_NAME, FileRecord, Manifest, write_manifest
from launcher.checkpoint.verify import Verification, list_checkpoints
from tests.fault.killed_saves import Broken, Tally, run_histories
from tests.fault.save_script import (
    STAGED,
    Aim,
    Board,
    Code,
    Generation,
    Kind,
    Operation,
    Phase,
    write_files,
    write_staged,
)
from tests.fault.traced import Call, Calls, Moment, TracedChild, why_no_tracing

pytestmark = pytest.mark.skipif(why_no_tracing() is not None, reason=str(why_no_tracing()))

SAVE = (Operation(Kind.WRITE, "g1-0-0", 1), Operation(Kind.COMMIT, "g1-0-0", 1), Operation(Kind.PRUNE, keep=1))


@pytest.fixture
def folder() -> Iterator[Path]:
    """In memory, where there is such a place: there is no power to lose here, and fsync costs nothing."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as name:
        yield Path(name)


def test_nothing_torn_is_taken_and_nothing_whole_is_lost(folder: Path) -> None:
    tally = Tally()
    for result in run_histories(300, [folder], seed=1):
        assert isinstance(result, Tally), f"seed {result.seed}: {result.message}\n{result.folder}"
        tally.merge(result)
    assert tally.num_kills >= 300
    assert tally.num_recoveries >= tally.num_histories
    killed = {phase for phase, number in tally.kills.items() if number}
    assert killed >= set(Phase) - {Phase.LOAD}, "every phase met a kill"
    assert "rename" in tally.names[Phase.COMMIT]


# -- code that breaks a promise ----------------------------------------------------------------------------------------


def committing_by(commit: Callable[..., Committed]) -> Code:
    """`commit` in place of `commit_folder`."""
    return replace(STAGED, commit=partial(commit_staged_by, commit))


def commit_staged_by(
    commit: Callable[..., Committed], output_dir: Path, generation: int, name: str, manifest: Manifest, **options: Any
) -> Committed:
    return commit(staging_root(output_dir, generation) / name, output_dir / name, manifest, **options)


def named_before_the_manifest(staged: Path, final: Path, manifest: Manifest, **_: Any) -> Committed:
    if final.exists():
        final.rename(staged / DISPLACED_NAME)
    staged.rename(final)
    write_manifest(final, manifest)
    return Committed(final, 0)


def the_old_one_removed_first(staged: Path, final: Path, manifest: Manifest, **_: Any) -> Committed:
    write_manifest(staged, manifest)
    if final.exists():
        shutil.rmtree(final)
    staged.rename(final)
    return Committed(final, 0)


def the_old_one_moved_beside(
    staged: Path, final: Path, manifest: Manifest, *, may_commit: Callable[[], None], **_: Any
) -> Committed:
    """Not into the staged folder, where it fails for a late process."""
    write_manifest(staged, manifest)
    may_commit()
    if final.exists():
        set_aside(final)
    staged.rename(final)
    return Committed(final, 0)


def straight_to_the_name(
    output_dir: Path, generation: int, name: str, files: Mapping[str, bytes]
) -> Mapping[str, FileRecord]:
    if not (output_dir / name).exists():
        write_files(output_dir / name, files)
    return write_staged(output_dir, generation, name, files)


def pruned_in_place(output_dir: Path, keep: int, generation: int) -> None:
    for _, path in list_checkpoints(output_dir)[keep:]:
        shutil.rmtree(path)


def one_too_many_pruned(output_dir: Path, keep: int, generation: int) -> None:
    prune(output_dir, keep=max(1, keep - 1), generation=generation)


def what_was_displaced_cleared_as_well(output_dir: Path, below: int) -> None:
    shutil.rmtree(output_dir / STAGING_NAME, ignore_errors=True)


def staging_never_cleared(output_dir: Path, below: int) -> None:
    pass


def refused_ones_deleted(judged: Verification) -> Path:
    shutil.rmtree(judged.path)
    return judged.path


def contents_not_compared(output_dir: Path, identity: Mapping[str, Any], **_: Any) -> Choice:
    return choose_checkpoint(output_dir, identity, hashes=False)


BROKEN: Mapping[str, tuple[Code, Phase]] = {
    "named before the manifest": (committing_by(named_before_the_manifest), Phase.COMMIT),
    "the old one removed first": (committing_by(the_old_one_removed_first), Phase.REPLACE),
    "the old one moved beside": (committing_by(the_old_one_moved_beside), Phase.REPLACE),
    "straight to the name": (replace(STAGED, write=straight_to_the_name), Phase.SAVE),
    "pruned in place": (replace(STAGED, prune=pruned_in_place), Phase.PRUNE),
    "one too many pruned": (replace(STAGED, prune=one_too_many_pruned), Phase.PRUNE),
    "what was displaced cleared as well": (
        replace(STAGED, clear_staging=what_was_displaced_cleared_as_well),
        Phase.REPLACE,
    ),
    "staging never cleared": (replace(STAGED, clear_staging=staging_never_cleared), Phase.SAVE),
    "contents not compared": (replace(STAGED, look=contents_not_compared), Phase.SET_ASIDE),
    "refused ones deleted": (replace(STAGED, set_judged_aside=refused_ones_deleted), Phase.SET_ASIDE),
}


@pytest.mark.parametrize(("code", "phase"), BROKEN.values(), ids=BROKEN)
def test_code_that_breaks_a_promise_is_found(folder: Path, code: Code, phase: Phase) -> None:
    results = run_histories(600, [folder], seed=1, codes=[code], phases=[phase])
    found = [result for result in results if isinstance(result, Broken)]
    assert found, "600 kills and nothing was noticed"
    assert (found[0].folder / "out").is_dir(), "the folder is kept"
    print(found[0].message)


# -- a loss of power: what a kill cannot show, the order of calls does ------------------------------------------------


@pytest.mark.parametrize("taken", [False, True], ids=["free name", "name is taken"])
def test_everything_is_synced_before_the_rename_that_needs_it(tmp_path: Path, taken: bool) -> None:
    output_dir = tmp_path / "out"
    output_dir.mkdir()
    resume = Operation(Kind.RESUME)
    if taken:
        earlier = [resume, *(Operation(o.kind, "g0-0-0", 1, keep=9) for o in SAVE)]
        Generation(output_dir, 1, earlier, Board(), STAGED).run()
        again = [Operation(o.kind, o.tag, 0, o.keep) for o in SAVE]
    calls = trace(output_dir, [resume, *(again if taken else SAVE)])
    staged, final = str(output_dir / STAGING_NAME / "gen-2" / "checkpoint-10"), str(output_dir / "checkpoint-10")

    named = position(calls, "rename", (staged, final))
    manifest_named = position(calls, "rename", (f"{staged}/{MANIFEST_NAME}.tmp", f"{staged}/{MANIFEST_NAME}"))
    assert manifest_named < named
    files = [path for path in Path(final).rglob("*") if path.is_file() and DISPLACED_NAME not in path.parts]
    assert len(files) == 8
    for path in files:
        name = f"{staged}/{path.relative_to(final)}"
        if path.name != MANIFEST_NAME:
            synced = position(calls, "fsync", (name,))
            assert last(calls, "write", name) < synced < manifest_named, path
    manifest_synced = position(calls, "fsync", (f"{staged}/{MANIFEST_NAME}.tmp",))
    assert last(calls, "write", f"{staged}/{MANIFEST_NAME}.tmp") < manifest_synced < manifest_named
    inner = position(calls, "fsync", (f"{staged}/global_step10",))
    assert inner < manifest_named < position(calls, "fsync", (staged,)) < named
    assert position(calls, "fsync", (str(output_dir),)) > named
    if taken:
        assert manifest_named < position(calls, "rename", (final, f"{staged}/{DISPLACED_NAME}")) < named


def trace(output_dir: Path, operations: list[Operation]) -> list[Call]:
    """The calls that change the disk, in order, as each was entered."""
    generation = Generation(output_dir, 2, operations, Board(), STAGED)
    child = TracedChild(partial(generation.run, aim=Aim(1, Phase.SAVE)), Calls.CHANGING)
    assert child.wait_until_traced()
    calls = []
    while child.step():
        if (call := child.call()).moment is Moment.ENTRY:
            calls.append(call)
    assert generation.board.outcome == "done"
    return calls


def position(calls: list[Call], name: str, paths: tuple[str, ...]) -> int:
    (found,) = [index for index, call in enumerate(calls) if (call.name, call.paths) == (name, paths)]
    return found


def last(calls: list[Call], name: str, path: str) -> int:
    return max(index for index, call in enumerate(calls) if (call.name, call.paths) == (name, (path,)))
