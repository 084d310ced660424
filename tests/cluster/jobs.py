"""One job that several nodes of a test cluster run together: started as a platform would, hurt, and looked at."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.cluster.cluster import TestCluster
from tests.cluster.node import Node
from tests.fault.harness import ROOT, Job, base_config, merged

PORT = "23456"


def dlc(cluster: TestCluster, node: Node, num_nodes: int) -> dict[str, str]:
    """As PAI-DLC's PyTorchJob sets them; the master by its name."""
    role = "master-0" if node.index == 0 else f"worker-{node.index - 1}"
    return {
        "HOSTNAME": f"dlc1a2b3c4d5e6f-{role}",
        "NPROC_PER_NODE": "1",
        "WORLD_SIZE": str(num_nodes),
        "RANK": str(node.index),
        "MASTER_ADDR": "node0",
        "MASTER_PORT": PORT,
    }


def kubeflow(cluster: TestCluster, node: Node, num_nodes: int) -> dict[str, str]:
    """As Kubeflow's training operator sets them for a PyTorchJob: WORLD_SIZE counts processes."""
    return {
        "PET_NNODES": str(num_nodes),
        "PET_NODE_RANK": str(node.index),
        "PET_NPROC_PER_NODE": "1",
        "WORLD_SIZE": str(num_nodes),
        "RANK": str(node.index),
        "MASTER_ADDR": "node0",
        "MASTER_PORT": PORT,
    }


def slurm(cluster: TestCluster, node: Node, num_nodes: int) -> dict[str, str]:
    """As `srun --ntasks-per-node=1` sets them."""
    return {
        "SLURM_JOB_ID": "77",
        "SLURM_STEP_ID": "0",
        "SLURM_JOB_NUM_NODES": str(num_nodes),
        "SLURM_NNODES": str(num_nodes),
        "SLURM_STEP_NUM_NODES": str(num_nodes),
        "SLURM_JOB_NODELIST": f"node[0-{num_nodes - 1}]",
        "SLURM_STEP_NODELIST": f"node[0-{num_nodes - 1}]",
        "SLURM_STEP_TASKS_PER_NODE": f"1(x{num_nodes})",
        "SLURM_NODEID": str(node.index),
        "SLURM_PROCID": str(node.index),
        "SLURM_LOCALID": "0",
        "SLURM_NTASKS": str(num_nodes),
    }


Platform = Callable[[TestCluster, Node, int], dict[str, str]]


@dataclass
class Agent:
    """One started `ftlaunch` on a node."""

    node: Node
    process: subprocess.Popen[Any]
    log_path: Path

    @property
    def log(self) -> str:
        return self.log_path.read_text("utf-8", "replace")

    def wait(self, timeout_s: float = 120) -> int:
        try:
            return int(self.process.wait(timeout_s))
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.node} still runs after {timeout_s:.0f} s\n{self.log}") from None


class ClusterJob:
    """Agents of one job.yaml. Every wait fails with all logs."""

    def __init__(self, cluster: TestCluster, job: Job, platform: Platform = dlc) -> None:
        self.cluster, self.job, self.platform = cluster, job, platform
        self.num_nodes = len(cluster.nodes)
        self.agents: list[Agent] = []

    def start(self, *nodes: Node, arguments: tuple[str, ...] = (), env: Mapping[str, str] | None = None) -> list[Agent]:
        return [self._start(node, arguments, env or {}) for node in nodes or self.cluster.nodes]

    def _start(self, node: Node, arguments: tuple[str, ...], env: Mapping[str, str]) -> Agent:
        log_path = self.job.path.parent / f"{node.name}-{len(self.agents)}.log"
        told = self.platform(self.cluster, node, self.num_nodes)
        common = {"HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        with log_path.open("wb") as log:
            process = node.run(
                [sys.executable, "-m", "launcher", "--config", str(self.job.path), *arguments],
                env={**common, **told, **env},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        self.agents.append(Agent(node, process, log_path))
        return self.agents[-1]

    # -- looking -------------------------------------------------------------------------------------------------------

    def events(self, name: str | None = None, node: str | None = None) -> list[dict[str, Any]]:
        """Of all nodes, in the order of their times."""
        found = [
            event
            for path in (self.job.output_dir / "ftlaunch" / "events").glob("*.jsonl")
            for event in whole_lines(path)
            if name in (None, event["event"]) and node in (None, event["node"])
        ]
        return sorted(found, key=lambda event: str(event["t"]))

    def samples(self) -> list[dict[str, Any]]:
        folder = self.job.output_dir / "ftlaunch" / "samples"
        return [record for path in folder.glob("*.jsonl") for record in whole_lines(path)]

    def step(self) -> int:
        """The highest step that any rank has finished."""
        return max((int(record["step"]) for record in self.samples()), default=0)

    def worlds(self) -> list[tuple[int, int, tuple[str, ...]]]:
        """(generation, ranks, nodes) of every generation that ranks were started for, in order."""
        found = {(e["gen"], e["world_size"], tuple(e["nodes"])) for e in self.events("generation_started")}
        return sorted(found)

    def logs(self) -> str:
        return "\n".join(f"==== {agent.node} ({agent.process.poll()})\n{agent.log}" for agent in self.agents)

    # -- waiting -------------------------------------------------------------------------------------------------------

    def until(self, condition: Callable[[], bool], what: str, timeout_s: float = 90) -> float:
        """Seconds that it took."""
        began = time.monotonic()
        while not condition():
            if time.monotonic() - began > timeout_s:
                raise AssertionError(f"not within {timeout_s:.0f} s: {what}\n{self.logs()}")
            time.sleep(0.01)
        return time.monotonic() - began

    def until_step(self, step: int, timeout_s: float = 90) -> float:
        return self.until(lambda: self.step() >= step, f"step {step}", timeout_s)

    def until_trained_by(self, *names: str, timeout_s: float = 90) -> float:
        """Until a step has been finished in a generation of exactly these nodes, which is the newest one."""

        def done() -> bool:
            worlds = self.worlds()
            if not worlds or set(worlds[-1][2]) != set(names):
                return False
            return any(record["gen"] == worlds[-1][0] for record in self.samples())

        return self.until(done, f"a step of {', '.join(names)} together", timeout_s)

    def until_said(self, agent: Agent, text: str, timeout_s: float = 60) -> float:
        return self.until(lambda: text in agent.log, f"{agent.node} says {text!r}", timeout_s)

    def ends(self, timeout_s: float = 120) -> list[int]:
        return [agent.wait(timeout_s) for agent in self.agents]

    # -- judging -------------------------------------------------------------------------------------------------------

    def require_each_sample_once(self, num_samples: int, global_batch: int) -> None:
        """Over the steps that count: of each step the latest time that it was done."""
        latest: dict[int, int] = {}
        for record in self.samples():
            latest[record["step"]] = max(latest.get(record["step"], 0), record["gen"])
        ids: dict[int, list[int]] = {}
        for record in self.samples():
            if record["gen"] == latest[record["step"]]:
                ids.setdefault(record["step"], []).extend(record["ids"])
        assert sorted(ids) == list(range(1, max(ids) + 1)), f"steps are missing: {sorted(ids)}"
        per_epoch = -(-num_samples // global_batch)
        epochs: dict[int, Counter[int]] = {}
        for step, of_step in ids.items():
            epochs.setdefault((step - 1) // per_epoch, Counter()).update(of_step)
        for epoch, counts in epochs.items():
            assert set(counts.values()) == {1}, f"epoch {epoch}: given out twice: {counts.most_common(3)}"
        whole = [counts for epoch, counts in epochs.items() if (epoch + 1) * per_epoch <= max(ids)]
        assert all(len(counts) == num_samples for counts in whole)


def whole_lines(path: Path) -> list[dict[str, Any]]:
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in content.splitlines(keepends=True) if line.endswith(b"\n") and line.strip()]


@contextmanager
def cluster_job(
    cluster: TestCluster, tiny: Path, folder: Path, platform: Platform = dlc, /, **changes: Any
) -> Iterator[ClusterJob]:
    """A job with one rank a node and a checkpoint after every second step. Nothing of it outlives the test."""
    config = base_config(tiny, folder / "out")
    config = merged(config, {"cluster": {"nproc_per_node": 1}, "checkpoint": {"every_steps": 2, "keep": 3}})
    job = ClusterJob(cluster, Job(folder, merged(config, changes)), platform)
    try:
        yield job
    finally:
        for node in cluster.nodes:
            node.kill_all()
