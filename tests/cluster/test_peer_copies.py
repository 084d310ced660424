"""A node goes with all that is in its memory: the run goes on from what the next node keeps of it."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.cluster import TestCluster
from tests.cluster.jobs import ClusterJob, cluster_job
from tests.fault.tiny_model import NUM_RECORDS

IN_MEMORY = {
    "training": {"max_steps": 100_000},
    "checkpoint": {"every_steps": 50_000, "memory": "on"},
}


def resumed_after(job: ClusterJob, number: int) -> list[dict[str, Any]]:
    """What the nodes of the `number`-th generation say that they resumed from."""
    generation = sorted(world[0] for world in job.worlds())[number]
    return [event for event in job.events("resumed") if event["gen"] == generation]


def reached_before(job: ClusterJob, number: int) -> int:
    generations = sorted(world[0] for world in job.worlds())
    return max(record["step"] for record in job.samples() if record["gen"] < generations[number])


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("nodes", ["1:2", 2])
def test_a_lost_node_costs_at_most_one_step_without_any_checkpoint_on_disk(
    two: TestCluster, tiny: Path, tmp_path: Path, victim: int, nodes: str | int
) -> None:
    cluster = {"cluster": {"nodes": nodes, "gather_seconds": 60}}
    with cluster_job(two, tiny, tmp_path, **IN_MEMORY, **cluster) as job:
        job.start()
        job.until_trained_by("n0", "n1")
        job.until_step(12)
        two.nodes[victim].kill_all()
        if nodes == 2:
            job.start(two.nodes[victim])  # with nothing in its memory
        job.until(lambda: len(job.worlds()) == 2 and bool(resumed_after(job, 1)), "the next generation resumes", 90)
        reached = reached_before(job, 1)
        job.until_step(reached + 3)
        for resumed in resumed_after(job, 1):
            assert resumed["tier"] in ("memory", "peer"), resumed
            assert reached - resumed["step"] <= 1, (reached, resumed)
        assert "peer" in {resumed["tier"] for resumed in resumed_after(job, 1)}
        assert not list(job.job.output_dir.glob("checkpoint-*"))
        for agent in job.agents:
            if agent.process.poll() is None:
                agent.process.send_signal(signal.SIGTERM)
        job.until(lambda: all(agent.process.poll() is not None for agent in job.agents), "all agents end", 60)
        job.require_each_sample_once(NUM_RECORDS, 4)


def test_a_rank_that_dies_costs_at_most_one_step_on_all_nodes(two: TestCluster, tiny: Path, tmp_path: Path) -> None:
    drill = {"drill": {"kill": {"rank": 1, "step": 12}}}
    saves = {"checkpoint": {"every_steps": 50_000, "memory": "on"}, "training": {"max_steps": 20}}
    with cluster_job(two, tiny, tmp_path, **saves, **drill) as job:
        job.start()
        assert job.ends() == [0, 0], job.logs()
        resumed = resumed_after(job, 1)
        assert len(resumed) == 2, job.logs()
        assert {event["step"] for event in resumed} <= {11, 12}
        assert {event["tier"] for event in resumed} <= {"memory", "peer"}
        job.require_each_sample_once(NUM_RECORDS, 4)
