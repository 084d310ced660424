"""The table of `ftlaunch check`: worst first, no line wider than asked, both languages."""

from __future__ import annotations

import pytest

from launcher.i18n import Text
from launcher.preflight.checks import run_checks
from launcher.preflight.finding import Finding, Severity, count_by_severity, show_bytes
from launcher.preflight.table import columns, render_table
from tests.unit.preflight.conftest import NodeWith

FINDINGS = (
    Finding("disk.free", Severity.OK, "900 GiB free", ">= 1 GiB", Text("room", "足够")),
    Finding(
        "shm.size",
        Severity.ERROR,
        "64 MiB",
        ">= 1 GiB",
        Text("/dev/shm is too small", "/dev/shm 太小"),
        Text("start the container with `--shm-size=1g`", "启动容器时加上 `--shm-size=1g`"),
    ),
)


def test_english() -> None:
    assert render_table(FINDINGS, {"LANG": "C.UTF-8"}) == (
        "ERROR    shm.size             64 MiB (wanted: >= 1 GiB)\n"
        "         /dev/shm is too small\n"
        "         -> start the container with `--shm-size=1g`\n"
        "ok       disk.free            900 GiB free (wanted: >= 1 GiB)\n"
        "1 error(s), 0 warning(s), 1 in order"
    )


def test_chinese() -> None:
    assert render_table(FINDINGS, {"LANG": "zh_CN.UTF-8"}) == (
        "错误     shm.size             64 MiB（要求：>= 1 GiB）\n"
        "         /dev/shm 太小\n"
        "         -> 启动容器时加上 `--shm-size=1g`\n"
        "通过     disk.free            900 GiB free（要求：>= 1 GiB）\n"
        "1 个错误，0 个警告，1 项通过"
    )


@pytest.mark.parametrize("lang", ["en_US.UTF-8", "zh_CN.UTF-8"])
def test_long_texts_are_broken_and_nothing_is_lost(lang: str, node_with: NodeWith) -> None:
    findings = [f for f in run_checks(node_with({"shm": None, "nofile_limit": 1024})) if f.severity is not Severity.OK]
    table = render_table(findings, {"LANG": lang}, width=80)
    assert max(columns(line) for line in table.splitlines()) <= 80
    for finding in findings:
        for text in (finding.message, finding.remedy):
            assert "".join(text.pick({"LANG": lang}).split()) in "".join(table.split())


def test_what_is_in_order_takes_one_line() -> None:
    long = Finding("model.files", Severity.OK, "/a/long/path" * 20, "all", Text("there", "存在"))
    first, _ = render_table((long,), {"LANG": "C"}, width=60).splitlines()
    assert len(first) == 60
    assert first.endswith("...")


def test_counts() -> None:
    assert count_by_severity(FINDINGS) == {"error": 1, "warning": 0, "ok": 1}
    assert render_table((), {"LANG": "C"}) == "0 error(s), 0 warning(s), 0 in order"


@pytest.mark.parametrize(
    ("num_bytes", "shown"),
    [(0, "0 B"), (64 << 20, "64 MiB"), (3 << 29, "1.5 GiB"), (5 << 40, "5 TiB"), (1000, "1000 B")],
)
def test_sizes(num_bytes: int, shown: str) -> None:
    assert show_bytes(num_bytes) == shown
