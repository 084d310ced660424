"""Logs of any size and packing: what counts is found, what cannot be read is said."""

from __future__ import annotations

import gzip
import io
import json
import os
import tarfile
import zipfile
from pathlib import Path

import pytest
from fault_examples import EXAMPLES
from test_variants import VARIANTS

from launcher.cli.main import main
from launcher.diagnose import scan as scanning
from launcher.diagnose import sources
from launcher.diagnose.catalogue import CATALOGUE
from launcher.diagnose.evidence import number_lines
from launcher.diagnose.literals import literals_of
from launcher.diagnose.match import find_matches
from launcher.diagnose.scan import scan
from launcher.diagnose.sources import read_sources
from launcher.diagnose.verdict import diagnose
from launcher.errors import UserError

STEPS = "".join(f"{{'loss': 1.{i}, 'grad_norm': 0.{i}, 'epoch': 0.{i}}}\n" for i in range(3000))
ERROR = "Traceback (most recent call last):\n  File \"/opt/app/train.py\", line 8, in step\nKeyError: 'answer'\n"
VICTIM = (
    "[rank{r}]:[E1130 10:00:0{r}.{i} ProcessGroupNCCL.cpp:632] [Rank {r}] Watchdog caught collective operation "
    "timeout: WorkNCCL(SeqNum={i}, OpType=ALLREDUCE)\n"
)


def named(*paths: Path) -> tuple[str, int | None]:
    found = read_sources(paths)
    verdict = diagnose(found.ranks, found.nodes)
    return verdict.cls, verdict.culprit.rank if verdict.culprit else None


def test_every_pattern_has_a_text_that_its_matches_cannot_do_without() -> None:
    for fault in CATALOGUE:
        for _, pattern in fault.patterns():
            assert min(map(len, literals_of(pattern))) >= 3
    assert literals_of(r"a?bcd(?:e1|fgh)+ x*y") == {"bcd"}
    assert literals_of(r"(?:\d+ Killed|[Oo]ut of memory) \S+") == {"Killed", "memory"}
    with pytest.raises(ValueError, match="no plain text"):
        literals_of(r"\w+|abc")


def test_a_scan_keeps_every_line_that_a_diagnosis_would_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scanning, "_TAIL_BYTES", 0)
    for log in [*(variant.log for variant in VARIANTS), *(example.log for example in EXAMPLES)]:
        kept = {number for number, _ in scan(io.BytesIO(log.encode()))}
        assert {match.line for match in find_matches(number_lines(log))} <= kept, log


def test_the_cause_in_the_middle_of_a_large_log_is_found_with_its_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scanning, "_CHUNK_BYTES", 5000)  # the traceback lies across two blocks somewhere
    log = STEPS + ERROR + "".join(VICTIM.format(r=i % 8, i=i) for i in range(9000))
    lines = scan(io.BytesIO(log.encode()))
    assert len(lines) < 4000
    (key_error,) = [number for number, text in lines if text == "KeyError: 'answer'"]
    assert key_error == 3003
    assert (3002, '  File "/opt/app/train.py", line 8, in step') in lines
    assert (3000, STEPS.splitlines()[-1]) in lines


def test_a_progress_bar_without_line_ends_does_not_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scanning, "_MAX_LINE_BYTES", 2000)
    monkeypatch.setattr(scanning, "_CHUNK_BYTES", 1000)
    log = b"".join(b"\r%d%%" % i for i in range(90_000)) + b"\rOSError: [Errno 28] No space left on device"
    assert scan(io.BytesIO(log)) == ((1, "OSError: [Errno 28] No space left on device"),)


@pytest.mark.parametrize("small", [True, False])
def test_a_log_says_the_same_in_every_packing(tmp_path: Path, small: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not small:
        monkeypatch.setattr(sources, "_WHOLE_BYTES", 0)
    log = STEPS + ERROR
    folder = tmp_path / "run" / "ftlaunch" / "logs" / "gen-2"
    folder.mkdir(parents=True)
    (folder / "rank-3.log").write_text(log)
    old = folder.parent / "gen-1"
    old.mkdir()
    (old / "rank-0.log").write_text("OSError: [Errno 28] No space left on device\n")
    with zipfile.ZipFile(tmp_path / "run.zip", "w") as archive:
        for file in sorted((tmp_path / "run").rglob("*.log")):
            archive.write(file, file.relative_to(tmp_path))
    with tarfile.open(tmp_path / "run.tar.gz", "w:gz") as tar:
        tar.add(tmp_path / "run", "run")
    (tmp_path / "rank-3.log.gz").write_bytes(gzip.compress(log.encode()))
    (tmp_path / "windows.log").write_bytes(log.replace("\n", "\r\n").encode("utf-16"))
    for packed in ("run", "run.zip", "run.tar.gz", "rank-3.log.gz"):
        assert named(tmp_path / packed) == ("user_code", 3), packed
    assert named(tmp_path / "windows.log")[0] == "user_code"


def test_the_ends_of_the_ranks_come_from_an_archives_events(tmp_path: Path) -> None:
    event = {"event": "worker_exited", "gen": 1, "rank": 0, "signal": "SIGBUS"}
    with zipfile.ZipFile(tmp_path / "run.zip", "w") as archive:
        archive.writestr("run/ftlaunch/logs/gen-1/rank-0.log", "starting\n")
        archive.writestr("run/ftlaunch/events/n0.jsonl", json.dumps(event) + "\n{cut")
    assert named(tmp_path / "run.zip") == ("shm_exhausted", 0)


def test_torchruns_folder_gives_the_ranks_of_its_latest_attempt(tmp_path: Path) -> None:
    for attempt, rank, log in ((0, 0, "OSError: [Errno 28] No space left on device"), (1, 0, "fine"), (1, 6, ERROR)):
        folder = tmp_path / "none_x1" / f"attempt_{attempt}" / str(rank)
        folder.mkdir(parents=True)
        (folder / "stderr.log").write_text(log)
    assert named(tmp_path) == ("user_code", 6)


def test_what_cannot_be_read_is_said_and_the_rest_counts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FTLAUNCH_LANG", "en")
    (tmp_path / "a.log").write_text(ERROR)
    (tmp_path / "core.log").write_bytes(bytes(range(256)) * 40)
    whole = gzip.compress(os.urandom(30_000).hex().encode() + b"\n" + ERROR.encode())
    (tmp_path / "cut.log.gz").write_bytes(whole[: len(whole) // 2])
    os.mkfifo(tmp_path / "pipe.log")
    assert main(["diagnose", str(tmp_path)]) == 0
    out, err = capsys.readouterr()
    assert "user_code" in out
    assert "core.log: not a text file" in err
    assert "cut.log.gz: cut short; what was before the cut has been read" in err


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("weights.bin", bytes(range(256)) * 40, "not a text file"),
        ("broken.tar.gz", b"no archive at all", "this archive is broken"),
        ("empty.zip", b"PK\x05\x06" + bytes(18), "no logs here, it is empty"),
        ("x.log.zst", b"(\xb5/\xfd", "cannot read zstd|cut short|nothing could be read"),
    ],
)
def test_a_file_that_is_no_log_is_refused_in_words(tmp_path: Path, name: str, content: bytes, says: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=says):
        read_sources([tmp_path / name])


def test_a_log_that_may_not_be_read_is_said(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_text(ERROR)
    (tmp_path / "a.log").chmod(0)
    root = os.geteuid() == 0
    if root:
        os.seteuid(65534)
    try:
        with pytest.raises(UserError, match="no permission to read it"):
            read_sources([tmp_path / "a.log"])
    finally:
        if root:
            os.seteuid(0)
