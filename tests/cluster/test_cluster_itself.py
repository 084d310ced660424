"""The test cluster does what the tests that stand on it take for granted."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.cluster.cluster import TestCluster, why_no_cluster
from tests.cluster.node import TRAFFIC, ClusterError, Node
from tests.cluster.processes import processes_in

ROOT = Path(__file__).resolve().parents[2]


@contextmanager
def listening(node: Node, kind: str, port: int) -> Iterator[subprocess.Popen[str]]:
    process = node.run([*TRAFFIC, kind, str(port)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def ask(asker: Node, answerer: Node, num: int) -> tuple[int, float]:
    """Datagrams that were answered, and the median round trip in ms."""
    with listening(answerer, "echo", 7000):
        answered, median_ms = asker.output([*TRAFFIC, "ask", answerer.ip, "7000", str(num)]).split()
    return int(answered), float(median_ms) if median_ms != "none" else float("inf")


def mbit_per_s(sender: Node, receiver: Node, num_bytes: int) -> float:
    with listening(receiver, "receive", 7001) as process:
        sender.output([*TRAFFIC, "send", receiver.ip, "7001", str(num_bytes)], timeout_s=60)
        return float(process.communicate(timeout=60)[0])


def reachable(nodes: list[Node]) -> set[str]:
    """`"01"`: node 0 reaches node 1. All pairs at once, as each that does not costs the time-out."""
    found: set[str] = set()

    def look(a: Node, b: Node) -> None:
        if a.reaches(b):
            found.add(f"{a.index}{b.index}")

    threads = [threading.Thread(target=look, args=(a, b)) for a in nodes for b in nodes if a is not b]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


# -- network -----------------------------------------------------------------------------------------------------------


def test_every_node_reaches_every_other_and_nothing_else(four_nodes: TestCluster) -> None:
    assert len(reachable(four_nodes.nodes)) == 12
    assert [node.ip for node in four_nodes.nodes] == ["10.77.0.1", "10.77.0.2", "10.77.0.3", "10.77.0.4"]
    assert "default" not in four_nodes.nodes[0].output(["ip", "route"])
    assert four_nodes.nodes[0].output(["ls", "/sys/class/net"]).split() == ["eth0", "lo"]


def test_a_cut_node_is_alone_until_it_is_mended(four_nodes: TestCluster) -> None:
    node = four_nodes.nodes[2]
    node.cut()
    assert reachable(four_nodes.nodes) == {"01", "10", "03", "30", "13", "31"}
    assert node.output(["cat", "/sys/class/net/eth0/carrier"]).strip() == "0"
    node.mend()
    assert len(reachable(four_nodes.nodes)) == 12


def test_halves_of_a_partition_hear_only_their_own(four_nodes: TestCluster) -> None:
    a, b, c, d = four_nodes.nodes
    four_nodes.partition([a, b], [c, d])
    assert reachable(four_nodes.nodes) == {"01", "10", "23", "32"}
    four_nodes.partition([a], [b])  # a and b lose each other, and both still reach c and d
    assert len(reachable(four_nodes.nodes)) == 10
    four_nodes.heal()
    assert len(reachable(four_nodes.nodes)) == 12


def test_an_open_connection_survives_a_short_partition(two_nodes: TestCluster) -> None:
    a, b = two_nodes.nodes
    with listening(b, "receive", 7001) as process:
        script = (
            "import socket, sys; s = socket.create_connection((sys.argv[1], 7001)); s.sendall(b'x'); print(flush=True);"
            "sys.stdin.readline(); s.sendall(b'y' * 999_999)"
        )
        argv = [sys.executable, "-I", "-S", "-c", script, b.ip]
        sender = a.run(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert sender.stdout is not None
        assert sender.stdout.readline() == "\n"
        two_nodes.partition([a], [b])
        threading.Timer(0.5, two_nodes.heal).start()
        sender.communicate("go\n", timeout=20)
        assert sender.returncode == 0
        assert float(process.communicate(timeout=20)[0]) > 0


def test_shaping_bounds_both_directions(four_nodes: TestCluster) -> None:
    a, b, c, _ = four_nodes.nodes
    assert mbit_per_s(a, b, 20_000_000) > 300
    a.shape(mbit=40)
    assert 25 < mbit_per_s(a, b, 5_000_000) < 50
    assert 25 < mbit_per_s(b, a, 5_000_000) < 50
    assert mbit_per_s(b, c, 20_000_000) > 300
    a.shape(mbit=None)
    assert mbit_per_s(a, b, 20_000_000) > 300


def test_loss_is_of_the_asked_size(four_nodes: TestCluster) -> None:
    """Bounds are five standard deviations of the binomial distribution; a question and its answer cross twice."""
    a, b, c, _ = four_nodes.nodes
    num = 500
    a.lossy(20)
    assert 320 - 54 < ask(a, b, num)[0] < 320 + 54
    assert 320 - 54 < ask(b, a, num)[0] < 320 + 54
    assert ask(b, c, num)[0] == num
    a.lossy(0)
    four_nodes.lossy(5)
    assert 451 - 33 < ask(b, c, num)[0] < 451 + 33
    four_nodes.lossy(0)
    assert ask(a, b, num)[0] == num


def test_delay_is_of_the_asked_size_and_keeps_every_packet(four_nodes: TestCluster) -> None:
    a, b, *_ = four_nodes.nodes
    assert ask(a, b, 300)[1] < 10
    four_nodes.delay(100)
    answered, median_ms = ask(a, b, 300)
    assert answered == 300
    assert 200 <= median_ms < 300
    a.kill_all()  # the delay is the network's, not one of the node's processes
    assert 200 <= ask(a, b, 50)[1] < 300
    assert mbit_per_s(a, b, 1_000_000) > 1
    four_nodes.delay(0)
    assert ask(a, b, 300)[1] < 10


# -- ssh ---------------------------------------------------------------------------------------------------------------


def test_ssh_from_node_to_node_by_name_and_by_address(two_nodes: TestCluster) -> None:
    a, b = two_nodes.nodes
    assert a.output([*two_nodes.ssh_command, b.name, "hostname"]).strip() == b.name
    assert b.output([*two_nodes.ssh_command, a.ip, "hostname"]).strip() == a.name
    # Programs that give no -F find the same settings, for example DeepSpeed's runner.
    assert a.output(["ssh", b.ip, "echo $SSH_CONNECTION; df -m --output=size /dev/shm"]).split()[:3:2] == [a.ip, b.ip]


def test_ssh_refuses_a_host_whose_key_is_not_the_known_one(two_nodes: TestCluster) -> None:
    a, b = two_nodes.nodes
    assert two_nodes.ssh_files is not None
    known = two_nodes.ssh_files.known_hosts.read_text().splitlines()
    keys = [line.split(" ", 1)[1] for line in known]
    two_nodes.ssh_files.known_hosts.write_text(f"{b.name},{b.ip} {keys[0]}\n")
    with pytest.raises(subprocess.CalledProcessError) as caught:
        a.output(["ssh", b.ip, "hostname"])
    assert (
        "REMOTE HOST IDENTIFICATION HAS CHANGED" in caught.value.stderr or "verification failed" in caught.value.stderr
    )


def test_pdsh_reaches_two_nodes(two_nodes: TestCluster) -> None:
    a, b = two_nodes.nodes
    lines = a.output(["pdsh", "-w", f"{a.ip},{b.ip}", "hostname"], env=two_nodes.pdsh_env).splitlines()
    assert sorted(lines) == [f"{a.ip}: {a.name}", f"{b.ip}: {b.name}"]


# -- a node's own ------------------------------------------------------------------------------------------------------


def test_each_node_has_its_own_shared_memory_host_name_and_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "7")
    outside = os.uname().nodename
    with TestCluster(2, ssh=False, shm_mib=8) as cluster:
        a, b = cluster.nodes
        a.env["WORLD_SIZE"] = "2"
        assert a.output(["df", "-m", "--output=size", "/dev/shm"]).split()[-1] == "8"
        a.output(["sh", "-c", "echo >/dev/shm/mine"])
        assert b.output(["ls", "/dev/shm"]) == ""
        assert not Path("/dev/shm/mine").exists()
        with pytest.raises(subprocess.CalledProcessError, match="dd"):
            a.output(["dd", "if=/dev/zero", "of=/dev/shm/big", "bs=1M", "count=9"])
        assert [node.output(["hostname"]).strip() for node in cluster.nodes] == [a.name, b.name]
        assert a.output(["getent", "hosts", b.name]).split() == [b.ip, b.name]
        b.hosts_file.write_text("")
        with pytest.raises(subprocess.CalledProcessError):
            b.output(["getent", "hosts", a.name])
        assert a.output(["sh", "-c", "echo $RANK-$WORLD_SIZE-$MORE"], env={"MORE": "x"}) == "-2-x\n"
        assert b.output(["sh", "-c", "echo $WORLD_SIZE"]) == "\n"
    assert os.uname().nodename == outside


def test_a_process_has_the_folder_and_the_pid_that_it_was_given(two_nodes: TestCluster, tmp_path: Path) -> None:
    process = two_nodes.nodes[0].run(["sh", "-c", "pwd; echo $$"], cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    assert process.communicate()[0].split() == [str(tmp_path), str(process.pid)]


def test_kill_all_kills_its_own_and_no_others(two_nodes: TestCluster) -> None:
    a, b = two_nodes.nodes
    outsider = subprocess.Popen(["sleep", "60"])
    try:
        mine = [a.run(["sleep", "60"]), a.run(["sh", "-c", "setsid sleep 60 & sleep 60"], start_new_session=True)]
        over_ssh = b.run(["ssh", a.name, "sleep 60"])  # a process of b, with one at its other end in a
        neighbour = b.run(["sleep", "60"])
        wait_until(lambda: len(a.processes()) >= 7, "2 sleeps, sh, its 2 sleeps, sshd, its session")
        before = len(b.processes())
        killed = a.kill_all()
        assert len(killed) >= 7
        assert a.processes() == []
        assert [process.wait(5) for process in mine] == [-signal.SIGKILL, -signal.SIGKILL]
        assert over_ssh.wait(5) == 255  # the connection was closed, at once
        assert neighbour.poll() is None
        assert outsider.poll() is None
        assert len(b.processes()) == before - 1
    finally:
        outsider.kill()
        outsider.wait()
    a.start_sshd()
    assert b.output(["ssh", a.name, "hostname"]).strip() == a.name


# -- the end -----------------------------------------------------------------------------------------------------------


def left_behind(name: str, inodes: set[int]) -> dict[str, object]:
    """What there is of a cluster on this machine, as `ip netns`, `ip link`, `ps`, `mount` and `ls` tell it."""
    lines = {
        "ip netns": subprocess.check_output(["ip", "netns", "list"], text=True).splitlines(),
        "ip link": subprocess.check_output(["ip", "-o", "link"], text=True).splitlines(),
        "ps": subprocess.check_output(["ps", "axww", "-o", "pid,args"], text=True).splitlines(),
        "mount": Path("/proc/self/mountinfo").read_text().splitlines(),
    }
    found: dict[str, object] = {kind: [line for line in text if name in line] for kind, text in lines.items()}
    found["veth"] = [line for line in lines["ip link"] if "veth" in line or "br0" in line]
    found["in its namespaces"] = processes_in(inodes)
    found["folder"] = [path.name for path in Path(tempfile.gettempdir()).iterdir() if path.name == name]
    return {kind: what for kind, what in found.items() if what}


def wait_until(is_so: Callable[[], object], what: str, within_s: float = 10.0) -> None:
    deadline = time.monotonic() + within_s
    while not is_so():
        assert time.monotonic() < deadline, f"not within {within_s:g} s: {what}"
        time.sleep(0.02)


def wait_until_gone(name: str, inodes: set[int]) -> None:
    deadline = time.monotonic() + 10
    while left := left_behind(name, inodes):
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


def test_nothing_is_left_after_a_test_that_fails() -> None:
    with pytest.raises(ZeroDivisionError), TestCluster(3, shm_mib=8) as cluster:  # noqa: PT012
        name, inodes = cluster.name, {node.holder.inode for node in cluster.nodes}
        cluster.nodes[0].run(["sh", "-c", "trap '' TERM HUP INT; setsid sleep 99 & sleep 99"])
        cluster.nodes[0].run(["ssh", "node1", "sleep 99"])
        cluster.nodes[1].shape(mbit=10)
        cluster.delay(5)
        cluster.nodes[2].cut()
        assert {"ps", "in its namespaces", "folder"} <= set(left_behind(name, inodes))
        raise ZeroDivisionError
    assert left_behind(name, inodes) == {}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda number: number.name)
def test_nothing_is_left_after_a_test_run_that_is_killed(number: signal.Signals) -> None:
    script = """
import os, time
from tests.cluster.cluster import TestCluster
with TestCluster(2) as cluster:
    a, b = cluster.nodes
    a.run(["ssh", b.name, "sleep 99"])
    cluster.delay(5)
    child = os.fork()
    if child == 0:  # holds all pipes of the test run open
        time.sleep(30)
        os._exit(0)
    print(child, cluster.name, a.holder.inode, b.holder.inode, flush=True)
    time.sleep(99)
"""
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=ROOT) as run:
        assert run.stdout is not None
        child, name, *inodes = run.stdout.readline().split()
        try:
            assert "folder" in left_behind(name, set(map(int, inodes)))
            run.send_signal(number)
            run.wait(10)
            wait_until_gone(name, set(map(int, inodes)))
        finally:
            os.kill(int(child), signal.SIGKILL)


def test_a_cluster_that_cannot_be_built_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = TestCluster(2, ssh=False)
    monkeypatch.setattr(cluster, "_connect", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        cluster.__enter__()
    assert left_behind(cluster.name, set()) == {}


def test_a_machine_that_cannot_have_a_cluster_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    assert why_no_cluster() is None
    monkeypatch.setattr(shutil, "which", lambda tool, path=None: None if tool in ("tc", "sshd") else f"/usr/bin/{tool}")
    assert why_no_cluster() == "missing: tc, sshd (scripts/install-test-tools.sh installs them)"
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert why_no_cluster() == "network namespaces need root"


def test_clusters_do_not_see_each_other() -> None:
    with TestCluster(1) as one, TestCluster(2) as two:
        assert not one.nodes[0].reaches(two.nodes[1])
        with pytest.raises(ClusterError, match="ssh=False"), TestCluster(1, ssh=False) as three:
            three.nodes[0].start_sshd()


# -- what runs on it ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")
def test_torch_distributed_works_between_two_nodes(two_nodes: TestCluster) -> None:
    script = """
import datetime, os, torch, torch.distributed as dist
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
x = torch.full((1000,), float(dist.get_rank() + 1))
dist.all_reduce(x)
print(os.uname().nodename, x.unique().tolist())
dist.destroy_process_group()
"""
    a, b = two_nodes.nodes
    common = {"MASTER_ADDR": a.name, "MASTER_PORT": "29500", "WORLD_SIZE": "2", "GLOO_SOCKET_IFNAME": "eth0"}
    ranks = [
        node.run([sys.executable, "-c", script], env={**common, "RANK": str(rank)}, stdout=subprocess.PIPE, text=True)
        for rank, node in enumerate([a, b])
    ]
    assert [rank.communicate(timeout=120)[0].strip() for rank in ranks] == ["node0 [3.0]", "node1 [3.0]"]
