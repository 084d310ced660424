"""Two nodes behind a slow network: what `ftlaunch check` forecasts against what the training then does.

    sudo .venv/bin/python scripts/bench_scaling.py MODEL_FOLDER [--mbit 50]

LoRA on CPUs, one rank a node; a model of some 100 million parameters is enough (SmolLM2-135M). Nodes are network
namespaces of this machine, shaped by tc; they share its processors, so that a step on one node is measured with the
other one idle. Exit code 1 where forecast and measurement differ by more than a quarter.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # the scripts belong to this checkout, installed or not

from launcher.agent.step_needs import step_s_of  # noqa: E402
from tests.cluster.cluster import TestCluster, why_no_cluster  # noqa: E402
from tests.cluster.jobs import ClusterJob, cluster_job, dlc  # noqa: E402

JOB: dict[str, Any] = {
    "data": {"train": str(ROOT / "configs/data/training-faults.train.jsonl"), "max_length": 64},
    "lora": {"r": 16, "dropout": 0.0},
    "training": {"per_device_train_batch_size": 1, "max_steps": 9},
    "checkpoint": {"every_steps": 3, "memory": "off"},
}
MOST_OFF = 0.25


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, help="a Transformers folder with config.json and weights")
    parser.add_argument("--mbit", type=float, default=50.0, help="bound on what each node sends and receives")
    parser.add_argument("--steps", type=int, default=9)
    options = parser.parse_args()
    reason = why_no_cluster(ssh=False)
    if reason is not None:
        print(f"not measured: {reason}", file=sys.stderr)
        return 1
    JOB["training"]["max_steps"] = options.steps
    JOB["model"] = {"path": str(options.model.resolve())}
    with tempfile.TemporaryDirectory() as name, TestCluster(2, ssh=False) as cluster:
        folder = Path(name)
        for node in cluster.nodes:
            node.shape(mbit=options.mbit)
        with cluster_job(cluster, folder, folder / "one", **JOB) as one:
            one.num_nodes = 1
            one.start(cluster.nodes[0])
            alone_s = _step_s(one)
            one.num_nodes = 2
            scaling = _forecast(one)
        with cluster_job(cluster, folder, folder / "two", **JOB) as two:
            two.start()
            together_s = _step_s(two)
    gain, forecast = 2 * alone_s / together_s, float(scaling["measured"].split("nodes at ")[1].split(" x")[0])
    print(f"a step on one node {alone_s:.2f} s, on two {together_s:.2f} s: {gain:.2f} x one node")
    print(f"forecast: {scaling['measured']} (wanted: {scaling['bound']})")
    print(f"off by {abs(forecast / gain - 1):.0%}")
    return 0 if abs(forecast / gain - 1) <= MOST_OFF else 1


def _step_s(job: ClusterJob) -> float:
    if set(job.ends(900)) != {0}:
        raise RuntimeError(job.logs())
    seconds = step_s_of(job.events("checkpoint_saved"))
    if seconds is None:
        raise RuntimeError("fewer than two checkpoints were saved")
    return seconds


def _forecast(job: ClusterJob) -> dict[str, str]:
    """`net.scaling`, as both nodes together find it in the folder of the run on one."""
    processes = [
        node.run(
            [sys.executable, "-m", "launcher", "check", "--config", str(job.job.path), "--json"],
            env={"HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT), **dlc(job.cluster, node, 2)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for node in job.cluster.nodes
    ]
    first, *_ = [process.communicate(timeout=90) for process in processes]
    found = [finding for finding in json.loads(first[0])["findings"] if finding["id"] == "net.scaling"]
    if not found:
        raise RuntimeError(f"no forecast: {first}")
    return dict(found[0])


if __name__ == "__main__":
    sys.exit(main())
