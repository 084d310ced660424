"""Incident bundles and what is printed: complete, redacted, bounded, one screen."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from launcher.agent.console import Console
from launcher.agent.events import EventLog
from launcher.diagnose import bundle
from launcher.diagnose.evidence import NodeEvidence, RankEvidence, number_lines
from launcher.diagnose.sources import read_sources
from launcher.diagnose.verdict import diagnose
from launcher.errors import UserError

SECRET = "hf_" + "aB3dE5" * 4
LOG = f"login {SECRET}\nOSError: [Errno 28] No space left on device: '/data/out'\n"


def ranks(log: str = LOG, num: int = 2) -> list[RankEvidence]:
    own = RankEvidence(1, "n0", 77, 1, None, "logs/rank-1.log", number_lines(log), 40)
    others = [
        RankEvidence(r, "n0", 70 + r, -15, None, f"logs/rank-{r}.log", (), 40, killed_by_us=True)
        for r in range(num)
        if r != 1
    ]
    return [*others, own]


def write(root: Path, log: str = LOG) -> Path:
    nodes = [NodeEvidence(kernel_lines=(f"[1.0] {SECRET}",), node="n0")]
    environ = {"HF_TOKEN": SECRET, "NCCL_DEBUG": "WARN"}
    facts = {"hostname": "n0", "mount": {"password": "sesame-open"}}
    extra = {"decision": "stopped: a rerun would meet it again"}
    return bundle.write_bundle(
        root, "2026-01-02T03:04:05Z", diagnose(ranks(log)), ranks(log), nodes, environ, facts, extra
    )


@pytest.fixture(autouse=True)
def english(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FTLAUNCH_LANG", "en")


def test_a_bundle_holds_everything_and_no_secret(tmp_path: Path) -> None:
    folder = write(tmp_path / "incidents")
    assert folder.name == "2026-01-02T030405Z-no_space"
    assert sorted(file.name for file in folder.iterdir()) == [
        "environment.json",
        "host.json",
        "kernel.log",
        "rank-0.log",
        "rank-1.log",
        "summary.md",
        "verdict.json",
    ]
    everything = "".join(file.read_text() for file in folder.iterdir())
    assert SECRET not in everything
    assert "sesame-open" not in everything
    assert json.loads((folder / "verdict.json").read_text())["class"] == "no_space"
    assert json.loads((folder / "environment.json").read_text()) == {"HF_TOKEN": "[redacted]", "NCCL_DEBUG": "WARN"}


def planted() -> dict[str, str]:
    """One secret of each kind, by the line that it stands in; each is recognized by its own middle."""
    kinds = {
        "bearer": "Authorization: Bearer {}",
        "hub": "token hf_{}",
        "github": "remote ghp_{}",
        "aliyun": "id LTAI{}",
        "aws": "AWS_SECRET_ACCESS_KEY={}",
        "wandb": "wandb login {}",
        "jwt": "got eyJhbGciOiJIUzI1NiJ9.{}.c2lnbmF0dXJl",
        "url": "pull https://bob:{}@git.example.com/x.git",
        "password": '{{"password": "{}"}}',
        "option": "run --api-key {}",
        "access": "AccessKeySecret: {}",
        "pem": "-----BEGIN OPENSSH PRIVATE KEY-----\n{}\n-----END OPENSSH PRIVATE KEY-----",
        "environment": "the program printed {} by itself",
    }
    return {name: line.format(f"Zq7{name}Xw9Kd82LmPo3") for name, line in kinds.items()}


def test_a_planted_secret_of_each_kind_is_in_no_file_of_the_bundle(tmp_path: Path) -> None:
    lines = "\n".join(planted().values())
    log = f"{lines}\nOSError: [Errno 28] No space left on device: 'https://bob:Zq7urlXw9Kd82LmPo3@host/x'\n"
    environ = {"CI_JOB_TOKEN": "Zq7environmentXw9Kd82LmPo3", "HTTPS_PROXY": "http://a:Zq7urlXw9Kd82LmPo3@proxy:1"}
    nodes = [NodeEvidence(kernel_lines=tuple(lines.split("\n")), node="n0", facts={"said": lines})]
    extra = {"decision": lines, "about": {"output_dir": "/x?token=Zq7optionXw9Kd82LmPo3"}}
    folder = bundle.write_bundle(
        tmp_path, "now", diagnose(ranks(log)), ranks(log), nodes, environ, {"mounts": [{"options": lines}]}, extra
    )
    everything = "".join(file.read_text() for file in folder.iterdir())
    assert [name for name in planted() if f"Zq7{name}" in everything] == []
    assert everything.count("[redacted]") > 4 * len(planted())


def test_events_and_lines_of_ftlaunch_hold_no_secret(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = "\n".join(line for name, line in planted().items() if name != "environment")
    events = EventLog(tmp_path, "n0")
    events.emit("run_ended", reason=lines, inputs={"password": "Zq7passwordXw9Kd82LmPo3"}, steps=3)
    console = Console()
    console.say(lines)
    console.block(lines)
    console.close()
    said = capsys.readouterr()
    assert "Zq7" not in events.path.read_text() + said.out + said.err
    assert json.loads(events.path.read_text())["steps"] == 3


def test_a_second_incident_of_the_same_second_overwrites_nothing(tmp_path: Path) -> None:
    assert write(tmp_path).name + "-2" == write(tmp_path).name


def test_a_bundle_is_bounded_and_keeps_the_ends_of_the_logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundle, "MAX_BUNDLE_BYTES", 40_000)
    monkeypatch.setattr(bundle, "_RESERVED_BYTES", 20_000)
    folder = write(tmp_path, "filler\n" * 50_000 + LOG)
    assert sum(file.stat().st_size for file in folder.iterdir()) <= 40_000
    text = (folder / "rank-1.log").read_text()
    assert text.startswith("filler\n")
    assert " bytes are left out here ...\n" in text
    assert "No space left" in text


def test_the_summary_fits_a_screen_and_begins_with_the_culprit(tmp_path: Path) -> None:
    many = ranks(num=64)
    text = bundle.summary(diagnose(many), many, "stopped")
    assert len(text.splitlines()) <= 24
    assert "- rank 1 (n0): exit code 1, step 40\n- rank 0 (n0): SIGTERM (stopped by ftlaunch), step 40" in text
    assert "... and 56 more" in text


def test_the_screen_says_what_broke_where_and_what_to_change() -> None:
    assert bundle.screen(diagnose(ranks()), "stopped, because a rerun would meet it again").splitlines() == [
        "Why it failed: no_space (certain)",
        "  Cause: rank 1 (n0): the file system is full; a write, most likely of a checkpoint, was cut short "
        "(torch.save only says that a position is not the expected one).",
        "  Proof: OSError: [Errno 28] No space left on device: '/data/out'",
        "    (rank 1, logs/rank-1.log:2)",
        "  What to do: Look with `df -h` and `df -i`; free space on output_dir's disk, lower checkpoint.keep, "
        "or move output_dir.",
        "  ftlaunch: stopped, because a rerun would meet it again",
    ]


def test_the_screen_speaks_chinese(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FTLAUNCH_LANG", "zh")
    text = bundle.screen(diagnose(ranks()), "")
    assert text.startswith("失败原因：no_space（确定）")
    assert "文件系统已满" in text


def test_a_bundle_can_be_diagnosed_again(tmp_path: Path) -> None:
    sources = read_sources([write(tmp_path)])
    assert [rank.rank for rank in sources.ranks] == [0, 1]
    verdict = diagnose(sources.ranks, sources.nodes)
    assert (verdict.cls, verdict.culprit and verdict.culprit.rank) == ("no_space", 1)


def test_a_run_folder_gives_its_latest_generation_with_the_exits(tmp_path: Path) -> None:
    for generation, text in ((2, "KeyError: 'old'\n"), (10, "step 5\n")):
        logs = tmp_path / f"ftlaunch/logs/gen-{generation}"
        logs.mkdir(parents=True)
        (logs / "rank-0.log").write_text(text)
    events = tmp_path / "ftlaunch/events"
    events.mkdir()
    lines = [
        {"event": "worker_exited", "gen": 2, "rank": 0, "exit_code": 1},
        {"event": "worker_exited", "gen": 10, "rank": 0, "signal": "SIGBUS", "pid": 5, "node": "n0"},
    ]
    (events / "n0.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"event": "worker_ex')
    sources = read_sources([tmp_path])
    assert [(r.rank, r.signal, r.node) for r in sources.ranks] == [(0, 7, "n0")]
    assert diagnose(sources.ranks).cls == "shm_exhausted"


@pytest.mark.parametrize(("make", "says"), [(False, "no such file"), (True, "no logs here")])
def test_nothing_to_read_is_said(tmp_path: Path, make: bool, says: str) -> None:
    folder = tmp_path / "empty"
    if make:
        folder.mkdir()
    with pytest.raises(UserError, match=says):
        read_sources([folder])
