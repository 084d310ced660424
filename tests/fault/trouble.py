"""File systems and rights that fail: each is undone again, whatever the test did."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_disk(folder: Path, size_bytes: int) -> Iterator[Path]:
    """A file system of its own at `folder`; skips where nothing can be mounted."""
    folder.mkdir(parents=True)
    _mount("-t", "tmpfs", "-o", f"size={size_bytes}", "tmpfs", folder)
    try:
        yield folder
    finally:
        _unmount(folder)


def enlarge(folder: Path, size_bytes: int) -> None:
    subprocess.run(["mount", "-o", f"remount,size={size_bytes}", str(folder)], check=True)


@contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """Whoever opens anything below `folder` from now on finds a file system that is mounted read-only."""
    _mount("--bind", folder, folder)
    try:
        subprocess.run(["mount", "-o", "remount,bind,ro", str(folder)], check=True)
        yield
    finally:
        _unmount(folder)


@contextmanager
def mode_of(path: Path, mode: int) -> Iterator[None]:
    before = path.stat().st_mode
    path.chmod(mode)
    try:
        yield
    finally:
        path.chmod(before)


def as_anybody() -> list[str]:
    """What to put before a command so that file modes hold for it: root may otherwise read and write everything."""
    if os.geteuid() != 0:
        return []
    if shutil.which("setpriv") is None:
        pytest.skip("setpriv (util-linux) takes root's rights away; it is not installed")
    return ["setpriv", "--bounding-set=-dac_override,-dac_read_search"]


def with_strace(*arguments: str | Path) -> list[str]:
    """What to put before a command so that strace sees it and all its children; skips where that is not possible."""
    if shutil.which("strace") is None:
        pytest.skip("strace is not installed (scripts/install-test-tools.sh)")
    tried = subprocess.run(["strace", "-o", os.devnull, "true"], capture_output=True, check=False)
    if tried.returncode != 0:
        pytest.skip("strace may not trace here")
    return ["strace", "-f", "-qq", *map(str, arguments)]


def _mount(*arguments: str | Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("a mount needs root")
    done = subprocess.run(["mount", *map(str, arguments)], capture_output=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"no mount here: {done.stderr.decode()}")


def _unmount(folder: Path) -> None:
    subprocess.run(["umount", "--lazy", str(folder)], check=True)
