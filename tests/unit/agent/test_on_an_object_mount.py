"""What an agent keeps beside an object mount: the lock, the logs, what ranks are told; and what it takes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from launcher.agent.events import EventLog
from launcher.agent.living import Life, life_of_lock
from launcher.agent.object_lock import ObjectRunLock
from launcher.agent.resume import Resume, look_for_resume, newest_step, take_resume
from launcher.agent.work_folder import WorkFolder
from launcher.checkpoint.publish import publication
from launcher.cli.main import main
from launcher.errors import RunsHereAlready
from launcher.host.local_folder import local_folder
from launcher.host.storage import StorageKind
from launcher.plan.spec import RankSpec
from tests.unit.checkpoint.checkpoint_folders import IDENTITY, manifest_of, state_files

OBJECT = StorageKind.OBJECT
ELSEWHERE = "pid 7 on lost (boot 01234567, pid:[4026531836], started 5)"


@pytest.fixture(autouse=True)
def local(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "local"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return folder


@pytest.fixture
def output_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "out"
    (folder / "ftlaunch" / "launch").mkdir(parents=True)
    return folder


# ---- the lock ----


def test_a_second_start_on_this_machine_is_refused(output_dir: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from launcher.agent.object_lock import ObjectRunLock\n"
        "with ObjectRunLock(Path(sys.argv[1])):\n    print('held', flush=True)\n    time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(output_dir)], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        with pytest.raises(RunsHereAlready, match=f"{output_dir} is in use by another ftlaunch .pid {other.pid} "):
            ObjectRunLock(output_dir).__enter__()
        other.kill()
    said: list[str] = []
    with ObjectRunLock(output_dir, say=said.append):
        assert f"pid {os.getpid()} on" in (output_dir / "ftlaunch" / "lock").read_text()
    assert said == [], "who was here and was killed is known to be gone"
    assert (output_dir / "ftlaunch" / "lock").read_text().strip() == ""


def test_a_start_that_was_elsewhere_is_named_and_not_waited_for(output_dir: Path) -> None:
    (output_dir / "ftlaunch" / "lock").write_text(ELSEWHERE)
    said: list[str] = []
    with ObjectRunLock(output_dir, say=said.append):
        pass
    (line,) = said
    assert ELSEWHERE in line
    assert "this start takes over" in line


def test_whether_a_start_elsewhere_lives_is_not_known(output_dir: Path) -> None:
    (output_dir / "ftlaunch" / "lock").write_text(ELSEWHERE)
    for locks_stay_here, life in (("fuse.s3fs at /mnt", Life.UNKNOWN), ("", Life.GONE)):
        agent = life_of_lock(output_dir, locks_stay_here)
        assert agent is not None
        assert agent.life is life
    (output_dir / "ftlaunch" / "lock").write_text("\n")
    agent = life_of_lock(output_dir, "fuse.s3fs at /mnt")
    assert agent is not None
    assert agent.life is Life.GONE


# ---- logs and orders ----


def test_logs_are_shown_and_nothing_is_left_on_the_nodes_own_disk(output_dir: Path, local: Path) -> None:
    work = WorkFolder(output_dir, OBJECT)
    told = work.write_spec("spec.json", "{}")
    assert told.is_relative_to(local)
    assert (output_dir / "ftlaunch" / "launch" / "spec.json").read_text() == "{}"
    log = work.logs / "gen-1" / "rank-0.log"
    log.parent.mkdir(parents=True)
    log.write_text("one\n")
    shown = work.shown(log)
    assert shown == output_dir / "ftlaunch" / "logs" / "gen-1" / "rank-0.log"
    assert work.show_logs() == ""
    assert shown.read_text() == "one\n"
    log.write_text("one\ntwo\n")
    assert work.close() == ""
    assert shown.read_text() == "one\ntwo\n"
    assert [path for path in local.rglob("*") if path.is_file()] == []


def test_logs_that_cannot_be_shown_stay_and_are_named(output_dir: Path) -> None:
    work = WorkFolder(output_dir, OBJECT)
    (work.logs / "gen-1").mkdir(parents=True)
    (work.logs / "gen-1" / "rank-0.log").write_text("one\n")
    (output_dir / "ftlaunch" / "logs").write_text("a file is in the way")
    assert f"they are in {work.logs}" in work.close()
    assert (work.logs / "gen-1" / "rank-0.log").exists()


def test_elsewhere_everything_is_in_the_output_folder(output_dir: Path, local: Path) -> None:
    work = WorkFolder(output_dir, StorageKind.POSIX)
    assert work.logs == output_dir / "ftlaunch" / "logs"
    assert work.write_spec("spec.json", "{}") == output_dir / "ftlaunch" / "launch" / "spec.json"
    work.close()
    assert list(local.iterdir()) == []


def test_the_local_folder_is_private_and_nobody_elses(output_dir: Path, local: Path, tmp_path: Path) -> None:
    folder = local_folder(output_dir)
    assert folder == local_folder(output_dir)
    assert folder != local_folder(tmp_path / "other")
    assert (folder.stat().st_mode & 0o777, folder.parent.stat().st_mode & 0o777) == (0o700, 0o700)
    folder.rmdir()
    folder.symlink_to(tmp_path)
    with pytest.raises(PermissionError, match="belongs to somebody else"):
        local_folder(output_dir)


def test_the_ranks_are_told_the_kind() -> None:
    spec = RankSpec(
        output_dir="/out",
        run_id="r",
        generation=1,
        config={},
        config_sha="c",
        device="cpu",
        precision="fp32",
        zero_stage=2,
        gradient_checkpointing=False,
        lora_target_modules=None,
        ds_config={},
        identity={},
        global_batch_size=4,
        storage_kind=OBJECT,
    )
    assert RankSpec.from_json(spec.to_json()).storage_kind is OBJECT


# ---- checkpoints ----


def publish(output_dir: Path, step: int, *, unfinished: bool = False) -> Path:
    target = publication(OBJECT, output_dir, 1, f"checkpoint-{step}")
    files = {name: target.put(name, [content]) for name, content in state_files(step, 2).items()}
    if not unfinished:
        target.publish(manifest_of(output_dir / "nowhere", step, files=files))
    return output_dir / f"checkpoint-{step}"


def test_what_is_unfinished_or_damaged_is_passed_over(output_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    publish(output_dir, 10)
    (publish(output_dir, 20) / "scheduler.pt").write_bytes(b"")
    publish(output_dir, 30, unfinished=True)
    said: list[str] = []
    choice = look_for_resume(output_dir, IDENTITY, cancelled=lambda: False)
    resume = take_resume(output_dir, choice, 2, EventLog(output_dir, "n0"), said.append, kind=OBJECT)
    assert resume == Resume(str(output_dir / "checkpoint-10"), 10, 80, 2, 8)
    assert newest_step(output_dir) == 10
    (line,) = said
    assert line.startswith("checkpoint-20 is refused: scheduler.pt has 0 bytes")
    assert "stays where it is" in line
    main(["checkpoints", str(output_dir), "--json"])
    document = json.loads(capsys.readouterr().out)
    assert [row["step"] for row in document["checkpoints"]] == [10]
    assert document["set_aside"] == ["checkpoint-20"]


def test_status_puts_the_parts_of_a_record_together(output_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = EventLog(output_dir, "n0")
    log.emit("run_started", run_id="abc", agent_pid=7)
    log.emit("generation_started", reason="start")
    log.path.rename(log.path.with_name("n0.part-0001.jsonl"))
    EventLog(output_dir, "n0").emit("run_ended", exit_code=138, reason="stopped", steps=1, goodput=0.5)
    assert main(["status", str(output_dir), "--json"]) == 0
    status = json.loads(capsys.readouterr().out)
    assert (status["state"], status["run_id"]) == ("ended", "abc")
