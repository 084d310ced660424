"""`ftlaunch check` on every node: a slow one is named, and what the network leaves of several nodes is forecast."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.cluster import TestCluster
from tests.cluster.jobs import ClusterJob, cluster_job, dlc
from tests.fault.harness import ROOT

pytestmark = pytest.mark.slow


def check(job: ClusterJob) -> list[dict[str, Any]]:
    """What `ftlaunch check --json` says on each node."""
    processes = [
        node.run(
            [sys.executable, "-m", "launcher", "check", "--config", str(job.job.path), "--json"],
            env={"HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT), **dlc(job.cluster, node, job.num_nodes)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for node in job.cluster.nodes
    ]
    documents = []
    for process in processes:
        out, err = process.communicate(timeout=60)
        assert process.returncode in (0, 3), err
        documents.append(json.loads(out))
    return documents


def finding(document: dict[str, Any], name: str) -> dict[str, str]:
    (found,) = [one for one in document["findings"] if one["id"] == name and not one["bound"].startswith("see n")]
    return dict(found)


def test_a_node_shaped_to_a_tenth_is_named_among_four(four_nodes: TestCluster, tiny: Path, tmp_path: Path) -> None:
    for node in four_nodes.nodes:
        node.shape(mbit=500)
    four_nodes.nodes[2].shape(mbit=50)
    with cluster_job(four_nodes, tiny, tmp_path) as job:
        documents = check(job)
        for document in documents:
            assert finding(document, "cluster.nodes")["severity"] == "ok"
            assert finding(document, "net.reach")["measured"] == "12 of 12 ways"
            assert finding(document, "disk.visible")["severity"] == "ok"
            speed = finding(document, "net.speed")
            assert speed["severity"] == "warning"
            assert "slow with every partner: n2 (" in speed["message"]
            assert document["cluster"]["seconds"] <= 25
    print("seconds of the nodes together:", [document["cluster"]["seconds"] for document in documents])


def test_two_nodes_at_50_mbit_are_forecast_to_be_slower_than_one(two: TestCluster, tiny: Path, tmp_path: Path) -> None:
    for node in two.nodes:
        node.shape(mbit=50)
    with cluster_job(two, tiny, tmp_path) as job:
        earlier = job.job.output_dir / "ftlaunch" / "events" / "n0.jsonl"
        earlier.parent.mkdir(parents=True)
        saves = [("2026-12-01T00:00:00.000Z", 10), ("2026-12-01T00:00:01.000Z", 1010)]  # a millisecond a step
        lines = [{"v": 1, "t": t, "node": "n0", "gen": 1, "event": "checkpoint_saved", "step": s} for t, s in saves]
        earlier.write_text("".join(json.dumps(line) + "\n" for line in lines))
        document = check(job)[0]
        scaling = finding(document, "net.scaling")
        assert scaling["severity"] == "warning"
        mbit = float(scaling["measured"].split(" Mb/s")[0])
        assert 37.5 < mbit < 62.5, scaling
        assert document["cluster"]["summed_bytes_per_s"] is not None
        assert "2 nodes would run at 0." in scaling["message"]
