"""The kind of a storage comes from what it can do and from what its type is known for."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest

from launcher.host import storage_probe
from launcher.host.storage import Mount, StorageKind, find_mount
from launcher.host.storage_probe import Failure, judge, probe_storage

NO_LINKS = Failure("hard link", "EPERM")
NO_TRUNCATE = Failure("truncate", "ENOTSUP")


@pytest.mark.parametrize(
    ("fstype", "failures", "kind"),
    [
        ("ext4", (), StorageKind.POSIX),
        ("nfs4", (), StorageKind.POSIX),
        ("vfat", (NO_LINKS,), StorageKind.POSIX),
        ("nfs4", (Failure("fsync folder", "EINVAL"), Failure("flock", "ENOLCK")), StorageKind.POSIX),
        ("fuse.juicefs", (), StorageKind.POSIX),
        ("fuse.jindofs-fuse", (), StorageKind.POSIX),  # OSS-HDFS can do all of it
        ("fuse.jindofs-fuse", (NO_TRUNCATE,), StorageKind.OBJECT),
        ("fuse.s3fs", (), StorageKind.OBJECT),  # renames folders, but object by object
        ("fuse.ossfs", (NO_LINKS,), StorageKind.OBJECT),
        ("fuse.ossfs2", (), StorageKind.OBJECT),
        ("fuse", (NO_LINKS,), StorageKind.OBJECT),
        ("", (Failure("rename folder", "EXDEV"),), StorageKind.OBJECT),
    ],
)
def test_the_kind(fstype: str, failures: tuple[Failure, ...], kind: StorageKind) -> None:
    judged, reasons = judge(fstype, failures)
    assert judged is kind
    assert bool(reasons) == (kind is StorageKind.OBJECT)


def test_a_local_folder_can_do_everything_and_is_left_as_it_was(tmp_path: Path) -> None:
    probe = probe_storage(tmp_path / "not" / "there", find_mount(tmp_path))
    assert (probe.kind, probe.failures, probe.not_tried, probe.unusable) == (StorageKind.POSIX, (), "", "")
    assert list(tmp_path.iterdir()) == []


def test_what_fails_is_named_with_its_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr(os, "ftruncate", refuse)
    probe = probe_storage(tmp_path, None)
    assert [failure.operation for failure in probe.failures] == ["truncate"]
    assert probe.reasons == (f"truncate: {probe.failures[0].error}",)
    assert "Operation not supported" in probe.reasons[0]
    assert not probe.can("truncate")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_not_what_was_renamed_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mount may say that it has renamed a folder, and show it without what was in it."""
    rename = Path.rename

    def empty(path: Path, target: Path) -> Path:
        if path.is_dir():
            (path / "file").unlink()
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", empty)
    monkeypatch.setattr(storage_probe, "VISIBLE_WITHIN_S", 0.1)
    assert [failure.operation for failure in probe_storage(tmp_path, None).failures] == ["rename folder"]


def test_no_answer_ends_at_the_bound_and_the_type_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    released = threading.Event()
    monkeypatch.setattr(os, "fsync", lambda _: released.wait(30))
    probe = probe_storage(tmp_path, Mount(str(tmp_path), "fuse.ossfs", "ossfs", "rw"), timeout_s=0.2)
    released.set()
    assert probe.kind is StorageKind.OBJECT
    assert "no answer within 0.2 s" in probe.not_tried


def test_where_nothing_may_be_written(tmp_path: Path) -> None:
    probe = probe_storage(Path("/proc/self/nowhere"), Mount("/proc", "proc", "proc", "rw"))
    assert probe.kind is StorageKind.POSIX
    assert probe.not_tried
