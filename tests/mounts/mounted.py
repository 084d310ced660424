"""Object mounts for tests: mounted while a `with` lasts, and unmounted whatever happens in it."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from enum import Enum
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_PR_SET_PDEATHSIG = 1
_WAIT_S = 20.0
_libc = ctypes.CDLL(None)


class Stand(Enum):
    JINDO = "jindo"  # a FUSE program of these tests that does what JindoFuse's guide says, tests/mounts/jindo.py
    S3FS = "s3fs"  # s3fs itself (of which ossfs 1.x is a fork), on a small S3 server


def why_not(stand: Stand) -> str:
    """Why this stand-in cannot be mounted here, or ""."""
    if not Path("/dev/fuse").exists() or os.geteuid() != 0:
        return "mounting needs root and /dev/fuse"
    missing = [] if shutil.which("fusermount3") else ["fuse3"]
    if stand is Stand.S3FS and not shutil.which("s3fs"):
        missing.append("s3fs")
    if stand is Stand.JINDO and importlib.util.find_spec("mfusepy") is None:
        missing.append("mfusepy (pip)")
    return f"not installed: {', '.join(missing)} (scripts/install-test-tools.sh)" if missing else ""


@contextlib.contextmanager
def mounted(stand: Stand, folder: Path, *arguments: str, name: str = "mount", bucket: str = "bucket") -> Iterator[Path]:
    """A mount below `folder`, which holds the bucket, too: two mounts of one folder share it, as two machines do.
    `arguments`: for the program that mounts."""
    point = folder / name
    point.mkdir(parents=True)
    with contextlib.ExitStack() as stack:
        stack.callback(_unmount, point)
        if stand is Stand.JINDO:
            (folder / bucket).mkdir(exist_ok=True)
            command = [sys.executable, "-m", "tests.mounts.jindo", str(folder / bucket), str(point), *arguments]
        else:
            port = stack.enter_context(_s3_server(folder))
            password = folder / "passwd-s3fs"
            password.write_text("key:secret\n")
            password.chmod(0o600)
            options = f"passwd_file={password},url=http://127.0.0.1:{port},use_path_request_style,retries=1"
            command = ["s3fs", bucket, str(point), "-f", "-o", options, *arguments]
        stack.enter_context(_running(command, folder / f"{name}.log"))
        _until(lambda: os.path.ismount(point), f"{point} is mounted", folder / f"{name}.log")
        yield point


@contextlib.contextmanager
def _s3_server(folder: Path) -> Iterator[int]:
    port_file = folder / "s3.port"
    port_file.unlink(missing_ok=True)
    with _running([sys.executable, "-m", "tests.mounts.s3_server", str(port_file)], folder / "s3.log"):
        _until(port_file.exists, "the S3 server listens", folder / "s3.log")
        yield int(port_file.read_text())


@contextlib.contextmanager
def _running(command: list[str], log: Path) -> Iterator[None]:
    with log.open("ab") as stream:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, "FUSE_LIBRARY_PATH": "libfuse3.so.3"},
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=stream,
            preexec_fn=_end_with_the_test,  # noqa: PLW1509  # pytest has one thread here
        )
    try:
        yield
    finally:
        process.terminate()  # both unmount on it
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _end_with_the_test() -> None:
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


def _unmount(point: Path) -> None:
    """Lazily: what still has files open there gets errors, and the mount is gone."""
    deadline = time.monotonic() + _WAIT_S
    while _is_mounted(point):
        subprocess.run(["fusermount3", "-uz", str(point)], capture_output=True, check=False)
        if time.monotonic() > deadline:
            raise AssertionError(f"{point} is still mounted")
        time.sleep(0.02)


def _is_mounted(point: Path) -> bool:
    return f" {point} " in Path("/proc/self/mounts").read_text("utf-8", "replace")


def _until(condition: Callable[[], bool], what: str, log: Path) -> None:
    deadline = time.monotonic() + _WAIT_S
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {_WAIT_S:.0f} s: {what}\n{log.read_text('utf-8', 'replace')}")
        time.sleep(0.02)
