"""One command on one machine: ssh, or DeepSpeed's own runner, brings up the others, and the whole job runs."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.cluster import TestCluster
from tests.cluster.jobs import ClusterJob, cluster_job
from tests.cluster.test_many_nodes import ended_well
from tests.cluster.test_node_loss import LONG
from tests.fault.harness import merged
from tests.fault.tiny_model import NUM_RECORDS


@contextmanager
def bare(cluster: TestCluster, tiny: Path, folder: Path, /, **changes: Any) -> Iterator[ClusterJob]:
    hosts = {"cluster": {"hosts": [node.ip for node in cluster.nodes]}}
    with cluster_job(cluster, tiny, folder, lambda *_: dict(cluster.pdsh_env), **merged(hosts, changes)) as job:
        yield job


@pytest.mark.parametrize("launcher", ["ssh", "deepspeed"])
def test_one_command_trains_on_two_machines(two_nodes: TestCluster, tiny: Path, tmp_path: Path, launcher: str) -> None:
    with bare(two_nodes, tiny, tmp_path, cluster={"launcher": launcher}) as job:
        job.start(two_nodes.nodes[0])
        job.ends()
        job.agents *= 2  # one command, two nodes
        ended_well(job, 2)


def test_one_command_trains_on_four_machines(tiny: Path, tmp_path: Path) -> None:
    with TestCluster(4) as cluster, bare(cluster, tiny, tmp_path) as job:
        (head,) = job.start(cluster.nodes[0])
        assert head.wait() == 0, head.log
        assert job.worlds()[-1][1:] == (4, ("n0", "n1", "n2", "n3"))
        job.require_each_sample_once(NUM_RECORDS, 8)


def test_the_heads_death_stops_nobody_and_it_finds_its_way_back(
    two_nodes: TestCluster, tiny: Path, tmp_path: Path
) -> None:
    with bare(two_nodes, tiny, tmp_path, cluster={"nodes": "1:2", "gather_seconds": 60}, **LONG) as job:
        job.start(two_nodes.nodes[0])
        job.until_trained_by("n0", "n1")
        job.until_step(4)
        two_nodes.nodes[0].kill_all()
        job.until_trained_by("n1", timeout_s=30)
        two_nodes.nodes[0].start_sshd()
        (head,) = job.start(two_nodes.nodes[0])
        job.until_trained_by("n0", "n1", timeout_s=60)
        head.process.send_signal(signal.SIGTERM)
        assert head.wait(60) == 138, head.log
        job.until(
            lambda: not [e for e in job.events("run_started", "n1") if not job.events("run_ended", "n1")], "n1 ends"
        )
        job.require_each_sample_once(NUM_RECORDS, 4)


def test_a_lost_machine_gets_its_agent_back_from_the_head(two_nodes: TestCluster, tiny: Path, tmp_path: Path) -> None:
    with bare(two_nodes, tiny, tmp_path, cluster={"nodes": "1:2", "gather_seconds": 60}, **LONG) as job:
        (head,) = job.start(two_nodes.nodes[0])
        job.until_trained_by("n0", "n1")
        job.until_step(4)
        two_nodes.nodes[1].kill_all()
        job.until_trained_by("n0", timeout_s=30)
        two_nodes.nodes[1].start_sshd()  # the machine is up again
        job.until_trained_by("n0", "n1", timeout_s=90)
        head.process.send_signal(signal.SIGTERM)
        assert head.wait(60) == 138, head.log
        job.require_each_sample_once(NUM_RECORDS, 4)


def test_a_machine_that_will_not_come_ends_the_run_with_its_own_code(
    two_nodes: TestCluster, tiny: Path, tmp_path: Path
) -> None:
    """The second machine has no model: no wait for it, and no code that asks for the same again."""
    empty = tmp_path / "empty"
    empty.mkdir()
    two_nodes.nodes[1].output(["mount", "--bind", str(empty), str(tiny / "model")])
    with bare(two_nodes, tiny, tmp_path / "job") as job:
        (head,) = job.start(two_nodes.nodes[0])
        assert head.wait(60) == 2, head.log
        assert "n1" in head.log.splitlines()[-1]
        assert "model" in head.log
        assert not job.worlds()
