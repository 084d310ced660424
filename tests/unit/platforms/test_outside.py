"""Detection's look outside is real, and bounded."""

from __future__ import annotations

import socket
import time
from pathlib import Path

import pytest

from launcher.platforms import outside
from launcher.platforms.outside import real_outside


def scontrol(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    program = folder / "scontrol"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


def test_this_machine_knows_its_names() -> None:
    assert {socket.gethostname(), "127.0.0.1"} <= real_outside().names


def test_a_file_that_is_not_there_is_nothing(tmp_path: Path) -> None:
    (tmp_path / "hostfile").write_text("a slots=1\n")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    read = real_outside().read_text
    assert [read(str(tmp_path / name)) for name in ("hostfile", "none", "binary", ".")] == [
        "a slots=1\n",
        None,
        None,
        None,
    ]


def test_scontrol_expands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scontrol(tmp_path, monkeypatch, '[ "$1 $2 $3" = "show hostnames a[1-2]" ] && printf "a1\\na2\\n"')
    assert real_outside().scontrol("a[1-2]") == "a1\na2\n"
    assert real_outside().scontrol("b") is None


def test_scontrol_that_hangs_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scontrol(tmp_path, monkeypatch, "exec sleep 60")
    monkeypatch.setattr(outside, "SCONTROL_S", 0.2)
    assert real_outside().scontrol("a") is None


def test_without_scontrol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert real_outside().scontrol("a") is None


def test_names_resolve_together_and_a_dead_resolver_costs_one_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    def look_up(name: str, port: None) -> list[tuple[int, int, int, str, tuple[str, int]]]:
        if name == "good":
            return [(2, 1, 6, "", ("10.0.0.1", 0))]
        if name == "unknown":
            raise socket.gaierror(-2, "Name or service not known")
        time.sleep(1.5)
        raise socket.gaierror(-3, "Temporary failure in name resolution")

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    monkeypatch.setattr(outside, "RESOLVE_S", 0.3)
    started = time.monotonic()
    found = real_outside().resolve(["good", "unknown", *(f"dead-{number}" for number in range(30))])
    assert found == {"good": frozenset({"10.0.0.1"})}
    assert time.monotonic() - started < 1.2
