"""Mounts and interfaces of a test's own, in namespaces that end with it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import pytest

REPOSITORY = Path(__file__).parents[3]


class InNamespace(Protocol):
    def __call__(self, code: str, *shell: str, environ: Mapping[str, str] | None = None) -> str: ...


@pytest.fixture
def in_namespace() -> InNamespace:
    """Run shell lines, then Python code, in mount and network namespaces of their own; gives what it printed."""
    if not shutil.which("unshare") or not shutil.which("ip"):
        pytest.skip("needs unshare and ip (util-linux, iproute2)")
    probe = subprocess.run(["unshare", "-mn", "true"], capture_output=True, check=False, text=True)
    if probe.returncode:
        pytest.skip(f"needs root or the right to make namespaces: {probe.stderr.strip()}")

    def run(code: str, *shell: str, environ: Mapping[str, str] | None = None) -> str:
        script = "\n".join([*shell, 'exec "$0" -c "$1"'])
        answer = subprocess.run(
            ["unshare", "-mn", "sh", "-ec", script, sys.executable, code],
            capture_output=True,
            check=False,
            text=True,
            env=environ,
            cwd=REPOSITORY,
        )
        if answer.returncode:
            pytest.fail(answer.stderr)
        return answer.stdout

    return run
