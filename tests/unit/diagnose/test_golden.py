"""What a person reads who knows nothing of the code: the summaries of ten incidents, as they are pasted into tickets.

After a change that is meant: `FTLAUNCH_WRITE_GOLDEN=1 python -m pytest tests/unit/diagnose/test_golden.py`, and read
them.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from launcher.agent.sample_hunt import with_sample
from launcher.diagnose.bad_sample import BadSample, Offence
from launcher.diagnose.bundle import summary
from launcher.diagnose.evidence import NodeEvidence, RankEvidence, number_lines
from launcher.diagnose.verdict import diagnose

GOLDEN = Path(__file__).with_name("golden")
WATCHDOG = (
    "[rank{r}]:[E1130 10:00:00.1 ProcessGroupNCCL.cpp:632] [Rank {r}] Watchdog caught collective operation timeout: "
    "WorkNCCL(SeqNum=912, OpType=ALLREDUCE, NumelIn=4096, NumelOut=4096, Timeout(ms)=600000) ran for 600012 ms"
)
ABOUT = {
    "time": "20261130T120000.000000Z",
    "host": "dlc-7f3a-worker-0",
    "output_dir": "/mnt/data/runs/insurance-lora",
    "attempt": "3",
    "versions": "torch 2.13.0, transformers 5.24.0, deepspeed 0.19.8",
}
STOPS = "stops with exit code 1: {}: the same start would meet it again"
STARTS = "starts again: {} does not come from the job; the attempt made progress"


@dataclass(frozen=True)
class Incident:
    ranks: Sequence[RankEvidence]
    done: str
    nodes: Sequence[NodeEvidence] = field(default_factory=list)
    sample: BadSample | None = None


def rank(number: int, log: str = "", code: int | None = 1, step: int | None = 240, **more: object) -> RankEvidence:
    path = f"/mnt/data/runs/insurance-lora/ftlaunch/logs/gen-3/rank-{number}.log"
    blank = RankEvidence(number, "n0", 4000 + number, code, None, path, number_lines(log), step)
    return replace(blank, **more)  # type: ignore[arg-type]


def victims(numbers: range) -> list[RankEvidence]:
    return [rank(r, WATCHDOG.format(r=r), -6) for r in numbers]


def stopped(numbers: range) -> list[RankEvidence]:
    return [rank(r, "", -15, killed_by_us=True) for r in numbers]


OOM = (
    'Traceback (most recent call last):\n  File "/opt/env/lib/python3.11/site-packages/torch/nn/linear.py", line 2, '
    'in linear\n  File "/opt/env/lib/python3.11/site-packages/transformers/models/qwen2.py", line 90, in forward\n'
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.32 GiB. GPU 3 has a total capacity of 79.15 GiB "
    "of which 1.10 GiB is free. Including non-PyTorch memory, this process has 78.04 GiB memory in use. Of the "
    "allocated memory 75.90 GiB is allocated by PyTorch, and 1.21 GiB is reserved by PyTorch but unallocated."
)
SHAPE = (
    'Traceback (most recent call last):\n  File "/mnt/code/train.py", line 88, in training_step\n    loss = head(x)\n'
    '  File "/opt/env/lib/python3.11/site-packages/torch/nn/modules/linear.py", line 125, in forward\n'
    "RuntimeError: mat1 and mat2 shapes cannot be multiplied (8x4096 and 2048x32000)"
)
XID = "[88123.456789] NVRM: Xid (PCI:0000:3b:00): 79, pid=4002, name=python3, GPU has fallen off the bus."
FULL = {"total_bytes": 500 << 30, "free_bytes": 3 << 20, "free_inodes": 31000000}
INCIDENTS = {
    "shape_error_in_user_code": Incident([rank(5, SHAPE), *victims(range(5))], STOPS.format("user_code")),
    "gpu_memory_in_a_step": Incident([rank(3, OOM), *stopped(range(3))], STOPS.format("cuda_oom_forward")),
    "token_beyond_the_vocabulary": Incident(
        [rank(0, "IndexError: index out of range in self", step=None)],
        STOPS.format("device_assert_index"),
        sample=BadSample("/mnt/data/train.jsonl", 48211, Offence("token id", 17, 152064, 151936), "<|ref|>"),
    ),
    "killed_for_host_memory": Incident(
        [rank(1, "", -9, step=None), *stopped(range(1))],
        STOPS.format("host_oom"),
        [NodeEvidence(cgroup_oom_kills=1, node="n0")],
    ),
    "killed_by_somebody": Incident(
        [rank(1, "", -9), *stopped(range(1))],
        "starts again: what ended the rank does not come from the job; the attempt made progress",
        [NodeEvidence(cgroup_oom_kills=0, node="n0")],
    ),
    "gpu_fell_off_the_bus": Incident(
        [*victims(range(2)), rank(2, "torch.AcceleratorError: CUDA error: unspecified launch failure")],
        STARTS.format("gpu_off_bus"),
        [NodeEvidence(kernel_lines=(XID,), node="n0")],
    ),
    "shared_memory_full": Incident(
        [
            rank(
                0,
                "RuntimeError: DataLoader worker (pid 4242) is killed by signal: Bus error. It is possible that "
                "dataloader's workers are out of shared memory. Please try to raise your shared memory limit.",
                step=None,
            )
        ],
        STOPS.format("shm_exhausted"),
        [NodeEvidence(shm_free_bytes=0, shm_size_bytes=64 << 20, node="n0")],
    ),
    "disk_full_while_saving": Incident(
        [
            rank(0, "RuntimeError: [enforce fail at inline_container.cc:672] . unexpected pos 576 vs 534"),
            *stopped(range(1, 4)),
        ],
        STOPS.format("no_space"),
        [NodeEvidence(node="n0", facts={"disks": {"output_dir": FULL}})],
    ),
    "peer_lost_without_its_log": Incident(
        [rank(0, "n1:9:9 [0] NCCL WARN socketProgress: Connection closed by remote peer n1<4021>")],
        STARTS.format("nccl_remote_exited"),
    ),
    "broken_record": Incident(
        [
            rank(
                0,
                "pyarrow.lib.ArrowInvalid: JSON parse error: Missing a closing quotation mark in string. in row 1723",
                step=None,
            )
        ],
        STOPS.format("data_bad_record"),
    ),
}


@pytest.mark.parametrize("name", INCIDENTS)
def test_the_summary_of_an_incident_is_as_it_was_read_and_found_good(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FTLAUNCH_LANG", "en")
    incident = INCIDENTS[name]
    verdict = diagnose(incident.ranks, incident.nodes)
    if incident.sample:
        verdict = with_sample(verdict, incident.sample)
    text = summary(verdict, incident.ranks, incident.done, ABOUT)
    file = GOLDEN / f"{name}.md"
    if os.environ.get("FTLAUNCH_WRITE_GOLDEN"):
        GOLDEN.mkdir(exist_ok=True)
        file.write_text(text, "utf-8")
    assert text == file.read_text("utf-8")


def test_there_is_no_golden_file_too_many() -> None:
    assert {file.stem for file in GOLDEN.iterdir()} == set(INCIDENTS)
