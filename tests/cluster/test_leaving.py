"""A node that has to go: all save at one step, it leaves, the others go on from that very step."""

from __future__ import annotations

import signal
from pathlib import Path

from tests.cluster.cluster import TestCluster
from tests.cluster.jobs import cluster_job
from tests.cluster.test_node_loss import LONG
from tests.fault.tiny_model import NUM_RECORDS


def test_one_of_three_leaves_and_no_step_is_redone(three: TestCluster, tiny: Path, tmp_path: Path) -> None:
    rare = {"checkpoint": {"every_steps": 100_000}}  # what is resumed is the agreed save
    with cluster_job(three, tiny, tmp_path, cluster={"nodes": "1:3", "gather_seconds": 60}, **LONG, **rare) as job:
        agents = job.start()
        job.until_trained_by("n0", "n1", "n2")
        job.until_step(5)
        agents[1].process.send_signal(signal.SIGTERM)
        assert agents[1].wait(60) == 138, job.logs()
        job.until_trained_by("n0", "n2")
        job.until_step(job.step() + 3)
        (saved,) = {event["step"] for event in job.events("checkpoint_saved")}
        first = min(r["step"] for r in job.samples() if r["gen"] == job.worlds()[-1][0])
        assert first == saved + 1
        done = [(r["step"], r["rank"]) for r in job.samples() if r["gen"] == job.worlds()[0][0]]
        assert max(step for step, _ in done) == saved
        assert [a.process.poll() for a in agents] == [None, 138, None]
        job.require_each_sample_once(NUM_RECORDS, 6)


def test_the_leader_leaves_and_the_other_goes_on(two: TestCluster, tiny: Path, tmp_path: Path) -> None:
    with cluster_job(two, tiny, tmp_path, cluster={"nodes": "1:2", "gather_seconds": 60}, **LONG) as job:
        agents = job.start()
        job.until_trained_by("n0", "n1")
        job.until_step(5)
        agents[0].process.send_signal(signal.SIGTERM)
        assert agents[0].wait(60) == 138, job.logs()
        job.until_trained_by("n1")
        job.require_each_sample_once(NUM_RECORDS, 4)


def test_all_leave_with_one_save(two: TestCluster, tiny: Path, tmp_path: Path) -> None:
    with cluster_job(two, tiny, tmp_path, **LONG) as job:
        agents = job.start()
        job.until_step(5)
        for agent in agents:
            agent.process.send_signal(signal.SIGTERM)
        assert job.ends(60) == [138, 138], job.logs()
        newest = max(event["step"] for event in job.events("checkpoint_saved"))
        assert newest == job.step()
        job.require_each_sample_once(NUM_RECORDS, 4)
