"""A thousand snapshots cost no more memory than a few, and all of it is given back, however the run ends."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

from tests.fault.harness import Job, Run

MakeJob = Callable[..., Job]
EVERY_STEP = {"training": {"max_steps": 4000, "logging_steps": 500}, "checkpoint": {"every_steps": 40, "memory": "on"}}
_MIB = 1 << 20


def resident_bytes(pid: int) -> int:
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return (int(fields["RssAnon"].split()[0]) + int(fields["RssShmem"].split()[0])) * 1024


def slots_of(pid: int) -> dict[str, int]:
    """Bytes of memory behind the process's memfds, by descriptor."""
    found = {}
    for fd in os.listdir(f"/proc/{pid}/fd"):
        path = f"/proc/{pid}/fd/{fd}"
        try:
            if os.readlink(path).startswith("/memfd:ftlaunch-"):
                found[fd] = os.stat(path).st_blocks * 512
        except FileNotFoundError:
            continue
    return found


def shared_bytes() -> int:
    """Of the whole machine: memfds and everything in /dev/shm."""
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    return int(fields["Shmem"].split()[0]) * 1024


def held_by(run: Run) -> dict[str, int]:
    pids = {"agent": run.process.pid, "rank 0": run.rank_pid(0), "rank 1": run.rank_pid(1)}
    return {name: resident_bytes(pid) for name, pid in pids.items()}


def test_a_thousand_snapshots_leave_memory_flat(make_job: MakeJob) -> None:
    job = make_job(**EVERY_STEP)
    shm_before = set(os.listdir("/dev/shm"))
    with job.start() as run:
        run.until_step(350)  # every slot has had a checkpoint for the disk in it, which is the largest
        before, slots_before = held_by(run), slots_of(run.process.pid)
        run.until_step(1350, timeout_s=300)
        after, slots_after = held_by(run), slots_of(run.process.pid)
        assert len(slots_before) == 2 * 3, slots_before
        assert slots_after.keys() == slots_before.keys()
        assert sum(slots_after.values()) - sum(slots_before.values()) < 1 * _MIB, (slots_before, slots_after)
        grown = {name: (after[name] - before[name]) / _MIB for name in after}
        assert all(mib < 16 for mib in grown.values()), grown
        run.signal(signal.SIGTERM)
        assert run.wait(60) == 138, run.log
        assert not run.left_after(15)
    assert set(os.listdir("/dev/shm")) == shm_before


def test_after_kill_9_of_the_agent_its_memory_is_free(make_job: MakeJob) -> None:
    job = make_job(**EVERY_STEP)
    shm_before = set(os.listdir("/dev/shm"))
    with job.start() as run:
        run.until_step(60)
        held = sum(slots_of(run.process.pid).values())
        assert held > 0
        while_it_ran = shared_bytes()
        run.process.kill()
        assert not run.left_after(15)
        deadline = time.monotonic() + 10
        while shared_bytes() > while_it_ran - held // 2 and time.monotonic() < deadline:
            time.sleep(0.1)
        assert shared_bytes() <= while_it_ran - held // 2, (held, while_it_ran, shared_bytes())
    assert set(os.listdir("/dev/shm")) == shm_before
