"""Many restarts in one start, and what the processes that stay hold after each: memory, descriptors, children, ports,
files in /dev/shm and in the folder for temporary files. Used by a test and by scripts/many_restarts.py."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import psutil  # type: ignore[import-untyped,unused-ignore]  # stubs are a package of their own

from launcher.host.local_folder import local_folder
from tests.fault.harness import Run

ALLOWED_MIB = 8.0  # of growth, between the first measured restart and the last


@dataclass(frozen=True)
class Held:
    agent_mib: float
    fork_server_mib: float
    template_mib: float
    courier_mib: float
    descriptors: int  # of the agent
    children: int  # of the agent, zombies among them
    zombies: int
    connections: int  # listening or open, of the agent and its helpers
    shm_files: int
    temporary_files: int


def hold(run: Run) -> Held:
    agent = psutil.Process(run.process.pid)
    server = psutil.Process(run.fork_server_pid())
    helpers = {"courier": 0.0}
    for child in agent.children():
        if "courier" in " ".join(child.cmdline()):
            helpers["courier"] = _own_mib(child)
    template = next((child for child in server.children() if child.status() != psutil.STATUS_ZOMBIE), None)
    below = [process for process in agent.children(recursive=True) if process.status() == psutil.STATUS_ZOMBIE]
    return Held(
        agent_mib=_own_mib(agent),
        fork_server_mib=_own_mib(server),
        template_mib=_own_mib(template) if template else 0.0,
        courier_mib=helpers["courier"],
        descriptors=agent.num_fds(),
        children=len(agent.children()),
        zombies=len(below),
        connections=sum(len(process.net_connections(kind="inet")) for process in (agent, server)),
        shm_files=len(os.listdir("/dev/shm")),
        temporary_files=sum(1 for _ in local_folder(run.job.output_dir).glob("**/*")),
    )


def _own_mib(process: psutil.Process) -> float:
    """Pages that it alone has, and has written: what others map as well comes and goes with them."""
    lines = Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Private_Dirty:")) / 1024


def restarts(run: Run, number: int, seed: int) -> Iterator[Held]:
    """Kill a rank after a new step, `number` times; what is held once each next attempt has trained a step."""
    random_rank = random.Random(seed)
    for restart in range(1, number + 1):
        os.kill(run.rank_pid(random_rank.randrange(2)), signal.SIGKILL)
        run.until(partial(_has_gone_on, run, restart + 1), f"restart {restart} has trained a new step")
        yield hold(run)


def _has_gone_on(run: Run, attempts: int) -> bool:
    firsts = run.events("first_step")
    if len(firsts) < attempts:
        return False
    samples = run.job.output_dir / "ftlaunch" / "samples" / "n0.jsonl"
    last = samples.read_bytes().splitlines()[-1]
    step = int(last.split(b'"step":')[1].split(b",")[0].strip(b" }"))
    return step > int(firsts[-1]["step"]) + 1


def growth(first: Held, last: Held) -> list[str]:
    """What is more in the end than it may be; empty where nothing is."""
    found = []
    for name, before in asdict(first).items():
        after = asdict(last)[name]
        allowed = ALLOWED_MIB if name.endswith("_mib") else 0
        if after - before > allowed:
            found.append(f"{name}: {before:.1f} -> {after:.1f}")
    return found
