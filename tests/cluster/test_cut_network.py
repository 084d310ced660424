"""A network that is cut, slow or lossy: at most one side trains, and nobody is taken for dead who is not."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.cluster.cluster import TestCluster
from tests.cluster.jobs import ClusterJob, cluster_job
from tests.cluster.test_node_loss import LONG, finish
from tests.fault.tiny_model import NUM_RECORDS


def trains(job: ClusterJob, names: set[str]) -> bool:
    worlds = [world for world in job.worlds() if set(world[2]) <= names]
    return any(record["gen"] in {world[0] for world in worlds} for record in job.samples())


@pytest.mark.parametrize("num_nodes", [2, 4])
def test_of_two_halves_one_trains_and_then_there_is_one_run(num_nodes: int, tiny: Path, tmp_path: Path) -> None:
    with TestCluster(num_nodes, ssh=False) as cluster:
        elastic = {"cluster": {"nodes": f"1:{num_nodes}", "gather_seconds": 60}, **LONG}
        with cluster_job(cluster, tiny, tmp_path, **elastic) as job:
            names = [f"n{i}" for i in range(num_nodes)]
            job.start()
            job.until_trained_by(*names)
            job.until_step(4)
            half = num_nodes // 2
            cluster.partition(cluster.nodes[:half], cluster.nodes[half:])
            sides = [set(names[:half]), set(names[half:])]
            job.until(lambda: any(trains(job, side) for side in sides), "one half trains", 40)
            time.sleep(5)  # for the other half to go wrong
            assert sum(trains(job, side) for side in sides) == 1, job.logs()
            cluster.heal()
            job.until_trained_by(*names, timeout_s=60)
            finish(job)
            job.require_each_sample_once(NUM_RECORDS, 2 * num_nodes)


def test_slow_and_lossy_is_not_dead(two: TestCluster, tiny: Path, tmp_path: Path) -> None:
    """200 ms each way and 5 % of all packets lost, for a minute."""
    with cluster_job(two, tiny, tmp_path, cluster={"nodes": "1:2"}, **LONG) as job:
        job.start()
        job.until_trained_by("n0", "n1")
        two.delay(200)
        two.lossy(5)
        time.sleep(60)
        assert len(job.worlds()) == 1, job.logs()
        assert all(agent.process.poll() is None for agent in job.agents)
