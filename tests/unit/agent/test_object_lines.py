"""Records where nothing can be appended: written as a whole, in parts, by a thread of their own."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from launcher.agent import object_lines
from launcher.agent.events import read_json_lines
from launcher.agent.object_lines import ObjectLines


def read_all(folder: Path) -> list[int]:
    return [record["n"] for path in sorted(folder.glob("*.jsonl")) for record in read_json_lines(path)]


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_durable_line_is_there_on_return_and_the_others_soon(tmp_path: Path) -> None:
    lines = ObjectLines(tmp_path / "n0.jsonl", every_s=0.2)
    lines.append({"n": 1})
    assert read_all(tmp_path) == []
    lines.append({"n": 2}, durable=True)
    assert read_all(tmp_path) == [1, 2]
    lines.append({"n": 3})
    until(lambda: read_all(tmp_path) == [1, 2, 3])
    assert lines.close() == 0


def test_parts_stay_in_order_and_a_full_one_is_never_written_again(tmp_path: Path) -> None:
    lines = ObjectLines(tmp_path / "n0.jsonl", every_s=30, part_bytes=100)
    for number in range(50):
        lines.append({"n": number}, durable=number % 7 == 0)
        if number == 25:
            first = (tmp_path / "n0.jsonl").stat().st_ino
    assert lines.close() == 0
    assert read_all(tmp_path) == list(range(50))
    assert len(list(tmp_path.iterdir())) > 3
    assert max(path.stat().st_size for path in tmp_path.iterdir()) <= 100
    assert (tmp_path / "n0.jsonl").stat().st_ino == first


def test_the_next_start_goes_on_in_the_last_part(tmp_path: Path) -> None:
    for start in range(3):
        lines = ObjectLines(tmp_path / "n0.jsonl", part_bytes=40)
        for number in range(4):
            lines.append({"n": 4 * start + number})
        assert lines.close() == 0
    assert read_all(tmp_path) == list(range(12))
    assert len(list(tmp_path.iterdir())) == 3, "12 lines of 9 bytes, 4 to a part"


def test_a_line_that_was_cut_off_is_not_glued_to_the_next(tmp_path: Path) -> None:
    (tmp_path / "n0.jsonl").write_text('{"n": 1}\n{"n"')
    lines = ObjectLines(tmp_path / "n0.jsonl")
    lines.append({"n": 2})
    lines.close()
    assert read_all(tmp_path) == [1, 2]


def test_a_kill_between_the_old_name_and_the_new_one_loses_nothing(tmp_path: Path) -> None:
    """s3fs takes the old name away before it gives it to the new file."""
    (tmp_path / ".n0.jsonl.0123456789abcdef").write_text('{"n": 1}\n{"n": 2}\n{"n":')
    lines = ObjectLines(tmp_path / "n0.jsonl", every_s=0.05)
    until(lambda: read_all(tmp_path) == [1, 2])
    lines.append({"n": 3})
    lines.close()
    assert read_all(tmp_path) == [1, 2, 3]
    ObjectLines(tmp_path / "n0.jsonl").close()
    assert [path.name for path in tmp_path.iterdir()] == ["n0.jsonl"]


def test_a_mount_that_fails_is_named_and_gets_everything_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replace = object_lines.replace_object

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOTCONN, os.strerror(errno.ENOTCONN))

    monkeypatch.setattr(object_lines, "replace_object", refuse)
    lines = ObjectLines(tmp_path / "n0.jsonl", every_s=0.05)
    lines.append({"n": 1}, durable=True)
    assert "Transport endpoint is not connected" in lines.trouble
    lines.append({"n": 2})
    monkeypatch.setattr(object_lines, "replace_object", replace)
    until(lambda: not lines.trouble)
    assert lines.close() == 0
    assert read_all(tmp_path) == [1, 2]


def test_what_never_got_there_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(object_lines, "replace_object", refuse)
    lines = ObjectLines(tmp_path / "n0.jsonl", every_s=0.05)
    for number in range(3):
        lines.append({"n": number})
    assert lines.close() == 3
