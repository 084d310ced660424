"""Whoever does not belong to the run is refused with words, and disturbs nothing."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.cluster.cluster import TestCluster
from tests.cluster.jobs import PORT, ClusterJob, cluster_job
from tests.cluster.test_node_loss import LONG

_GARBAGE = """
import os, socket, sys, time
address = (sys.argv[1], int(sys.argv[2]))
huge = b"POST /v1/messages HTTP/1.1\\r\\nContent-Length: 99999999\\r\\n\\r\\n"
for blob in (b"\\x00\\xff" * 500, b"GET / HTTP/1.1\\r\\n\\r\\n", huge):
    s = socket.create_connection(address, 5)
    s.sendall(blob)
    s.settimeout(8)
    try:
        while s.recv(4096): pass
    except OSError: pass
slow = [socket.create_connection(address, 5) for _ in range(50)]
for second in range(8):
    for s in slow:
        try: s.sendall(b"P")
        except OSError: pass
    time.sleep(1)
print("done")
"""


def undisturbed(job: ClusterJob) -> None:
    assert len(job.worlds()) == 1, job.logs()
    assert all(agent.process.poll() is None for agent in job.agents[:2]), job.logs()


def test_a_wrong_token_is_refused_and_logged(three: TestCluster, tiny: Path, tmp_path: Path) -> None:
    with cluster_job(three, tiny, tmp_path, cluster={"nodes": "1:3", "gather_seconds": 3}, **LONG) as job:
        one, two, three_ = three.nodes
        first, _ = job.start(one, two, env={"FTLAUNCH_TOKEN": "7d1f0c59"})
        job.until_trained_by("n0", "n1")
        (stranger,) = job.start(three_, env={"FTLAUNCH_TOKEN": "c2a4e8b6"})
        job.until_said(stranger, "token")
        job.until_said(first, three_.ip)
        job.until_step(job.step() + 5)
        undisturbed(job)
        assert not any(token in agent.log for token in ("7d1f0c59", "c2a4e8b6") for agent in job.agents)


def test_another_jobs_agent_on_the_same_port_is_refused(two: TestCluster, tiny: Path, tmp_path: Path) -> None:
    with cluster_job(two, tiny, tmp_path / "a", cluster={"nodes": "1:2", "gather_seconds": 1}, **LONG) as job:
        (first,) = job.start(two.nodes[0])
        job.until_trained_by("n0")
        with cluster_job(two, tiny, tmp_path / "b", **LONG) as other:
            (stranger,) = other.start(two.nodes[1])
            other.until_said(stranger, "another run")
            job.until_step(job.step() + 5)
            assert len(job.worlds()) == 1
            assert first.process.poll() is None


def test_another_job_yaml_is_refused_with_the_difference(two: TestCluster, tiny: Path, tmp_path: Path) -> None:
    with cluster_job(two, tiny, tmp_path, cluster={"nodes": "1:2", "gather_seconds": 1}, **LONG) as job:
        job.start(two.nodes[0])
        job.until_trained_by("n0")
        (stranger,) = job.start(two.nodes[1], arguments=("--set", "training.learning_rate=0.5"))
        assert stranger.wait(60) == 3
        assert "job.yaml" in stranger.log
        job.until_step(job.step() + 5)
        assert len(job.worlds()) == 1


def test_garbage_and_slow_clients_disturb_nothing(two: TestCluster, tiny: Path, tmp_path: Path) -> None:
    with cluster_job(two, tiny, tmp_path, **LONG) as job:
        job.start()
        job.until_trained_by("n0", "n1")
        before = job.step()
        node = two.nodes[1]
        node.output([sys.executable, "-c", _GARBAGE, two.nodes[0].ip, PORT], timeout_s=60)
        assert job.step() > before
        assert len(job.worlds()) == 1, job.logs()
