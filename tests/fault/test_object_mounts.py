"""A run on an object mount, real or as its documents say: it saves, is killed, resumes and ends; nothing half is taken.

The mounts: tests/mounts. Skipped where none can be made.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from launcher.checkpoint.commit import clear_staging
from launcher.checkpoint.in_place import UNFINISHED_NAME
from launcher.checkpoint.manifest import MANIFEST_NAME, Manifest
from launcher.checkpoint.publish import publication, raise_fence, set_judged_apart
from launcher.checkpoint.verify import list_checkpoints, verify_checkpoint
from launcher.host.storage import StorageKind, find_mount
from launcher.host.storage_probe import probe_storage
from tests.fault.harness import ROOT, Job, base_config, merged
from tests.mounts.mounted import Stand, mounted, why_not
from tests.unit.checkpoint.checkpoint_folders import manifest_of, state_files

OBJECT = StorageKind.OBJECT
FSTYPES = {Stand.JINDO: "fuse.jindofs-fuse", Stand.S3FS: "fuse.s3fs"}


@pytest.fixture(params=list(Stand), ids=lambda stand: stand.value)
def stand(request: pytest.FixtureRequest) -> Stand:
    found: Stand = request.param
    if reason := why_not(found):
        pytest.skip(reason)
    return found


@pytest.fixture
def mount(stand: Stand, tmp_path: Path) -> Iterator[Path]:
    with mounted(stand, tmp_path) as point:
        yield point


@pytest.fixture
def two_machines(tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    """Two mounts of one bucket, each of which goes on for a second with what it knew."""
    if reason := why_not(Stand.JINDO):
        pytest.skip(reason)
    with ExitStack() as stack:
        points = [
            stack.enter_context(mounted(Stand.JINDO, tmp_path, "--timeout", "1", name=name)) for name in ("one", "two")
        ]
        yield points[0], points[1]


# ---- the whole program ----


def test_a_run_is_killed_resumes_and_ends(stand: Stand, mount: Path, tiny: Path, tmp_path: Path) -> None:
    local = tmp_path / "local"
    local.mkdir()
    environ = {"TMPDIR": str(local)}
    changes: dict[str, Any] = {"training": {"max_steps": 4000}, "checkpoint": {"every_steps": 4, "keep": 3}}
    job = Job(tmp_path / "job", merged(base_config(tiny, mount / "out"), changes))
    with job.start(environ=environ) as run:
        run.until_event("checkpoint_saved")
        os.kill(run.rank_pid(1), signal.SIGKILL)
        run.until_event("checkpoint_saved", gen=2)
        assert run.events("resumed")[0]["step"] >= 4
        cut = during_a_save(run.until, job.output_dir)
        run.process.kill()
        run.process.wait()
        assert not run.left_after(15)
    before = checkpoints(job)
    assert cut not in [row["step"] for row in before["checkpoints"]], "it has the name and is none"
    newest = before["checkpoints"][0]
    assert (newest["whole"], newest["resumes"]) == (True, True)

    job.configure(merged(job.config, {"training": {"max_steps": cut + 1}}))
    run = job.run(environ=environ)
    assert run.process.returncode == 0, run.log
    assert run.events("resumed")[0]["step"] == newest["step"] < cut
    after = checkpoints(job)
    assert after["final_step"] == cut + 1
    assert [row["step"] for row in after["checkpoints"][:2]] == [cut + 1, cut]
    assert all(row["whole"] for row in after["checkpoints"]), after
    assert len(after["checkpoints"]) == 3
    last = run.events("generation_started")[-1]["gen"]
    assert (job.output_dir / "ftlaunch" / "logs" / f"gen-{last}" / "rank-0.log").stat().st_size
    assert [path.name for path in local.rglob("*") if path.is_file() and path.name != "lock"] == []
    assert looked_at("status", str(job.output_dir))["state"] == "ended"


def during_a_save(until: Callable[..., None], output_dir: Path) -> int:
    """The step of a checkpoint that is being put at this moment."""
    found: list[int] = []

    def seen() -> bool:
        for path in output_dir.glob("checkpoint-*"):
            if (path / UNFINISHED_NAME).exists() and not (path / MANIFEST_NAME).exists():
                found.append(int(path.name.partition("-")[2]))
        return bool(found)

    until(seen, "a checkpoint is being put")
    return found[0]


def checkpoints(job: Job) -> dict[str, Any]:
    return looked_at("checkpoints", str(job.output_dir), "--verify")


def looked_at(*arguments: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "launcher", *arguments, "--json"],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    document: dict[str, Any] = json.loads(done.stdout)
    return document


# ---- its parts ----


def test_the_probe_names_the_kind_and_leaves_nothing(stand: Stand, mount: Path) -> None:
    probe = probe_storage(mount / "out", find_mount(mount))
    assert (probe.kind, probe.fstype, probe.unusable, probe.not_tried) == (OBJECT, FSTYPES[stand], "", "")
    assert probe.can("rename folder"), "which is why operations alone do not decide"
    assert probe.can("append") == (stand is Stand.S3FS)
    assert list(mount.iterdir()) == []


def test_jindofuse_that_may_append_is_an_object_mount_all_the_same(tmp_path: Path) -> None:
    if reason := why_not(Stand.JINDO):
        pytest.skip(reason)
    with mounted(Stand.JINDO, tmp_path, "--append") as point:
        probe = probe_storage(point, find_mount(point))
    assert probe.kind is OBJECT
    assert "truncate: ENOTSUP (Operation not supported)" in probe.reasons


PUT_FOR_EVER = """
import sys
from pathlib import Path
from launcher.checkpoint.publish import publication
from launcher.host.storage import StorageKind
target = publication(StorageKind.OBJECT, Path(sys.argv[1]), 1, "checkpoint-20")
target.put("trainer_state.json", [b"{}"])
def chunks():
    while True:
        yield bytes(1 << 16)
        print("goes on", flush=True)
target.put("model.safetensors", chunks())
"""


def test_a_put_that_is_cut_by_sigkill_is_not_taken(mount: Path) -> None:
    publish(mount, 10)
    with subprocess.Popen(
        [sys.executable, "-c", PUT_FOR_EVER, str(mount)],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    ) as writer:
        assert writer.stdout is not None
        for _ in range(4):
            assert writer.stdout.readline()
        writer.kill()
    assert (mount / "checkpoint-20").is_dir()
    assert [step for step, _ in list_checkpoints(mount)] == [10]
    # The next generation saves the same step; what was left is in nobody's way.
    next_generation(mount, 2)
    publish(mount, 20, generation=2)
    assert whole_steps(mount) == [20, 10]
    assert not (mount / "checkpoint-20" / "model.safetensors").exists()


def test_a_damaged_checkpoint_is_set_apart_and_the_one_before_is_taken(mount: Path) -> None:
    for step in (10, 20):
        publish(mount, step)
    (mount / "checkpoint-20" / "scheduler.pt").unlink()
    set_judged_apart(verify_checkpoint(mount / "checkpoint-20", 20))
    assert whole_steps(mount) == [10]
    assert [step for step, _ in list_checkpoints(mount)] == [10]


def test_files_of_another_machine_that_are_seen_late(two_machines: tuple[Path, Path]) -> None:
    one, two = two_machines
    assert not (two / "checkpoint-10").exists()  # from now on `two` knows for a second that it is not there
    target = publication(OBJECT, one, 1, "checkpoint-10")
    files = {name: target.put(name, [content]) for name, content in state_files(10, 2).items()}
    began = time.monotonic()
    assert not (two / "checkpoint-10").exists(), "the stand-in shows what it is there to show"
    publication(OBJECT, two, 1, "checkpoint-10").publish(manifest_with(files, 10))
    assert time.monotonic() - began > 0.3, "it has waited until it could see them"
    assert whole_steps(two) == [10]
    until(lambda: whole_steps(one) == [10])


def test_a_machine_that_was_cut_off_publishes_and_spoils_nothing(two_machines: tuple[Path, Path]) -> None:
    one, two = two_machines
    publish(one, 10)
    late = publication(OBJECT, one, 1, "checkpoint-20")
    files = {name: late.put(name, [content]) for name, content in state_files(20, 2).items()}
    next_generation(two, 2)
    time.sleep(1.2)  # as long as `one` may believe that it is still its turn
    with pytest.raises(FileNotFoundError, match="generation 1 is over"):
        late.put("more", [b"late"])
    with pytest.raises(FileNotFoundError, match="generation 1 is over"):
        late.publish(manifest_with(files, 20))
    with pytest.raises(FileNotFoundError, match="generation 1 is over"):
        publish(one, 30)
    publish(two, 20, generation=2)
    assert whole_steps(two) == [20, 10]


def publish(output_dir: Path, step: int, *, generation: int = 1) -> None:
    target = publication(OBJECT, output_dir, generation, f"checkpoint-{step}")
    files = {name: target.put(name, [content]) for name, content in state_files(step, 2).items()}
    target.publish(manifest_with(files, step))


def manifest_with(files: Any, step: int) -> Manifest:
    return manifest_of(Path("/nowhere"), step, files=files)


def next_generation(output_dir: Path, number: int) -> None:
    clear_staging(output_dir, below=number)
    raise_fence(output_dir, number)


def whole_steps(output_dir: Path) -> list[int]:
    return [step for step, path in list_checkpoints(output_dir) if verify_checkpoint(path, step).whole]


def until(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)
