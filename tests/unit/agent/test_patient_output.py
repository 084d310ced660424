"""A terminal or a pipe that is stuck holds up nobody, and keeps its mode for the others who have it."""

from __future__ import annotations

import fcntl
import os
import re
import socket
import termios
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from launcher.agent.console import Console
from launcher.agent.patient_output import PatientOutput

LINE = "x" * 99 + "\n"
ENOUGH = 5000  # lines: more than any pipe, socket or terminal takes by itself


@pytest.fixture
def fds() -> Iterator[Callable[..., tuple[int, ...]]]:
    opened: list[int] = []

    def keep(*pair: int) -> tuple[int, ...]:
        opened.extend(pair)
        return pair

    yield keep
    for fd in opened:
        os.close(fd)


def read_later(fd: int, until: bytes) -> tuple[threading.Thread, bytearray]:
    got = bytearray()

    def read() -> None:
        while until not in got and (chunk := os.read(fd, 1 << 16)):
            got.extend(chunk)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    return reader, got


def write_in_time(output: PatientOutput, num_lines: int = ENOUGH) -> None:
    """In a thread: what waits for ever must not hang the tests."""

    def write() -> None:
        for number in range(num_lines):
            output.write(f"{number} {LINE}")

    writer = threading.Thread(target=write, daemon=True)
    writer.start()
    writer.join(10)
    assert not writer.is_alive(), "writing waits for the reader"


def pair_of(kind: str) -> tuple[int, int]:
    """Reading and writing end."""
    if kind == "pipe":
        return os.pipe()
    if kind == "socket":
        ours, theirs = socket.socketpair()
        return ours.detach(), theirs.detach()
    return os.openpty()


@pytest.mark.parametrize("kind", ["pipe", "socket", "terminal"])
def test_a_reader_who_pauses_holds_up_nobody_and_is_told_what_he_missed(
    kind: str, fds: Callable[..., tuple[int, ...]]
) -> None:
    reading, writing = fds(*pair_of(kind))
    flags = fcntl.fcntl(writing, fcntl.F_GETFL)
    output = PatientOutput(writing, limit=20_000)
    write_in_time(output)
    assert output.is_behind
    assert fcntl.fcntl(writing, fcntl.F_GETFL) == flags, "others have it too, and may want to wait"
    reader, got = read_later(reading, f"{ENOUGH - 1} ".encode())
    output.finish(10)
    reader.join(10)
    text = got.decode().replace("\r", "")
    lines = text.splitlines()
    shown = [int(line.split()[0]) for line in lines if re.match(r"\d+ x", line)]
    told = [int(n) for n in re.findall(r"ftlaunch: (\d+) lines were not shown", text)]
    assert shown == sorted(shown)
    assert shown[0] == 0
    assert shown[-1] == ENOUGH - 1
    assert len(shown) + sum(told) == ENOUGH
    assert all(re.fullmatch(r"\d+ x{99}|ftlaunch: .*", line) for line in lines[:-1]), "only whole lines are left out"


def test_a_stopped_terminal_shows_everything_once_it_goes_on(fds: Callable[..., tuple[int, ...]]) -> None:
    reading, writing = fds(*os.openpty())
    termios.tcflow(writing, termios.TCOOFF)  # what Ctrl-S does
    output = PatientOutput(writing)
    write_in_time(output, 100)
    assert output.is_behind
    began = time.monotonic()
    output.flush()
    assert time.monotonic() - began < 0.5
    termios.tcflow(writing, termios.TCOON)
    reader, got = read_later(reading, b"99 x")
    while output.is_behind and time.monotonic() - began < 10:
        output.flush()
    reader.join(10)
    assert [int(line.split()[0]) for line in got.decode().splitlines()] == list(range(100))


def test_the_end_waits_for_a_reader_but_not_for_ever(fds: Callable[..., tuple[int, ...]]) -> None:
    _, writing = fds(*os.pipe())
    output = PatientOutput(writing)
    write_in_time(output)
    began = time.monotonic()
    output.finish(0.2)
    assert 0.15 < time.monotonic() - began < 2


@pytest.mark.parametrize("kind", ["pipe", "socket"])
def test_a_reader_who_has_gone_is_no_error(kind: str) -> None:
    reading, writing = pair_of(kind)
    output = PatientOutput(writing)
    os.close(reading)
    output.write("one\n")
    assert output.gone
    output.write("two\n")
    output.flush()
    assert not output.is_behind
    output.finish(1)
    late = PatientOutput(writing)
    late.write("three\n")
    assert late.gone
    late.finish(1)
    os.close(writing)


def test_a_file_is_written_on_where_the_others_who_have_it_stopped(tmp_path: Path) -> None:
    with (tmp_path / "log").open("wb") as log:
        log.write(b"shell\n")
        log.flush()
        output = PatientOutput(log.fileno())
        output.write("agent\n")
        log.write(b"shell again\n")
        log.flush()
        output.write("agent again\n")
        output.finish(1)
    assert (tmp_path / "log").read_text() == "shell\nagent\nshell again\nagent again\n"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("kind", ["pipe", "terminal"])
def test_what_another_user_has_opened_is_written_to_without_waiting_too(
    kind: str, fds: Callable[..., tuple[int, ...]]
) -> None:
    reading, writing = fds(*pair_of(kind))
    flags = fcntl.fcntl(writing, fcntl.F_GETFL)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
            try:
                os.open(f"/proc/self/fd/{writing}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
            except PermissionError:
                output = PatientOutput(writing, limit=20_000)
                for number in range(ENOUGH):
                    output.write(f"{number} {LINE}")
                status = 0 if output.is_behind else 2
                output.finish(0.1)
        finally:
            os._exit(status)
    deadline = time.monotonic() + 10
    while (ended := os.waitpid(child, os.WNOHANG))[0] == 0 and time.monotonic() < deadline:
        time.sleep(0.01)
    if ended[0] == 0:
        os.kill(child, 9)
        os.waitpid(child, 0)
    assert ended == (child, 0), "it waited for the reader" if ended[0] == 0 else "see the child's status"
    assert fcntl.fcntl(writing, fcntl.F_GETFL) == flags
    text = os.read(reading, 1 << 16).decode().replace("\r", "")
    assert text.startswith(f"0 {LINE}1 {LINE}2 {LINE}")


def test_the_console_goes_on_over_a_full_pipe_and_draws_no_bars_into_it(fds: Callable[..., tuple[int, ...]]) -> None:
    reading, writing = fds(*os.openpty())
    with os.fdopen(os.dup(writing), "w") as stream:
        console = Console(stream)
        console.say("before")
        termios.tcflow(writing, termios.TCOOFF)
        done = []

        def speak() -> None:
            console.say("while it is stopped")
            for _ in range(1000):
                console.progress(1000, 1000, None, None)  # the last step is always due
            done.append(True)

        thread = threading.Thread(target=speak, daemon=True)
        thread.start()
        thread.join(5)
        termios.tcflow(writing, termios.TCOON)
        assert done, "the console waits for the terminal"
        console.flush()
        console.say("after")
        reader, got = read_later(reading, b"after")
        console.close()
        reader.join(10)
    text = got.decode()
    assert "before" in text
    assert "while it is stopped" in text
    assert text.count("step 1000/1000") == 0
