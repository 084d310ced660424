"""Agents on other machines, started over real ssh and with DeepSpeed's own runner. The agents are stand-ins."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from launcher.plan.environment import Variable
from launcher.plan.launch_files import deepspeed_env_text, hostfile_text
from tests.cluster.cluster import TestCluster
from tests.cluster.node import Node

ROOT = Path(__file__).resolve().parents[2]
WITHIN_S = 60.0  # DeepSpeed imports torch twice, one after the other


def wait_for(what: Callable[[], Any], why: str, within_s: float = WITHIN_S) -> Any:
    deadline = time.monotonic() + within_s
    while True:
        found = what()
        if found:
            return found
        assert time.monotonic() < deadline, why
        time.sleep(0.02)


class Run:
    """A job in a folder of its own and the starts of it."""

    def __init__(self, cluster: TestCluster, folder: Path, **cluster_keys: Any) -> None:
        self.nodes = cluster.nodes
        self.folder = folder
        self.output = folder / "run"
        self.output.mkdir()
        job = {
            "output_dir": "run",
            "model": {"path": "some/model"},
            "data": {"train": "train.jsonl"},
            "cluster": {"hosts": [node.name for node in cluster.nodes], "wait_seconds": 30, **cluster_keys},
            "spot": {"grace_seconds": 5},
        }
        self.job = folder / "job.yaml"
        self.job.write_text(json.dumps(job))
        self.starts: list[subprocess.Popen[bytes]] = []

    def start(self, node: Node, *overrides: str, cwd: Path = ROOT, **env: str) -> Start:
        log = self.folder / f"start-{len(self.starts)}.log"
        with log.open("wb") as stream:
            process = node.run(
                [sys.executable, "-m", "tests.cluster.stand_in_start", str(self.job), *overrides],
                env={"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1", **env},
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
            )
        self.starts.append(process)
        return Start(process, log)

    def agent(self, rank: int, *, other_than: int = 0) -> dict[str, Any]:
        """Facts that the agent of a node has written about itself."""

        def look() -> dict[str, Any] | None:
            with contextlib.suppress(OSError, ValueError):
                facts: dict[str, Any] = json.loads((self.output / f"n{rank}.json").read_text())
                return facts if facts["pid"] != other_than else None
            return None

        found: dict[str, Any] = wait_for(look, f"no agent of n{rank}")
        return found

    def end(self, name: str, code: int) -> None:
        path = self.output / f"{name}.end"
        path.with_suffix(".new").write_text(str(code))
        path.with_suffix(".new").rename(path)

    def say(self, rank: int, line: str) -> None:
        with (self.output / f"n{rank}.say").open("a") as stream:
            stream.write(line + "\n")


class Start:
    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self.process, self._log = process, log

    @property
    def text(self) -> str:
        return self._log.read_text()

    def sees(self, pattern: str, within_s: float = WITHIN_S) -> None:
        deadline = time.monotonic() + within_s
        while not re.search(pattern, self.text):
            assert time.monotonic() < deadline, f"not seen: {pattern}\n{self.text}"
            time.sleep(0.02)

    def ends(self, code: int, within_s: float = WITHIN_S) -> None:
        try:
            assert self.process.wait(within_s) == code, self.text
        except subprocess.TimeoutExpired:
            pytest.fail(f"still runs:\n{self.text}")


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def commands_in(node: Node) -> list[str]:
    texts = []
    for pid in node.processes():
        with contextlib.suppress(OSError):
            texts.append(Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " "))
    return [text for text in texts if "sshd" not in text]


@pytest.fixture
def three_nodes() -> Iterator[TestCluster]:
    with TestCluster(3) as cluster:
        yield cluster


# -- an ordinary life --------------------------------------------------------------------------------------------------


def test_agents_start_with_the_heads_job_and_environment_and_nothing_secret_in_a_command(
    three_nodes: TestCluster, tmp_path: Path
) -> None:
    here = tmp_path / "here"
    here.mkdir()
    (here / ".deepspeed_env").write_text("FROM_FILE=a b\n\n# NOT=this\nNCCL_DEBUG=TRACE\n")
    run = Run(three_nodes, tmp_path, token="sesame")
    start = run.start(
        three_nodes.nodes[0],
        "env.KEY=hidden",
        cwd=here,
        NCCL_DEBUG="INFO",
        NCCL_ALGO="Ring",
        CUDA_VISIBLE_DEVICES="3",
        SECRET="mine",
    )
    first, second = run.agent(1), run.agent(2)
    start.sees(r"\[n1\] agent of n1 is here")
    start.sees(r"\[n2\] agent of n2 is here")
    environ = first["environ"]
    assert (environ["NCCL_DEBUG"], environ["NCCL_ALGO"], environ["FROM_FILE"]) == ("TRACE", "Ring", "a b")
    assert environ["FTLAUNCH_TOKEN"] == "sesame"
    assert not {"SECRET", "CUDA_VISIBLE_DEVICES", "# NOT"} & set(environ)
    assert first["folder"] == str(here)
    assert first["hosts"] == ["node0", "node1", "node2"]
    assert first["sha"] == second["sha"]
    assert first["nohup"], "the end of a session is no stop"
    commands = [text for node in three_nodes.nodes for text in commands_in(node)]
    assert any("stand_in_agent" in text for text in commands)
    assert [text for text in commands if "sesame" in text or "hidden" in text.replace("env.KEY=hidden", "")] == []
    for name in ("own", "n1", "n2"):
        run.end(name, 0)
    start.ends(0)
    assert [text for node in three_nodes.nodes for text in commands_in(node)] == []


def test_a_stop_reaches_every_agent_as_the_same_signal_and_a_second_one_as_a_second(
    three_nodes: TestCluster, tmp_path: Path
) -> None:
    run = Run(three_nodes, tmp_path)
    start = run.start(three_nodes.nodes[0])
    pids = [run.agent(rank)["pid"] for rank in (1, 2)]
    start.sees(r"n2 \(node2\): agent started")
    start.process.send_signal(signal.SIGINT)
    start.sees(r"\[n1\] got SIGINT")
    start.sees(r"\[n2\] got SIGINT")
    start.process.send_signal(signal.SIGTERM)
    start.sees(r"\[n1\] got SIGTERM")
    start.ends(130)
    start.sees(r"n1 \(node1\): agent ended with exit code 130")
    assert not any(alive(pid) for pid in pids)


def test_agents_that_are_killed_or_stopped_start_again_and_those_that_failed_do_not(
    three_nodes: TestCluster, tmp_path: Path
) -> None:
    run = Run(three_nodes, tmp_path)
    start = run.start(three_nodes.nodes[0])
    killed, stopped = run.agent(1)["pid"], run.agent(2)["pid"]
    os.kill(killed, signal.SIGKILL)
    run.end("n2", 138)
    start.sees(r"n1 \(node1\): agent was killed by SIGKILL; starting it again")
    start.sees(r"n2 \(node2\): agent ended with exit code 138; starting it again")
    run.agent(1, other_than=killed)
    failed = run.agent(2, other_than=stopped)["pid"]
    run.end("n2", 1)
    start.sees(r"n2 \(node2\): agent ended with exit code 1; it is not started again")
    start.sees(r"final end: n2 \(node2\) 1 agent of n2 is here")
    time.sleep(2.5)
    assert run.agent(2)["pid"] == failed
    run.end("own", 1)
    run.end("n1", 1)
    start.ends(1)


# -- machines and connections that fail --------------------------------------------------------------------------------


def test_a_machine_that_is_down_is_named_with_sshs_words_and_starts_when_it_comes(
    three_nodes: TestCluster, tmp_path: Path
) -> None:
    node = three_nodes.nodes[1]
    node.kill_all()
    run = Run(three_nodes, tmp_path)
    start = run.start(three_nodes.nodes[0])
    start.sees(r"n1 \(node1\): no agent could be started: ssh: connect to host .* Connection refused")
    start.sees(r"try: ssh -o BatchMode=yes .* -- node1 ")
    run.agent(2)
    time.sleep(4)
    assert start.text.count("no agent could be started") == 1, "the same words are said once"
    command = re.search(r"try: (ssh .*)", start.text)
    assert command is not None
    failed = three_nodes.nodes[0].run(["sh", "-c", command[1]], stderr=subprocess.DEVNULL)
    assert failed.wait(20) == 255
    node.start_sshd()
    assert three_nodes.nodes[0].run(["sh", "-c", command[1]], stdout=subprocess.DEVNULL).wait(20) == 0
    run.agent(1)
    start.process.terminate()
    start.ends(138)


def test_refusals_of_other_kinds_are_named_too(three_nodes: TestCluster, tmp_path: Path) -> None:
    files = three_nodes.ssh_files
    assert files is not None
    here = tmp_path / "here" / "below"
    here.mkdir(parents=True)
    files.known_hosts.write_text(re.sub(r"(node2,\S+ \S+ \S{30})\S", r"\1A", files.known_hosts.read_text()))
    three_nodes.nodes[1].run(["mount", "-t", "tmpfs", "tmpfs", str(here.parent)]).wait()
    run = Run(three_nodes, tmp_path)
    start = run.start(three_nodes.nodes[0], cwd=here)
    start.sees(r"n2 \(node2\): no agent could be started: .*Host key verification failed")
    start.sees(rf"n1 \(node1\): no agent could be started: {here}: No such file or directory")
    bin_folder = str(Path(sys.executable).parent)
    three_nodes.nodes[1].run(["mount", "-t", "tmpfs", "tmpfs", bin_folder]).wait()
    start.sees(r"n1 \(node1\): no agent could be started: .*python.*(not found|No such file)")
    start.process.terminate()
    start.ends(138)


def test_an_agent_outlives_its_connection_and_the_head_finds_it_again(three_nodes: TestCluster, tmp_path: Path) -> None:
    files = three_nodes.ssh_files
    assert files is not None
    for node in three_nodes.nodes:  # the user's own setting wins over ours, and saves the test ten seconds
        path = node.folder / "ssh_config"
        path.write_text(path.read_text() + "    ServerAliveInterval 1\n    ServerAliveCountMax 2\n")
    run = Run(three_nodes, tmp_path)
    start = run.start(three_nodes.nodes[0])
    pid = run.agent(1)["pid"]
    start.sees(r"n1 \(node1\): agent started")
    three_nodes.nodes[1].cut()
    start.sees(r"n1 \(node1\): the connection is lost \(.*\); if its agent lives, it goes on")
    three_nodes.nodes[1].mend()
    start.sees(rf"n1 \(node1\): its agent runs already \(pid {pid}\); connected to it")
    run.say(1, "heard again")
    start.sees(r"\[n1\] heard again")
    start.process.terminate()
    start.sees(r"\[n1\] got SIGTERM")
    start.ends(138)
    assert not alive(pid)


def test_agents_outlive_their_head_and_the_next_start_finds_them(three_nodes: TestCluster, tmp_path: Path) -> None:
    run = Run(three_nodes, tmp_path)
    first = run.start(three_nodes.nodes[0])
    pids = [run.agent(rank)["pid"] for rank in (1, 2)]
    first.sees(r"n2 \(node2\): agent started")
    first.process.kill()
    wait_for(lambda: commands_in(three_nodes.nodes[0]) == [], "the fan-out and its ssh end with the head")
    assert all(alive(pid) for pid in pids)
    run.say(1, "said without a head")
    second = run.start(three_nodes.nodes[0])
    for rank, pid in zip((1, 2), pids, strict=True):
        second.sees(rf"n{rank} \(node{rank}\): its agent runs already \(pid {pid}\); connected to it")
    second.sees(r"\[n1\] said without a head")
    for name in ("own", "n1", "n2"):
        run.end(name, 0)
    second.ends(0)


def test_a_start_on_another_machine_takes_the_place_of_a_head_that_died(
    three_nodes: TestCluster, tmp_path: Path
) -> None:
    a, b, _ = three_nodes.nodes
    run = Run(three_nodes, tmp_path)
    first = run.start(a)
    pids = [run.agent(rank)["pid"] for rank in (1, 2)]
    first.sees(r"n2 \(node2\): agent started")
    a.kill_all()
    second = run.start(b)
    second.sees(rf"this node's agent runs already \(pid {pids[0]}\)")
    second.sees(rf"n2 \(node2\): its agent runs already \(pid {pids[1]}\); connected to it")
    a.start_sshd()
    run.agent(0)
    second.sees(r"n0 \(node0\): agent started")
    second.process.terminate()
    second.ends(138)
    assert not any(alive(pid) for pid in [*pids, run.agent(0)["pid"]])


def test_a_killed_fan_out_is_replaced(two_nodes: TestCluster, tmp_path: Path) -> None:
    run = Run(two_nodes, tmp_path)
    start = run.start(two_nodes.nodes[0])
    pid = run.agent(1)["pid"]
    start.sees(r"n1 \(node1\): agent started")
    for other in two_nodes.nodes[0].processes():
        if "launcher.fanout.process" in Path(f"/proc/{other}/cmdline").read_text():
            os.kill(other, signal.SIGKILL)
    start.sees(rf"n1 \(node1\): its agent runs already \(pid {pid}\); connected to it")
    start.process.terminate()
    start.ends(138)
    assert not alive(pid)


def test_what_does_not_end_after_the_run_is_named_and_left(two_nodes: TestCluster, tmp_path: Path) -> None:
    run = Run(two_nodes, tmp_path)
    start = run.start(two_nodes.nodes[0])
    pid = run.agent(1)["pid"]
    start.sees(r"n1 \(node1\): agent started")
    run.end("own", 138)  # this node alone leaves: nobody has asked the others to stop
    start.ends(138)
    start.sees(r"agents that go on by themselves: n1 \(node1\)")
    assert alive(pid)


# -- heads -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("codes", "expected"), [((0, 0), 0), ((1, 1), 1), ((3, 0), 0), ((138, 138), 138)])
def test_a_head_outside_the_list_ends_as_its_nodes_do(
    three_nodes: TestCluster, tmp_path: Path, codes: tuple[int, int], expected: int
) -> None:
    run = Run(three_nodes, tmp_path, hosts=["node1", "node2"], nodes="1:2")
    start = run.start(three_nodes.nodes[0])
    for rank, code in enumerate(codes):
        run.agent(rank)
        run.end(f"n{rank}", code)
    start.ends(expected)
    assert "own agent" not in start.text


def test_a_head_outside_the_list_ends_when_one_of_a_fixed_number_is_refused(
    three_nodes: TestCluster, tmp_path: Path
) -> None:
    run = Run(three_nodes, tmp_path, hosts=["node1", "node2"])
    start = run.start(three_nodes.nodes[0])
    other = run.agent(1)["pid"]
    run.agent(0)
    start.sees(r"n1 \(node2\): agent started")
    run.end("n0", 3)
    start.ends(3)
    start.sees(r"n0 \(node1\) has ended and every node is needed: stopping n1 \(node2\)")
    start.sees(r"\[n1\] got SIGTERM")
    assert not alive(other)


def test_agents_that_wait_for_one_that_is_refused_are_stopped_after_the_heads_own(
    three_nodes: TestCluster, tmp_path: Path
) -> None:
    run = Run(three_nodes, tmp_path)
    start = run.start(three_nodes.nodes[0])
    other = run.agent(2)["pid"]
    run.agent(1)
    start.sees(r"n2 \(node2\): agent started")
    run.end("n1", 3)
    start.sees(r"final end: n1 \(node1\) 3 agent of n1 is here")
    run.end("own", 3)
    start.ends(3)
    start.sees(r"n1 \(node1\) has ended and every node is needed: stopping n2 \(node2\)")
    assert not alive(other)


def test_a_head_outside_the_list_gives_up_when_no_machine_can_be_had(two_nodes: TestCluster, tmp_path: Path) -> None:
    two_nodes.nodes[1].kill_all()
    run = Run(two_nodes, tmp_path, hosts=["node1"], wait_seconds=2)
    start = run.start(two_nodes.nodes[0])
    start.ends(138)
    start.sees(
        r"no node has had an agent for 2 s \(cluster.wait_seconds\)\nftlaunch: n0 \(node1\): ssh: connect to host"
    )


def test_the_same_command_on_every_machine_leaves_each_its_own(two_nodes: TestCluster, tmp_path: Path) -> None:
    a, b = two_nodes.nodes
    b.kill_all()  # no ssh from a to b: each is started by hand
    run = Run(two_nodes, tmp_path)
    first = run.start(a)
    first.sees(r"n1 \(node1\): no agent could be started")
    second = run.start(b)
    second.sees(r"n0 \(node0\): its agent runs already, under the start on node0 \(pid \d+\): left alone")
    b.start_sshd()
    first.sees(r"n1 \(node1\): its agent runs already, under the start on node1 \(pid \d+\): left alone")
    first.process.terminate()
    first.ends(138)
    time.sleep(0.5)
    assert second.process.poll() is None, "a head stops what it has started, and nothing else"
    second.process.terminate()
    second.ends(138)


def test_a_start_where_the_agent_runs_already_shows_it_and_ends_with_it(two_nodes: TestCluster, tmp_path: Path) -> None:
    a, b = two_nodes.nodes
    run = Run(two_nodes, tmp_path)
    first = run.start(a)
    pid = run.agent(1)["pid"]
    first.sees(r"n1 \(node1\): agent started")
    second = run.start(b)
    second.sees(rf"this node's agent runs already \(pid {pid}, started by the start on node0 \(pid \d+\)\)")
    run.say(1, "to both")
    first.sees(r"\[n1\] to both")
    second.sees(r"(?m)^to both$")
    run.end("n1", 0)
    run.end("own", 0)
    first.ends(0)
    second.ends(0)


def test_a_second_start_on_the_heads_machine_is_refused(two_nodes: TestCluster, tmp_path: Path) -> None:
    run = Run(two_nodes, tmp_path)
    first = run.start(two_nodes.nodes[0])
    first.sees(r"n1 \(node1\): agent started")
    second = run.start(two_nodes.nodes[0])
    second.ends(2)
    second.sees(rf"this node's agent runs already, under the start on node0 \(pid {first.process.pid}\)")
    first.process.terminate()
    first.ends(138)


# -- DeepSpeed's runner ------------------------------------------------------------------------------------------------


def test_deepspeeds_runner_starts_one_agent_a_node_and_a_stop_ends_them(two_nodes: TestCluster, tmp_path: Path) -> None:
    run = Run(two_nodes, tmp_path, launcher="deepspeed", token="sesame")
    start = run.start(two_nodes.nodes[0], **two_nodes.pdsh_env)
    agents = [run.agent(rank) for rank in (0, 1)]
    assert not any({"LOCAL_RANK", "CROSS_SIZE", "CUDA_VISIBLE_DEVICES"} & set(agent["environ"]) for agent in agents)
    assert agents[1]["environ"]["FTLAUNCH_TOKEN"] == "sesame"
    assert [text for node in two_nodes.nodes for text in commands_in(node) if "sesame" in text] == []
    order = run.output / "ftlaunch" / "launch" / "order.json"
    assert order.stat().st_mode & 0o77 == 0
    start.process.terminate()
    start.ends(138)
    wait_for(lambda: not any(alive(agent["pid"]) for agent in agents), "agents end after the stop")
    assert not order.exists()


def test_deepspeeds_runner_gives_the_agents_exit_code(two_nodes: TestCluster, tmp_path: Path) -> None:
    run = Run(two_nodes, tmp_path, launcher="deepspeed")
    start = run.start(two_nodes.nodes[0], **two_nodes.pdsh_env)
    for rank in (0, 1):
        run.agent(rank)
        run.end(f"n{rank}", 3)
    start.ends(3)


def test_deepspeed_accepts_hostfile_and_environment_as_a_start_writes_them(
    two_nodes: TestCluster, tmp_path: Path
) -> None:
    (tmp_path / "hostfile").write_text(hostfile_text([(node.ip, 2) for node in two_nodes.nodes]))
    variables = [Variable("NCCL_DEBUG", "WARN", "ftlaunch"), Variable("SPACED", "a b=c", "job.yaml")]
    (tmp_path / ".deepspeed_env").write_text(deepspeed_env_text(variables))
    (tmp_path / "script.py").write_text(
        "import os, sys\n"
        "names = ('RANK', 'LOCAL_RANK', 'WORLD_SIZE', 'NCCL_DEBUG', 'SPACED')\n"
        "sys.stdout.write(' '.join(['rank', *(os.environ[name] for name in names)]) + '\\n')\n"
    )
    text = two_nodes.nodes[0].output(
        [sys.executable, "-m", "deepspeed.launcher.runner", f"--hostfile={tmp_path / 'hostfile'}", "script.py"],
        env=two_nodes.pdsh_env,
        cwd=tmp_path,
        timeout_s=WITHIN_S,
    )
    found = sorted(re.findall(r"rank (\d \d \d \S+ .*)", text))
    assert found == ["0 0 4 WARN a b=c", "1 1 4 WARN a b=c", "2 0 4 WARN a b=c", "3 1 4 WARN a b=c"]
