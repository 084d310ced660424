"""`ftlaunch plan` and `check` on one of several nodes: as the platform starts it, and on real interfaces and routes."""

from __future__ import annotations

import json
import re
import shlex
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from launcher.agent.cluster_folder import ClusterFolder
from tests.unit.agent.crowd import Child
from tests.unit.host.namespaces import InNamespace, in_namespace

__all__ = ["in_namespace"]

Program = Callable[..., "subprocess.CompletedProcess[str]"]
Job = Callable[..., Path]

DLC = {
    "HOSTNAME": "dlc1a-worker-0",
    "WORLD_SIZE": "2",
    "RANK": "1",
    "NPROC_PER_NODE": "8",
    "MASTER_ADDR": "dlc1a-master-0.invalid",
    "MASTER_PORT": "23456",
}


def test_a_worker_of_dlc_before_its_master_is_up(program: Program, job: Job) -> None:
    done = program("plan", "--config", job("cluster: {nproc_per_node: 2}\n"), "--json", environ=DLC)
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    assert plan["nodes"] == {"most": 2, "fewest": 2, "this": "n1", "origin": "WORLD_SIZE=2"}
    meeting = plan["meeting"]
    assert meeting["seeds"] == [["dlc1a-master-0.invalid", 23456]]
    assert (meeting["agent_port"], meeting["token_source"]) == (23456, "output folder")
    assert plan["batch"] == [{"nodes": 2, "ranks": 4, "global_batch": 32, "accumulation": 1}]
    assert plan["network"]["unresolved"] == ["dlc1a-master-0.invalid"]


def test_the_text_says_what_a_reader_needs(program: Program, job: Job) -> None:
    path = job("cluster: {nodes: '1:2', agent_port: 29777, token: t0ps3cret}\n")
    text = program("plan", "--config", path, environ=DLC).stdout
    for words in (
        "nodes:                  2, goes on with 1 or more",
        "this node:              n1 at ",
        ":29777",
        "agents meet:            at port 29777 of dlc1a-master-0.invalid  <- cluster.agent_port",
        "token:                  from job.yaml (cluster.token)",
        "step with 2 nodes:      16 samples = 2 rank(s) x 8 x 1 micro-batch(es)",
        "step with 1 node:       16 samples = 1 rank(s) x 8 x 2 micro-batch(es)",
        "note: no address is known yet for dlc1a-master-0.invalid",
        "command on each node",
    ):
        assert words in text


@pytest.mark.parametrize("arguments", [["--json"], []], ids=["json", "text"])
def test_the_token_is_shown_nowhere(program: Program, job: Job, arguments: list[str]) -> None:
    by_option = ["--set", "cluster.token=t0ps3cret0fRun"]
    environ = {**DLC, "FTLAUNCH_TOKEN": "an0therSecret"}
    done = program("plan", "--config", job(), *by_option, *arguments, environ=environ)
    assert done.returncode == 0, done.stderr
    assert "t0ps3cret0fRun" not in done.stdout
    assert "an0therSecret" not in done.stdout


def test_a_machine_that_is_none_of_the_hosts(program: Program, job: Job) -> None:
    path = job("cluster: {hosts: [192.0.2.77, 192.0.2.78]}\nprecision: fp16\n")
    text = program("plan", "--config", path).stdout
    assert "this machine is none of the nodes" in text
    for words in (
        "nodes:                  2  <- cluster.hosts=192.0.2.77, 192.0.2.78\n",
        "this node:              none of them",
        "agents meet:            at port 29430 of 192.0.2.77, 192.0.2.78  <- default",
        "waits:                  600 s",
        "token:                  from the output folder",
        "  cluster.nodes: 2  <- cluster.hosts=192.0.2.77, 192.0.2.78\n",
    ):
        assert words in text
    assert "command on this machine; it starts ftlaunch over ssh" in text
    for name, host in (("n0", "192.0.2.77"), ("n1", "192.0.2.78")):
        assert re.search(rf"(?m)^  {name} \({host}\): ssh .* {host} ", text)
    done = program("check", "--config", path)
    assert done.returncode == 0, done.stderr
    assert "run ftlaunch check on a node" in done.stdout
    assert re.search(r"net\.hosts +n1 \(192\.0\.2\.78\): 192\.0\.2\.78", done.stdout)
    done = program("plan", "--config", path, "--set", "cluster.launcher=none")
    assert done.returncode == 2
    assert "cluster.launcher: none leaves it to you" in done.stderr
    assert "or remove cluster.launcher: then this machine starts it over ssh" in done.stderr


def test_a_head_says_which_hosts_it_does_not_know(program: Program, job: Job) -> None:
    path = job("cluster: {hosts: [192.0.2.77, no-such.invalid]}\n")
    done = program("check", "--config", path, "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["head_only"]
    assert [(found["severity"], found["measured"]) for found in report["findings"]] == [
        ("warning", "n1 (no-such.invalid): no address"),
        ("ok", "n0 (192.0.2.77): 192.0.2.77"),
    ]


def test_the_number_of_nodes_by_job_yaml(program: Program, job: Job) -> None:
    text = program("plan", "--config", job("cluster: {nodes: 2}\n"), environ=DLC).stdout
    assert re.search(r"(?m)^  nodes: +2  <- cluster\.nodes \(.*line 4\)$", text)


def test_a_hostfile_is_found_beside_the_job_file(program: Program, job: Job, tmp_path: Path) -> None:
    (tmp_path / "hostfile").write_text("192.0.2.77 slots=2\n192.0.2.78 slots=2\n")
    done = program("plan", "--config", job("cluster: {hostfile: hostfile}\n"), "--json")
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    assert plan["hostfile"] == "192.0.2.77 slots=2\n192.0.2.78 slots=2\n"
    assert plan["num_ranks"]["value"] == 2


def test_check_finds_the_agents_port_taken(program: Program, job: Job) -> None:
    with socket.create_server(("0.0.0.0", 0)) as taken:
        port = taken.getsockname()[1]
        path = job(f"cluster: {{agent_port: {port}}}\n")
        errors = [
            finding
            for finding in json.loads(program("check", "--config", path, "--json", environ=DLC).stdout)["findings"]
            if finding["severity"] == "error"
        ]
        assert [finding["measured"] for finding in errors if finding["id"] == "net.agent_port"] == [f"{port} in use"]


def test_the_port_of_this_runs_own_agent_is_no_fault(program: Program, job: Job, tmp_path: Path) -> None:
    def live(tell: Callable[[Any], None]) -> None:
        with ClusterFolder(tmp_path / "run", "n1", first_voted=lambda: 0), socket.create_server(("0.0.0.0", 0)) as own:
            tell(own.getsockname()[1])
            time.sleep(60)

    agent = Child(live)
    try:
        path = job(f"cluster: {{agent_port: {agent.hear()}}}\n")
        report = json.loads(program("check", "--config", path, "--json", environ=DLC).stdout)
    finally:
        agent.kill()
    (found,) = [finding for finding in report["findings"] if finding["id"] == "net.agent_port"]
    assert found["severity"] == "ok"
    assert f"this run's agent is here (n1, pid {agent.pid})" in found["measured"]


INTERFACES = (
    "ip link set lo up",
    *(f"ip link add {name} type bridge; ip link set {name} up" for name in ("eth0", "eth1", "docker0")),
    "ip addr add 10.1.0.5/24 dev eth0",
    "ip addr add 10.2.0.5/24 dev eth1",
    "ip addr add 10.2.0.105/24 dev eth1",
    "ip addr add 172.17.0.1/16 dev docker0",
)
PLAN = """
import os, runpy, sys
sys.argv = ["ftlaunch", *os.environ["ARGUMENTS"].split("\\n")]
runpy.run_module("launcher", run_name="__main__")
"""


@pytest.mark.root
@pytest.mark.parametrize(
    ("hosts", "interface", "seeds"),
    [
        (["10.2.0.9", "10.2.0.5"], "eth1 10.2.0.5", "n1"),
        (["10.2.0.9", "10.2.0.105"], "eth1 10.2.0.105", "n1"),  # not the address that the route would give
        (["me@here", "there"], "eth0 10.1.0.5", "n0"),  # here is 127.0.1.1: by the route to there
        (["10.1.0.5", "there"], "eth0 10.1.0.5", "n0"),
    ],
)
def test_the_interface_and_the_address_on_real_interfaces(
    in_namespace: InNamespace, job: Job, tmp_path: Path, hosts: list[str], interface: str, seeds: str
) -> None:
    (tmp_path / "names").write_text("127.0.0.1 localhost\n127.0.1.1 here\n10.1.0.77 there\n")
    names = f"mount --bind {shlex.quote(str(tmp_path / 'names'))} /etc/hosts"
    arguments = ["plan", "--config", str(job()), "--json", "--set", f"cluster.hosts=[{', '.join(hosts)}]"]
    environ = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "ARGUMENTS": "\n".join(arguments), "HOSTNAME": "here"}
    plan: dict[str, Any] = json.loads(in_namespace(PLAN, names, *INTERFACES, environ=environ))
    assert f"{plan['network']['interface']} {plan['network']['node_ip']}" == interface
    assert plan["nodes"]["this"] == plan["meeting"]["name"] == seeds
    assert plan["network"]["unresolved"] == []
    variables = {variable["name"]: variable["value"] for variable in plan["environment"]}
    assert variables["GLOO_SOCKET_IFNAME"] == plan["network"]["interface"]
