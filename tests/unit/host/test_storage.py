"""Where the output folder lies, without changing it; /dev/shm of any size in a mount namespace."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pytest

from launcher.host.storage import Mount, find_mount, read_disk, read_shm, why_locks_stay_here
from tests.unit.host.namespaces import InNamespace

MIB = 1 << 20


@pytest.mark.root
def test_a_dev_shm_of_64_mib_half_full(in_namespace: InNamespace) -> None:
    code = """
import dataclasses, json
from launcher.host.storage import read_shm
print(json.dumps(dataclasses.asdict(read_shm())))
"""
    shm = json.loads(
        in_namespace(
            code,
            "mount -t tmpfs -o size=64m tmpfs /dev/shm",
            "dd if=/dev/zero of=/dev/shm/left bs=1M count=32 2>/dev/null",
        )
    )
    assert shm == {"path": "/dev/shm", "size_bytes": 64 * MIB, "free_bytes": 32 * MIB}


@pytest.mark.root
def test_a_read_only_mount(in_namespace: InNamespace, tmp_path: Path) -> None:
    code = f"""
import dataclasses, json, pathlib
from launcher.host.storage import find_mount, read_disk
folder = pathlib.Path({str(tmp_path)!r}, "runs", "a")
print(json.dumps([dataclasses.asdict(read_disk(folder)), dataclasses.asdict(find_mount(folder))]))
"""
    mount = f"mount -t tmpfs -o ro,size=8m data {tmp_path}"
    disk, found = json.loads(in_namespace(code, mount))
    assert disk["path"] == str(tmp_path)
    assert "mounted read-only" in disk["writable"]
    assert (found["path"], found["fstype"], found["source"]) == (str(tmp_path), "tmpfs", "data")
    assert "ro" in found["options"].split(",")


def test_the_folder_is_not_made(tmp_path: Path) -> None:
    disk = read_disk(tmp_path / "runs" / "first")
    assert (disk.path, disk.writable) == (str(tmp_path), "ok")
    assert disk.free_bytes
    assert list(tmp_path.iterdir()) == []


def test_a_file_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "runs").touch()
    assert "is a file, not a folder" in read_disk(tmp_path / "runs" / "first").writable


def test_a_server_that_never_answers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    released = threading.Event()
    monkeypatch.setattr(os, "statvfs", lambda _: released.wait(30))
    disk = read_disk(tmp_path, timeout_s=0.1)
    assert disk.free_bytes is None
    assert disk.writable == f"the file system of {tmp_path} gave no answer within 0.1 s"
    released.set()


def test_no_dev_shm(tmp_path: Path) -> None:
    assert read_shm(tmp_path / "shm") is None


def test_the_mount_on_top_wins(tmp_path: Path) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/mounts").write_text(
        "/dev/vda / ext4 rw 0 0\n"
        "nas:/old /mnt/data nfs4 rw,vers=4.0 0 0\n"
        "jindo /mnt/data fuse.jindo-fuse rw,allow_other 0 0\n"
        "nas:/x /mnt/with\\040space nfs rw 0 0\n"
        "broken\n"
    )
    jindo = find_mount(Path("/mnt/data/run"), tmp_path)
    spaced = find_mount(Path("/mnt/with space/run"), tmp_path)
    beside = find_mount(Path("/mnt/database"), tmp_path)
    assert jindo is not None
    assert jindo.fstype == "fuse.jindo-fuse"
    assert spaced is not None
    assert spaced.source == "nas:/x"
    assert beside is not None
    assert beside.path == "/"
    assert find_mount(Path("/"), tmp_path / "nowhere") is None


@pytest.mark.parametrize(
    ("fstype", "options", "why"),
    [
        ("nfs4", "rw,vers=4.0,local_lock=none,hard", ""),
        ("nfs", "rw,vers=3,nolock,local_lock=all,hard", "nfs at /mnt/data with local_lock=all, nolock"),
        ("nfs", "rw,vers=3,local_lock=posix", ""),
        ("nfs", "rw,vers=3,local_lock=flock", "nfs at /mnt/data with local_lock=flock"),
        ("alinas", "rw,vers=3,nolock,local_lock=all", "alinas at /mnt/data with local_lock=all, nolock"),
        ("lustre", "rw,flock", ""),
        ("lustre", "rw,localflock", "lustre at /mnt/data with localflock"),
        ("fuse.jindo-fuse", "rw", "fuse.jindo-fuse at /mnt/data"),
        ("fuse.ossfs2", "rw", "fuse.ossfs2 at /mnt/data"),
        ("fuse.JuiceFS", "rw", ""),
        ("fuse", "rw", "fuse at /mnt/data"),
        ("virtiofs", "rw", "virtiofs at /mnt/data"),
        ("ext4", "rw", ""),
    ],
)
def test_which_locks_other_machines_see(fstype: str, options: str, why: str) -> None:
    assert why_locks_stay_here(Mount("/mnt/data", fstype, "source", options)) == why


def test_a_mount_that_is_not_known_has_locks() -> None:
    assert why_locks_stay_here(None) == ""
