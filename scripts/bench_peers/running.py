"""One started job: its processes, found by a mark in their environment, and its steps, read from what it writes.

Invariant: nothing of a run outlives it, and only processes that carry its mark are signalled.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scripts.bench_peers.job_files import Job
from scripts.bench_peers.launchers import Command, Launcher

if TYPE_CHECKING:
    from tests.cluster.cluster import TestCluster

_MARK = "FTLAUNCH_BENCH_ID"
_POLL_S = 0.02  # only when to act depends on it: times are those that the ranks write down
_COMMON = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "DS_ACCELERATOR": "cpu", "TOKENIZERS_PARALLELISM": "false"}
_STEP_LINE = re.compile(r"^(\S+ \S+) ftlaunch\.rank INFO step (\d+) of \d+: loss", re.MULTILINE)
_RANK_LOG = re.compile(r"/rank-(\d+)\.log$")


@dataclass(frozen=True)
class Step:
    """A step that rank 0 has finished. `attempt` differs from one start of the ranks to the next."""

    at: float
    number: int
    attempt: int


class NotMeasuredError(Exception):
    """The run did not get as far as the measurement; the text says where it stopped."""


class Run:
    def __init__(self, launcher: Launcher, job: Job, cluster: TestCluster | None = None) -> None:
        self.launcher, self.job, self.cluster = launcher, job, cluster
        self._mark = uuid.uuid4().hex
        self._services: list[subprocess.Popen[Any]] = []
        self.agents: list[subprocess.Popen[Any]] = []
        self.started_at = 0.0

    def __enter__(self) -> Run:
        self.job.folder.mkdir(parents=True)
        commands = self.launcher.commands(self.job)
        try:
            for command in commands:
                if command.serves_port is not None:
                    self._services.append(self._start(command))
                    self._until_it_listens(command)
            self.started_at = time.time()
            self.agents = [self._start(command) for command in commands if command.serves_port is None]
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        deadline = time.monotonic() + 20
        while pids := self.pids():
            if time.monotonic() > deadline:
                raise RuntimeError(f"{self.launcher.name}: still there after SIGKILL: {pids}")
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            for process in (*self.agents, *self._services):
                process.poll()  # collected: a zombie would count as there
            time.sleep(_POLL_S)

    def _start(self, command: Command) -> subprocess.Popen[Any]:
        environ = {**_COMMON, **command.environ, _MARK: self._mark, "BENCH_FAULT_FILE": str(self.job.fault_order)}
        with (self.job.folder / f"output-{command.node}.log").open("ab") as log:
            streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
            if self.cluster is None:
                return subprocess.Popen(
                    command.argv, env={**os.environ, **environ}, start_new_session=True, cwd=self.job.folder, **streams
                )
            node = self.cluster.nodes[command.node]
            return node.run(command.argv, env={"GLOO_SOCKET_IFNAME": "eth0", **environ}, cwd=self.job.folder, **streams)

    def _until_it_listens(self, command: Command) -> None:
        assert command.serves_port is not None
        if self.cluster is None:
            port = command.serves_port

            def listens() -> bool:
                with socket.socket() as connection:
                    return connection.connect_ex(("127.0.0.1", port)) == 0
        else:
            node = self.cluster.nodes[command.node]
            needle = f":{command.serves_port:04X} "

            def listens() -> bool:
                listening = node.output(["cat", "/proc/net/tcp", "/proc/net/tcp6"])
                return any(needle in line and " 0A " in line for line in listening.splitlines())

        self.until(listens, "its master listens", 60)

    # -- processes -----------------------------------------------------------------------------------------------------

    def pids(self) -> list[int]:
        needle = f"{_MARK}={self._mark}".encode()
        return [pid for pid in _all_pids() if needle in _read(pid, "environ").split(b"\0")]

    def rank_pids(self) -> dict[int, int]:
        """pid by rank, of those that run now."""
        if not self.launcher.is_ftlaunch:
            newest = {record["rank"]: record["pid"] for record in self._told() if record["event"] == "started"}
            return {rank: pid for rank, pid in newest.items() if Path(f"/proc/{pid}").is_dir()}
        found = {}
        for pid in self.pids():
            with contextlib.suppress(OSError):
                of_log = _RANK_LOG.search(os.readlink(f"/proc/{pid}/fd/1"))
                if of_log and os.getpgid(pid) == pid:
                    found[int(of_log[1])] = pid
        return found

    def supervisor_mb(self) -> list[tuple[str, float, float]]:
        """Command line, resident MB and proportional MB (pages shared by n processes count 1/n) of what is no rank and
        no rank's child."""
        ranks = set(self.rank_pids().values())
        sizes = []
        for pid in self.pids():
            rollup = _read(pid, "smaps_rollup")
            rss, pss = (re.search(rb"^%s:\s+(\d+) kB" % key, rollup, re.MULTILINE) for key in (b"Rss", b"Pss"))
            if rss and pss and pid not in ranks and _parent(pid) not in ranks:
                sizes.append((_name(pid), int(rss[1]) * 1024 / 1e6, int(pss[1]) * 1024 / 1e6))
        return sizes

    def resident_mb(self, pid: int) -> float | None:
        found = re.search(rb"^VmRSS:\s+(\d+) kB", _read(pid, "status"), re.MULTILINE)
        return int(found[1]) * 1024 / 1e6 if found else None

    def is_over(self) -> bool:
        """No process of it is left but a service that nobody has asked to stop."""
        codes = [process.poll() for process in self.agents]  # that of a process that is ending comes after its memory
        return None not in codes and not set(self.pids()) - self._service_pids()

    def _service_pids(self) -> set[int]:
        """The service and what it has started, which is in its session."""
        sessions = {process.pid for process in self._services}
        return {pid for pid in self.pids() if _session(pid) in sessions}

    # -- what it tells -------------------------------------------------------------------------------------------------

    def steps(self) -> list[Step]:
        if not self.launcher.is_ftlaunch:
            told = [record for record in self._told() if record["event"] == "step" and record["rank"] == 0]
            return [Step(record["t"], record["step"], record["pid"]) for record in told]
        found = []
        for path in (self.job.run_folder / "ftlaunch/logs").glob("gen-*/rank-*.log"):
            generation = int(path.parent.name.removeprefix("gen-"))
            for at, number in _STEP_LINE.findall(path.read_text("utf-8", "replace")):
                ended_at = datetime.strptime(at, "%Y-%m-%d %H:%M:%S,%f").timestamp()
                found.append(Step(ended_at, int(number), generation))
        return sorted(found, key=lambda step: step.at)

    def attempts(self) -> list[float]:
        """When each was begun."""
        if not self.launcher.is_ftlaunch:
            return [record["t"] for record in self._told() if record["event"] == "started" and record["rank"] == 0]
        begun = {event["gen"]: event["at"] for event in reversed(self.events("generation_started"))}
        return sorted(begun.values())

    def events(self, name: str | None = None) -> list[dict[str, Any]]:
        """ftlaunch's, of all nodes, with the time as `at`."""
        found = []
        for path in (self.job.run_folder / "ftlaunch/events").glob("*.jsonl"):
            for event in _whole_lines(path):
                if name in (None, event["event"]):
                    at = datetime.fromisoformat(event["t"].replace("Z", "+00:00")).timestamp()
                    found.append({**event, "at": at})
        return sorted(found, key=lambda event: float(event["at"]))

    def all_logs(self) -> str:
        paths = [*self.job.folder.glob("output-*.log"), *self.job.run_folder.glob("ftlaunch/logs/gen-*/rank-*.log")]
        return "".join(path.read_text("utf-8", "replace") for path in sorted(paths))

    def _told(self) -> list[dict[str, Any]]:
        return _whole_lines(self.job.folder / "steps.jsonl")

    def saved_step(self) -> int:
        """Of the newest whole checkpoint on disk; 0 where there is none."""
        whole = [path.parent.name for path in self.job.run_folder.glob("checkpoint-*/trainer_state.json")]
        return max((int(name.removeprefix("checkpoint-")) for name in whole), default=0)

    # -- waiting -------------------------------------------------------------------------------------------------------

    def until(self, condition: Callable[[], bool], what: str, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            if self.agents and all(agent.poll() is not None for agent in self.agents) and not condition():
                codes = [agent.returncode for agent in self.agents]
                raise NotMeasuredError(f"ended with {codes} before {what}")
            if time.monotonic() > deadline:
                raise NotMeasuredError(f"not within {timeout_s:.0f} s: {what}")
            time.sleep(_POLL_S)

    def until_step(self, number: int, timeout_s: float = 150) -> Step:
        def reached() -> bool:
            return any(step.number >= number for step in self.steps())

        self.until(reached, f"step {number}", timeout_s)
        return next(step for step in self.steps() if step.number >= number)


def _whole_lines(path: Path) -> list[dict[str, Any]]:
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in content.splitlines(keepends=True) if line.endswith(b"\n") and line.strip()]


def _all_pids() -> Iterator[int]:
    return (int(name) for name in os.listdir("/proc") if name.isdigit())


def _read(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:  # it has ended
        return b""


def _session(pid: int) -> int:
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return -1


def _parent(pid: int) -> int:
    after_name = _read(pid, "stat").rpartition(b")")[2].split()
    return int(after_name[1]) if after_name else -1


def _name(pid: int) -> str:
    """Module or file name, without interpreter and arguments."""
    program, *arguments = _read(pid, "cmdline").decode("utf-8", "replace").split("\0")
    words = [word for word in arguments if word not in ("-u", "-m")]
    return Path(words[0] if words and Path(program).name.startswith("python") else program).name
