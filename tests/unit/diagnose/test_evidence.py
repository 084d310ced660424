"""Reading evidence: tails with the right line numbers, counters of both cgroup versions, names of exits."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.diagnose.evidence import (
    clean_line,
    name_exit,
    read_cgroup_oom_kills,
    read_head,
    read_tail,
    with_last_words,
)


def test_a_tail_keeps_the_line_numbers_of_the_file(tmp_path: Path) -> None:
    log = tmp_path / "rank-0.log"
    log.write_text("".join(f"line {i}\n" for i in range(1, 1001)))
    tail = read_tail(log, max_bytes=100)
    assert tail[-1] == (1000, "line 1000")
    assert tail[-2] == (999, "line 999")
    assert len(tail) < 15


def test_colours_and_redrawn_bars_are_gone_and_bad_bytes_do_no_harm(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    log.write_bytes(b"10%\r 20%\r 30%|###\x1b[31m  ERROR\x1b[0m \xff\n\nlast without newline")
    assert read_tail(log) == ((1, " 30%|###  ERROR \ufffd"), (2, ""), (3, "last without newline"))
    assert clean_line("windows\r\n") == "windows"


def test_a_log_that_a_full_disk_has_cut_off_is_completed(tmp_path: Path) -> None:
    log = tmp_path / "rank-0.log"
    log.write_text("step 9\nTraceback (most recent call last):\n  File")
    words = "Traceback (most recent call last):\n  File a\nOSError: [Errno 28] No space left on device\n"
    tail = with_last_words(read_tail(log), words)
    assert tail[:3] == read_tail(log)
    assert tail[-1] == (7, "OSError: [Errno 28] No space left on device")
    assert "not in the log" in tail[3][1]


def test_a_log_that_has_it_all_is_left_as_it_is(tmp_path: Path) -> None:
    log = tmp_path / "rank-0.log"
    log.write_text("Traceback (most recent call last):\nValueError: 3\nlast line of a library\n")
    assert with_last_words(read_tail(log), "Traceback (most recent call last):\nValueError: 3\n") == read_tail(log)
    assert with_last_words((), "") == ()
    assert with_last_words((), "ValueError: 3")[-1] == (2, "ValueError: 3")


def test_a_missing_log_is_empty(tmp_path: Path) -> None:
    assert read_tail(tmp_path / "none.log") == ()


@pytest.mark.parametrize(
    ("where", "membership", "text"),
    [
        ("job/memory.events", "0::/job\n", "low 0\nhigh 0\nmax 9\noom 2\noom_kill 2\noom_group_kill 0\n"),
        ("memory/job/memory.oom_control", "4:cpu:/\n5:memory:/job\n", "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n"),
        ("memory/memory.oom_control", "5:memory:/not/mounted/here\n", "under_oom 0\noom_kill 2\n"),
    ],
)
def test_both_cgroup_versions_count_kills(tmp_path: Path, where: str, membership: str, text: str) -> None:
    counter = tmp_path / "sys" / where
    counter.parent.mkdir(parents=True)
    counter.write_text(text)
    (tmp_path / "cgroup").write_text(membership)
    assert read_cgroup_oom_kills(tmp_path / "sys", tmp_path / "cgroup") == 2


def test_no_cgroup_is_unknown_and_not_zero(tmp_path: Path) -> None:
    assert read_cgroup_oom_kills(tmp_path, tmp_path / "none") is None


@pytest.mark.parametrize(
    ("code", "signal", "name"),
    [
        (0, None, "exit code 0"),
        (1, None, "exit code 1"),
        (-9, None, "SIGKILL"),
        (137, None, "SIGKILL (exit code 137)"),
        (247, None, "SIGKILL (exit code 247)"),
        (249, None, "SIGBUS (exit code 249)"),
        (143, None, "SIGTERM (exit code 143)"),
        (None, 11, "SIGSEGV"),
        (-11, 11, "SIGSEGV"),
        (255, None, "exit code 255"),
        (None, None, "still running or unknown"),
    ],
)
def test_exits_are_named_whoever_encoded_them(code: int | None, signal: int | None, name: str) -> None:
    assert name_exit(code, signal) == name


def test_of_a_long_log_the_beginning_is_kept_for_people(tmp_path: Path) -> None:
    log = tmp_path / "rank-0.log"
    log.write_text("".join(f"line {i}\n" for i in range(1, 1001)))
    tail = read_tail(log, 100)
    assert read_head(log, tail, 20) == ((1, "line 1"), (2, "line 2"), (3, "line 3"), (4, "... left out ..."))
    assert read_head(log, read_tail(log)) == ()
    assert read_head(tmp_path / "none", tail) == ()
