"""Several nodes find each other as each platform tells them to, train together, and end together."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cluster.cluster import TestCluster
from tests.cluster.jobs import ClusterJob, cluster_job, dlc, kubeflow, slurm
from tests.fault.tiny_model import NUM_RECORDS

Platform = Callable[..., dict[str, str]]


def ended_well(job: ClusterJob, num_nodes: int) -> None:
    assert job.ends() == [0] * num_nodes, job.logs()
    assert [world[1:] for world in job.worlds()] == [(num_nodes, tuple(f"n{i}" for i in range(num_nodes)))]
    job.require_each_sample_once(NUM_RECORDS, 2 * num_nodes)
    assert (job.job.output_dir / "final" / "adapter_model.safetensors").is_file()
    hostfile = (job.job.output_dir / "ftlaunch" / "launch" / "hostfile").read_text()
    assert hostfile.splitlines() == [f"{node.ip} slots=1" for node in job.cluster.nodes]


@pytest.mark.parametrize("platform", [dlc, kubeflow, slurm])
def test_two_nodes_train_together(two: TestCluster, tiny: Path, tmp_path: Path, platform: Platform) -> None:
    with cluster_job(two, tiny, tmp_path, platform) as job:
        job.start()
        ended_well(job, 2)


@pytest.mark.parametrize("platform", [dlc, slurm])
def test_four_nodes_train_together(four_nodes: TestCluster, tiny: Path, tmp_path: Path, platform: Platform) -> None:
    with cluster_job(four_nodes, tiny, tmp_path, platform) as job:
        job.start()
        ended_well(job, 4)


def test_the_same_command_on_each_host_of_a_list(two: TestCluster, tiny: Path, tmp_path: Path) -> None:
    hosts = {"cluster": {"hosts": [node.ip for node in two.nodes], "launcher": "none"}}
    with cluster_job(two, tiny, tmp_path, lambda *_: {}, **hosts) as job:
        job.start()
        ended_well(job, 2)


def test_workers_wait_for_the_masters_name(two: TestCluster, tiny: Path, tmp_path: Path) -> None:
    master, worker = two.nodes
    names = worker.hosts_file.read_text()
    worker.hosts_file.write_text(re.sub(r"(?m)^.* node0\n", "", names))
    with cluster_job(two, tiny, tmp_path) as job:
        (agent,) = job.start(worker)
        job.until_said(agent, "waiting for the name node0 to resolve")
        worker.hosts_file.write_text(names)
        job.start(master)
        assert job.ends() == [0, 0], job.logs()


def test_a_missing_node_is_named_and_the_wait_has_a_bound(two: TestCluster, tiny: Path, tmp_path: Path) -> None:
    with cluster_job(two, tiny, tmp_path, cluster={"wait_seconds": 6}) as job:
        (agent,) = job.start(two.nodes[0])
        job.until_said(agent, "waiting for n1")
        assert agent.wait(60) == 138
        assert "waited 6 s" in agent.log
        assert "waiting for n1" in agent.log.splitlines()[-1]


def test_a_finished_run_has_nothing_left_to_do(two: TestCluster, tiny: Path, tmp_path: Path) -> None:
    with cluster_job(two, tiny, tmp_path, training={"max_steps": 4}) as job:
        job.start()
        assert job.ends() == [0, 0], job.logs()
        again = job.start()
        assert [agent.wait() for agent in again] == [0, 0]
        assert all("nothing left to do" in agent.log for agent in again)


def test_the_next_submission_may_have_another_number_of_nodes(two: TestCluster, tiny: Path, tmp_path: Path) -> None:
    """All nodes of the first were reclaimed at once; the second has one node, and goes on where the first stood."""
    with cluster_job(two, tiny, tmp_path, training={"max_steps": 3000}) as job:
        job.start()
        job.until_step(4)
        for node in two.nodes:
            node.kill_all()
        job.num_nodes = 1
        (agent,) = job.start(two.nodes[0], arguments=("--set", "training.max_steps=20"))
        assert agent.wait() == 0, agent.log
        assert job.worlds()[-1][1:] == (1, ("n0",))
        job.require_each_sample_once(NUM_RECORDS, 4)
