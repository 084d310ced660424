"""Faults are found with file and line, within a time, and with memory that does not grow."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from launcher.data import scan
from launcher.data.look import load_tokenizer_file, look_at_data
from launcher.data.records import Record, Turn
from launcher.data.scan import (
    NUM_KEPT,
    RECORD,
    REPEATED,
    ROLE,
    Fault,
    Faults,
    Repeats,
    blocks_of,
    role_faults,
    scan_files,
)


def conversation(*roles: str) -> bytes:
    return json.dumps({"messages": [{"role": role, "content": f"word {i}"} for i, role in enumerate(roles)]}).encode()


def good(number: int) -> bytes:
    return json.dumps({"question": f"why {number}", "answer": "because"}).encode()


@pytest.fixture
def data(tmp_path: Path) -> Callable[..., str]:
    def write(*lines: bytes) -> str:
        path = tmp_path / "train.jsonl"
        path.write_bytes(b"\n".join(lines) + b"\n")
        return str(path)

    return write


def found(path: str, budget_s: float | None = None) -> list[tuple[str, int]]:
    return [(fault.kind, fault.line) for fault in scan_files([path], "auto", None, budget_s=budget_s).faults.kept]


def test_every_kind_of_fault_with_its_line(data: Callable[..., str]) -> None:
    lines = [
        b"\xef\xbb\xbf" + good(1),
        b'{"question": "half',
        b"",
        good(2),
        b'{"question": "\xb0\xa1", "answer": "x"}',
        b'{"question": " ", "answer": "x"}',
        conversation("human", "assistant"),
        good(1),
        good(2),
        conversation("user", "assistant"),
    ]
    assert found(data(*lines)) == [
        (RECORD, 2),
        (RECORD, 5),
        (RECORD, 6),
        (ROLE, 7),
        (REPEATED, 9),
    ]  # line 8 differs from line 1 in its byte order mark


@pytest.mark.parametrize(
    ("roles", "words"),
    [
        (("user", "assistant"), ""),
        (("system", "user", "assistant", "tool", "assistant"), ""),
        (("user", "user", "assistant"), "messages[1] follows another"),
        (("user", "system", "assistant"), "belongs to the beginning"),
        (("gpt", "assistant"), "'gpt'"),
    ],
)
def test_roles(roles: tuple[str, ...], words: str) -> None:
    record = Record("t.jsonl", 3, turns=tuple(Turn(role, "x") for role in roles))
    faults = list(role_faults(record))
    assert len(faults) == bool(words)
    assert all(words in fault.text and fault.text.startswith("t.jsonl:3: ") for fault in faults)


def test_lines_are_counted_across_blocks_and_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scan, "BLOCK_BYTES", 64)
    a, b = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    a.write_bytes(b"\n".join(good(n) for n in range(50)) + b"\n{oops}\n" + good(60))
    b.write_bytes(good(70) + b"\n{oh}")
    result = scan_files([str(a), str(b)], "auto", None, budget_s=None)
    assert [fault.where for fault in result.faults.kept] == [f"{a}:51", f"{b}:2"]
    assert (result.num_records, result.num_looked_at) == (54, 54)
    joined = b"".join(b"\n".join(lines) + b"\n" for _, _, lines in blocks_of([a]))
    assert joined == a.read_bytes() + b"\n"


def test_when_half_the_time_is_gone_only_the_first_of_each_block_are_looked_at(
    data: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scan, "BLOCK_BYTES", 1000)
    path = data(*(good(n) for n in range(2000)))
    ticks = iter(range(10_000))
    result = scan_files([path], "auto", None, budget_s=40, clock=lambda: float(next(ticks)))
    assert result.num_records is None  # stopped after 40 blocks
    assert 19 * 20 < result.num_looked_at < 1000
    ticks = iter(range(10_000))
    whole = scan_files([path], "auto", None, budget_s=200, clock=lambda: float(next(ticks)))
    assert whole.num_records == whole.num_looked_at == 2000


def test_faults_are_counted_and_the_first_ones_kept() -> None:
    faults = Faults()
    for line in range(1000):
        faults.add(Fault(RECORD, "t", line, "x"))
    assert (faults.num(RECORD), len(faults.of(RECORD)), faults.num(ROLE)) == (1000, NUM_KEPT, 0)


def test_repeats_are_found_and_others_are_not() -> None:
    repeats = Repeats()
    assert [repeats.seen(str(n).encode()) for n in range(20_000)].count(True) == 0
    assert all(repeats.seen(str(n).encode() + b"\r") for n in range(20_000))


def test_a_sample_comes_from_everywhere(data: Callable[..., str]) -> None:
    sample = scan_files([data(*(good(n) for n in range(5000)))], "auto", None, budget_s=None, num_sampled=50).sample
    lines = [record.line for record in sample]
    assert 40 <= len(lines) <= 50
    assert lines == sorted(set(lines))
    assert lines[-1] > 4000


def test_the_look_of_a_start_counts_tokens_where_it_can(data: Callable[..., str], tmp_path: Path) -> None:
    tokenizers: Any = pytest.importorskip("tokenizers", reason="tokenizers is not installed")
    words = tokenizers.models.WordLevel({"<unk>": 0, "because": 1, "why": 2}, unk_token="<unk>")
    tokenizer = tokenizers.Tokenizer(words)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    path = data(good(1), good(2), b"{")
    facts = look_at_data("train", [path], "auto", None, 10, load_tokenizer_file(tmp_path / "tokenizer.json"))
    assert facts is not None
    assert (facts.num_measured, facts.longest, facts.num_cut, facts.largest_id) == (2, 11, 2, 2)
    assert (facts.num_unusable, facts.num_records, facts.has_turns) == (1, 3, True)
    without = look_at_data("train", [path], "auto", None, 10, load_tokenizer_file(tmp_path / "gone.json"))
    assert without is not None
    assert (without.num_measured, without.largest_id) == (0, -1)
    assert look_at_data("eval", ["/gone.jsonl"], "auto", None, 10, None) is None
