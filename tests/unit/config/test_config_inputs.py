from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from launcher.config.inputs import check_inputs, model_folder
from launcher.config.load import LoadedJob
from launcher.errors import UserError

Load = Callable[..., LoadedJob]
RECORD = '{"question": "a", "answer": "b"}\n'


@pytest.fixture(autouse=True)
def _data(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text(RECORD)


def _tree(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@pytest.mark.parametrize("write", [True, False])
def test_right_inputs_pass_and_nothing_is_left_behind(load: Load, tmp_path: Path, write: bool) -> None:
    job = load()
    before = _tree(tmp_path)
    check_inputs(job, write=write)
    assert _tree(tmp_path) == before


def test_existing_output_dir_is_left_as_it_was(load: Load, tmp_path: Path) -> None:
    (tmp_path / "runs/first/checkpoint-5").mkdir(parents=True)
    job = load()
    before = _tree(tmp_path)
    check_inputs(job)
    assert _tree(tmp_path) == before


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
@pytest.mark.parametrize("write", [True, False])
def test_output_dir_without_permission(load: Load, tmp_path: Path, write: bool) -> None:
    locked = tmp_path / "locked"
    locked.mkdir(mode=stat.S_IRUSR | stat.S_IXUSR)
    with pytest.raises(UserError, match="output_dir cannot be written"):
        check_inputs(load("", f"output_dir={locked}/run"), write=write)


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs /proc")
def test_output_dir_where_no_folder_can_be_made(load: Load) -> None:
    with pytest.raises(UserError, match="--set: output_dir cannot be written") as caught:
        check_inputs(load("", "output_dir=/proc/ftlaunch/run"))
    assert "take another output_dir" in str(caught.value)


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root for a mount namespace")
@pytest.mark.parametrize("write", ["True", "False"])
def test_output_dir_on_a_read_only_mount(load: Load, tmp_path: Path, write: str) -> None:
    (tmp_path / "volume").mkdir()
    load("", "output_dir=volume/run")
    program = (
        "import sys; from pathlib import Path; from launcher.config.load import load_job;"
        "from launcher.config.inputs import check_inputs\n"
        f"check_inputs(load_job(Path('job.yaml'), ['output_dir=volume/run'], {{}}), write={write})"
    )
    mount = 'mount -t tmpfs -o ro none volume || exit 77; exec "$@"'
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", mount, "sh", sys.executable, "-c", program],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    if done.returncode == 77 or "unshare failed" in done.stderr:
        pytest.skip("no mount namespaces here")
    assert "output_dir cannot be written" in done.stderr
    assert "read-only" in done.stderr or "read-write" in done.stderr


def test_dangling_link_as_output_dir(load: Load, tmp_path: Path) -> None:
    (tmp_path / "runs").symlink_to(tmp_path / "gone")
    with pytest.raises(UserError, match="output_dir cannot be written"):
        check_inputs(load())


def test_output_dir_must_not_be_the_model(load: Load, tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m/config.json").write_text("{}")
    with pytest.raises(UserError, match="output_dir is the folder of the model"):
        check_inputs(load("", "output_dir=m", "model.path=./m"))


def test_package_as_model() -> None:
    folder = model_folder("package:pydantic")
    assert folder is not None
    assert folder.is_dir()
    assert model_folder("package:no_such_package_here") is None
    assert model_folder("owner/model") is None


def test_compressed_parquet_and_byte_order_mark(load: Load, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"\x1f\x8b\x08 and more")
    (tmp_path / "b.jsonl").write_bytes(b"PAR1 and more")
    (tmp_path / "c.jsonl").write_bytes(b"\xef\xbb\xbf" + RECORD.encode())
    with pytest.raises(UserError, match="gunzip -k"):
        check_inputs(load("", "data.train=a.jsonl"))
    with pytest.raises(UserError, match="it is Parquet"):
        check_inputs(load("", "data.train=b.jsonl"))
    check_inputs(load("", "data.train=c.jsonl"))


def test_all_mistakes_are_shown_at_once(load: Load) -> None:
    with pytest.raises(UserError) as caught:
        check_inputs(load("deepspeed: gone.json\n", "model.path=./gone", "data.train=gone.jsonl"))
    for key in ("model.path", "data.train[0]", "deepspeed.config"):
        assert key in str(caught.value)


def test_command_is_looked_up_in_the_path_of_env(tmp_path: Path, load: Load) -> None:
    program = tmp_path / "bin" / "my-trainer"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    command = ("model=null", "data=null", "command=[my-trainer]")
    check_inputs(load("", *command, f"env.PATH={program.parent}"))
    with pytest.raises(UserError, match="command names a program that is not in PATH"):
        check_inputs(load("", *command))


def test_reading_a_job_imports_no_training_stack() -> None:
    program = (
        "import sys, launcher.config.load, launcher.config.inputs, launcher.config.schema as s; s.job_schema();"
        "sys.exit(any(name in sys.modules for name in ('torch', 'transformers', 'deepspeed')))"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False, timeout=60).returncode == 0
