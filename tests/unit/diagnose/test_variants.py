"""Faults as other launchers, versions and consoles show them; and which of several lines is shown."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import pytest

from launcher.diagnose.evidence import RankEvidence, number_lines
from launcher.diagnose.verdict import Verdict, diagnose

HEADER = re.compile(r"^=== (\w+) (\S+) line (\d+) rank (\S+)\n", re.MULTILINE)


class Variant(NamedTuple):
    cls: str
    action: str
    proof: int
    rank: str
    log: str


def variants() -> list[Variant]:
    text = Path(__file__).with_name("variants.txt").read_text("utf-8").replace("\\x1b", "\x1b").replace("\\r", "\r")
    _, *parts = HEADER.split(text)
    return [Variant(c, a, int(p), r, log) for c, a, p, r, log in zip(*(parts[i::5] for i in range(5)), strict=True)]


VARIANTS = variants()


def read(log: str, exit_code: int | None = None) -> Verdict:
    return diagnose([RankEvidence(-1, "", None, exit_code, None, "job.log", number_lines(log), None)])


def misses(variant: Variant) -> list[str]:
    verdict = read(variant.log)
    line = verdict.evidence[0].line if verdict.evidence else None
    rank = str(verdict.culprit.rank) if verdict.culprit else ""
    wanted: list[tuple[object, object]] = [(variant.cls, verdict.cls), (variant.proof, line)]
    wanted += [(variant.action, verdict.action)] if variant.action != "-" else []
    wanted += [(variant.rank, rank)] if variant.rank != "-" else []
    return [f"{right!r}, not {said!r}: {variant.log[:150]!r}" for right, said in wanted if right != said]


def test_the_logs_are_read() -> None:
    assert len(VARIANTS) > 140
    assert len({variant.cls for variant in VARIANTS}) > 50


@pytest.mark.parametrize("tenth", range(10))
def test_the_cause_is_named_whatever_the_console_did_to_it(tenth: int) -> None:
    assert [miss for variant in VARIANTS[tenth::10] for miss in misses(variant)] == []


FOLDER = Path(__file__).parent
NOISE = [(FOLDER / f"noise_{where}.txt").read_text("utf-8") for where in ("before", "after")]


def test_what_healthy_programs_print_before_and_launchers_after_changes_no_cause() -> None:
    """Connections that are tried again, libraries that are not found and not needed, summaries, clean-up."""
    before, after = NOISE
    changed = {
        v.log[:80]: cls for v in VARIANTS if (cls := read(before + v.log.rstrip("\n") + "\n" + after).cls) != v.cls
    }
    assert changed == {}
    assert read(before).confidence == "unknown"
    assert read(after).cls == "user_code", "rank 0 left with 1; rank 1 was stopped for it"


VICTIMS = """\
[rank{r}]: torch.distributed.DistBackendError: NCCL error in: /x/NCCLUtils.hpp:268, remote process exited or there was \
a network error, NCCL version 2.21.5
[rank{r}]: Last error:
[rank{r}]: socketProgress: Connection closed by remote peer n2<4021>
[rank{r}]: RuntimeError: [/x/gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.1]:4021
[rank{r}]: torch.distributed.DistNetworkError: failed to recv, got 0 bytes
[rank{r}]: ConnectionResetError: [Errno 104] Connection reset by peer
"""
CONSEQUENCES = (
    *("nccl_watchdog_timeout", "nccl_remote_exited", "nccl_network_reset", "nccl_system_error"),
    *("nccl_init_store_timeout", "gloo_connection", "rdzv_connection_lost"),
)


def test_seven_victims_that_speak_first_are_never_the_cause() -> None:
    victims = "".join(VICTIMS.format(r=r) for r in range(10, 17))
    causes = [v for v in VARIANTS if v.cls not in CONSEQUENCES and "[WARNING]" not in v.log]
    assert len(causes) > 150
    assert {v.log[:80]: cls for v in causes if (cls := read(victims + v.log).cls) != v.cls} == {}


@pytest.mark.parametrize(
    "line",
    [
        "[pod/job-worker-0/pytorch] {}",
        "2026-11-30T10:00:00.123456789Z stderr F {}",
        "gpu-node-07: {}",
        "10.0.0.7: {}",
        "[1,3]<stderr>:{}",
        "(RayTrainWorker pid=991, ip=10.0.0.9) {}",
        "\x1b[31m{}\x1b[0m",
        "[default3]:{}",
        "{}\r",
        " 37%|###7      | 370/1000 [05:00<08:31,  1.23it/s]\r{}",
    ],
)
def test_a_consoles_prefix_changes_no_cause(line: str) -> None:
    changed = {}
    for variant in VARIANTS:
        log = "\n".join(line.format(text) for text in variant.log.split("\n"))
        if (cls := read(log).cls) != variant.cls:
            changed[variant.log[:80]] = cls
    assert changed == {}


def test_what_a_traceback_quotes_was_not_raised() -> None:
    quoted = '  File "/opt/hub/file_download.py", line 9, in get\n    raise LocalEntryNotFoundError(\n'
    verdict = read(f"Traceback (most recent call last):\n{quoted}TypeError: unhashable type: 'list'", 1)
    assert (verdict.cls, verdict.evidence[0].line) == ("user_code", 4)


def test_of_equal_errors_the_first_by_the_clock_is_the_cause_whatever_the_order_of_the_file() -> None:
    late = "2026-11-30T10:00:07.5Z [rank0]: OSError: [Errno 24] Too many open files: '/a'"
    early = "2026-11-30T10:00:07.25Z [rank3]: OSError: [Errno 28] No space left on device: '/b'"
    assert read(f"{late}\n{early}").cls == "no_space"
    assert read(f"{late[26:]}\n{early}").cls == "fd_limit", "without a clock the order of the file counts"


def test_what_one_rank_suffers_does_not_excuse_anothers_exception() -> None:
    victim = "[rank0]: RuntimeError: [/x/gloo/transport/tcp/pair.cc:538] Connection closed by peer [10.0.0.1]:4021"
    assert read(f"{victim}\n[rank2]: AssertionError: bad row").cls == "user_code"
    assert read(f"{victim}\nAssertionError: bad row").cls == "user_code"
    assert read(f"{victim}\n[rank0]: AssertionError: bad row").cls == "gloo_connection"


def test_a_task_is_a_rank_where_every_line_carries_one() -> None:
    log = "0: starting\n1: starting\n5: ValueError: no such split"
    verdict = read(log)
    assert verdict.culprit is not None
    assert verdict.culprit.rank == 5
    assert read(f"12: a list\nof words\nand more\n{log[26:]}").culprit is None
