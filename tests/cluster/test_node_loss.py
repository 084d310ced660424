"""Any node may go, in any phase, and come back: the run goes on, and each sample is seen once."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from tests.cluster.cluster import TestCluster
from tests.cluster.jobs import ClusterJob, cluster_job
from tests.fault.tiny_model import NUM_RECORDS

LONG = {"training": {"max_steps": 100_000}}
ELASTIC = {"cluster": {"nodes": "1:2", "gather_seconds": 60}, **LONG}


def finish(job: ClusterJob) -> None:
    """Stop, and let the same job run to an end that is near."""
    for agent in job.agents:
        if agent.process.poll() is None:
            agent.process.send_signal(signal.SIGTERM)
    job.until(lambda: all(agent.process.poll() is not None for agent in job.agents), "all agents end", 60)


@pytest.mark.parametrize("victim", [0, 1])
def test_the_other_node_goes_on_and_takes_it_back(two: TestCluster, tiny: Path, tmp_path: Path, victim: int) -> None:
    with cluster_job(two, tiny, tmp_path, **ELASTIC) as job:
        job.start()
        job.until_trained_by("n0", "n1")
        job.until_step(4)
        two.nodes[victim].kill_all()
        job.until_trained_by(f"n{1 - victim}", timeout_s=30)
        job.start(two.nodes[victim])
        job.until_trained_by("n0", "n1", timeout_s=60)
        finish(job)
        job.require_each_sample_once(NUM_RECORDS, 4)


def test_a_fixed_number_of_nodes_waits_for_the_lost_one(two: TestCluster, tiny: Path, tmp_path: Path) -> None:
    with cluster_job(two, tiny, tmp_path, **LONG) as job:
        survivor, _ = job.start()
        job.until_step(4)
        two.nodes[1].kill_all()
        job.until_said(survivor, "waiting for n1 (10.77.0.2:23456)")
        stood_at = job.step()
        time.sleep(3)
        assert job.step() == stood_at
        job.start(two.nodes[1])
        job.until_step(stood_at + 4)
        assert [world[2] for world in job.worlds()] == [("n0", "n1"), ("n0", "n1")]
        finish(job)
        job.require_each_sample_once(NUM_RECORDS, 4)


def test_a_rank_that_dies_stops_the_other_nodes_ranks_within_a_second(
    two: TestCluster, tiny: Path, tmp_path: Path
) -> None:
    drill = {"drill": {"kill": {"rank": 1, "step": 5}}}
    with cluster_job(two, tiny, tmp_path, **drill) as job:
        job.start()
        assert job.ends() == [0, 0], job.logs()
        died = {event["rank"]: event for event in job.events("worker_exited") if event["gen"] == job.worlds()[0][0]}
        assert died[1]["signal"] == "SIGKILL"
        assert died[0]["killed_by_us"] or died[0]["exit_code"] == 1
        assert seconds_between(died[1]["t"], died[0]["t"]) < 1.0
        assert len(job.worlds()) == 2
        job.require_each_sample_once(NUM_RECORDS, 4)


def test_a_fault_of_the_job_on_one_node_ends_all_nodes_at_once(two: TestCluster, tiny: Path, tmp_path: Path) -> None:
    """Only node 1 has bad data behind the common path, and its preflight does not look: nothing that another attempt
    would mend."""
    with cluster_job(two, tiny, tmp_path, check={"skip": ["data.records"]}) as job:
        broken = tmp_path / "broken.jsonl"
        records = (tiny / "train.jsonl").read_text().splitlines()
        records[50] = '{"messages": 1}'
        broken.write_text("\n".join(records) + "\n")
        two.nodes[1].output(["mount", "--bind", str(broken), str(tiny / "train.jsonl")])
        agents = job.start()
        codes = job.ends()
        assert 138 not in codes, job.logs()
        assert set(codes) == {2}, job.logs()
        assert all("train.jsonl" in agent.log for agent in agents)


def seconds_between(first: str, second: str) -> float:
    from datetime import datetime

    a, b = (datetime.fromisoformat(t.replace("Z", "+00:00")) for t in (first, second))
    return abs((b - a).total_seconds())
