"""`ftlaunch status` of a run on several nodes: real locks of real processes, events as the agents write them."""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest

from launcher.agent import living
from launcher.agent.cluster_folder import ClusterFolder
from launcher.agent.events import EventLog
from launcher.agent.living import Life, agents_of
from launcher.agent.run_lock import LockFile, RunLock, process_identity
from launcher.agent.standing import Standing
from launcher.cli.main import main
from launcher.cli.status import look_at, render
from launcher.cluster.model import Generation, Node
from tests.unit.agent.crowd import Child

ELSEWHERE = "pid 1 on lost-pod (boot 00000000, pid:[1], started 1) 0123456789abcdef"


class Nodes:
    """Agents that hold their places and nothing more; what they have to say is written here, a second apart."""

    def __init__(self, output_dir: Path, stack: ExitStack) -> None:
        self.output_dir = output_dir
        self._stack = stack
        self._logs: dict[str, EventLog] = {}
        self._agents: dict[str, Child] = {}
        self._now = datetime(2026, 11, 30, 12, tzinfo=timezone.utc)

    def start(self, *names: str, number: int = 1) -> None:
        """number: of the first generation, where there is none yet."""

        def live(name: str) -> Callable[[Callable[[Any], None]], None]:
            def work(tell: Callable[[Any], None]) -> None:
                with ClusterFolder(self.output_dir, name, first_voted=lambda: 0) as folder:
                    folder.claim(0, Generation(number, (Node(name, "10.0.0.1:1", 1, "a"),), 0, 20000, "start"))
                    tell("here")
                    time.sleep(60)

            return work

        for name in names:
            agent = self._agents[name] = Child(live(name))
            self._stack.callback(agent.kill)
            assert agent.hear() == "here"
            self.says(name, "preflight", findings={}, ids=[])
            self.says(name, "run_started", run_id="abc", agent_pid=agent.pid)

    def trains(self, *names: str, number: int = 1) -> None:
        for name in names:
            self.says(name, "generation_started", gen=number, world_size=2 * len(names), nodes=list(names))

    def says(self, name: str, event: str, *, gen: int | None = None, **fields: Any) -> None:
        if name not in self._logs:
            self._logs[name] = EventLog(self.output_dir, name, clock=lambda: self._now)
        self._now += timedelta(seconds=1)
        if gen is not None:
            self._logs[name].generation = gen
        self._logs[name].emit(event, **fields)

    def ends(self, name: str, exit_code: int, reason: str, **fields: Any) -> None:
        self.says(name, "run_ended", exit_code=exit_code, reason=reason, **fields)
        self.dies(name)

    def dies(self, *names: str) -> None:
        for name in names:
            self._agents.pop(name).kill()

    def stand(self) -> Standing:
        return look_at(self.output_dir)

    def states(self) -> dict[str, str]:
        return {node.name: node.state for node in self.stand().nodes}


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    with ExitStack() as stack:
        yield Nodes(tmp_path, stack)


def test_who_trains_and_who_waits(nodes: Nodes) -> None:
    nodes.start("n0", "n1", "n2")
    nodes.trains("n0", "n2")
    standing = nodes.stand()
    assert (standing.state, standing.run_id) == ("running", "abc")
    assert (standing.generation, standing.world_size, standing.members) == (1, 4, ("n0", "n2"))
    assert nodes.states() == {"n0": "training", "n1": "waiting", "n2": "training"}
    assert {node.host for node in standing.nodes} == {os.uname().nodename}
    assert len({node.pid for node in standing.nodes}) == 3
    nodes.says("n2", "worker_exited", rank=2)
    nodes.says("n0", "group_killed", reason="lost n2")
    assert set(nodes.states().values()) == {"waiting"}
    nodes.trains("n0", "n2", number=2)
    nodes.trains("n0", number=3)
    assert nodes.states() == {"n0": "training", "n1": "waiting", "n2": "waiting"}


def test_one_that_had_to_leave_does_not_end_the_run(nodes: Nodes) -> None:
    nodes.start("n0", "n1")
    nodes.trains("n0", "n1")
    nodes.ends("n1", 138, "SIGTERM")
    nodes.trains("n0", number=2)
    standing = nodes.stand()
    assert (standing.state, standing.exit_code, standing.members) == ("running", None, ("n0",))
    assert nodes.states() == {"n0": "training", "n1": "ended"}
    assert (standing.nodes[1].exit_code, standing.nodes[1].reason) == (138, "SIGTERM")
    nodes.dies("n0")
    assert nodes.stand().state == "gone"
    assert nodes.states() == {"n0": "gone", "n1": "ended"}


def test_one_that_is_not_let_in_does_not_end_the_run(nodes: Nodes) -> None:
    nodes.start("n0")
    nodes.trains("n0")
    nodes.start("n1")
    nodes.ends("n1", 3, "n0 refuses this node: precision")
    nodes.dies("n0")
    assert nodes.stand().state == "gone"
    assert nodes.states() == {"n0": "gone", "n1": "ended"}


def test_the_planned_end_counts_though_one_was_killed_before_it_could_say_so(nodes: Nodes) -> None:
    nodes.start("n0", "n1")
    nodes.trains("n0", "n1")
    nodes.ends("n0", 0, "training is complete at step 9", goodput=0.5)
    nodes.says("n1", "worker_exited", rank=2)  # its clock is ahead
    nodes.dies("n1")
    standing = nodes.stand()
    assert (standing.state, standing.exit_code, standing.goodput) == ("ended", 0, 0.5)
    assert nodes.states() == {"n0": "ended", "n1": "gone"}


def test_the_planned_end_counts_though_only_a_reserve_has_heard_of_it(nodes: Nodes) -> None:
    nodes.start("n0", "n1")
    nodes.trains("n0")
    nodes.ends("n1", 0, "training has reached its planned end")
    nodes.dies("n0")
    nodes.says("n0", "worker_exited", rank=0)
    assert (nodes.stand().state, nodes.stand().exit_code) == ("ended", 0)


def test_a_fault_that_stays_is_told_to_all(nodes: Nodes) -> None:
    nodes.start("n0", "n1")
    nodes.trains("n0", "n1")
    nodes.ends("n0", 1, "n1: data_error")
    nodes.ends("n1", 138, "SIGTERM")
    standing = nodes.stand()
    assert (standing.state, standing.exit_code, standing.reason) == ("ended", 1, "n1: data_error")


def test_who_gave_up_waiting_has_the_last_word(nodes: Nodes) -> None:
    nodes.start("n0", "n1")
    nodes.trains("n0", "n1")
    nodes.dies("n1")
    nodes.ends("n0", 138, "waited 600 s: waiting for n1")
    standing = nodes.stand()
    assert (standing.state, standing.reason) == ("ended", "waited 600 s: waiting for n1")
    assert nodes.states() == {"n0": "ended", "n1": "gone"}


def test_faults_and_nodes_are_those_since_nobody_was_up(nodes: Nodes) -> None:
    nodes.start("n0", "n1", "n2")
    nodes.trains("n0", "n1", "n2")
    nodes.says("n1", "incident", **{"class": "host_oom"})
    nodes.says("n0", "checkpoint_saved", step=10)
    nodes.dies("n0", "n1", "n2")
    nodes.start("n0", "n1", number=7)
    assert nodes.stand().generation == 0
    nodes.trains("n0", "n1", number=7)
    nodes.says("n1", "incident", **{"class": "nccl_timeout"})
    standing = nodes.stand()
    assert (standing.generation, standing.faults) == (7, ("n1: nccl_timeout",))
    assert standing.nodes[1].faults == ("nccl_timeout",)
    assert list(nodes.states()) == ["n0", "n1"]
    assert standing.saved_step == 10


def test_a_run_on_one_node_that_follows_is_shown_as_one(nodes: Nodes) -> None:
    nodes.start("n0", "n1")
    nodes.dies("n0", "n1")
    with RunLock(nodes.output_dir):
        nodes.says("n0", "run_started", run_id="abc", agent_pid=os.getpid())
        standing = nodes.stand()
        assert (standing.state, standing.nodes) == ("running", ())
    assert (nodes.stand().state, nodes.stand().nodes) == ("gone", ())


def test_a_start_that_asks_whether_anybody_lives_is_no_life(nodes: Nodes) -> None:
    """It holds the lock alone for a moment."""
    nodes.start("n0")
    nodes.dies("n0")
    lock = LockFile(nodes.output_dir / "ftlaunch" / "lock")
    try:
        assert lock.take(fcntl.LOCK_EX)
        assert nodes.stand().state == "gone"
    finally:
        lock.close()


def test_the_runs_lock_is_not_touched(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or a start at that moment would believe that somebody lives, and join an epoch that all have left."""
    nodes.start("n0")
    touched: list[str] = []
    flock = fcntl.flock

    def watched(stream: Any, how: int) -> None:
        touched.append(Path(stream.name).name)
        flock(stream, how)

    monkeypatch.setattr(living.fcntl, "flock", watched)
    nodes.dies("n0")
    assert nodes.stand().state == "gone"
    assert touched == ["n0"]


def test_a_second_place_of_a_node_is_shown_once_unless_both_live(nodes: Nodes) -> None:
    nodes.start("n0")
    (folder,) = (nodes.output_dir / "ftlaunch" / "cluster").glob("epoch-*/agents")
    (folder / "n0-0123456789abcdef").write_text(ELSEWHERE)
    assert [(agent.node, agent.life) for agent in agents_of(nodes.output_dir, 1, "")] == [("n0", Life.ALIVE)]
    with (folder / "n0-0123456789abcdef").open("rb") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        assert [agent.host for agent in agents_of(nodes.output_dir, 1, "")] == [os.uname().nodename, "lost-pod"]
    nodes.dies("n0")
    assert [agent.host for agent in agents_of(nodes.output_dir, 1, "")] == ["lost-pod"]


def test_where_locks_stay_here_only_a_neighbour_is_known_to_be_gone(nodes: Nodes) -> None:
    nodes.start("n0", "n1")
    nodes.dies("n0")
    (folder,) = (nodes.output_dir / "ftlaunch" / "cluster").glob("epoch-*/agents")
    (folder / "n2").write_text(ELSEWHERE)
    lives = {agent.node: agent.life for agent in agents_of(nodes.output_dir, 1, "fuse.ossfs at /mnt/data")}
    assert lives == {"n0": Life.GONE, "n1": Life.ALIVE, "n2": Life.UNKNOWN}
    assert {agent.node: agent.life for agent in agents_of(nodes.output_dir, 1, "")}["n2"] is Life.GONE


def test_n10_comes_after_n9(nodes: Nodes) -> None:
    nodes.start("n10", "n9")
    assert list(nodes.states()) == ["n9", "n10"]


def test_what_a_person_and_a_program_see(nodes: Nodes, capsys: pytest.CaptureFixture[str]) -> None:
    nodes.start("n0", "n1", "n2")
    nodes.trains("n0", "n1")
    nodes.says("n0", "incident", **{"class": "host_oom"})
    nodes.ends("n1", 138, "SIGTERM")
    nodes.dies("n2")
    lines = list(render(nodes.stand()))
    host = os.uname().nodename
    assert lines[:2] == ["state       running (1 of 3 nodes are up)", "run         abc, attempt 1: 4 rank(s) on n0, n1"]
    assert "faults      n0: host_oom (since the last time that no node was up)" in lines
    assert lines[-3:] == [
        f"nodes       n0  {host}  training  last incident at 2026-11-30T12:00:09.000Z",
        f"            n1  {host}  ended     exit code 138: SIGTERM",
        f"            n2  {host}  gone      last run_started at 2026-11-30T12:00:06.000Z",
    ]
    assert main(["status", str(nodes.output_dir), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["v"] == 1
    assert [node["state"] for node in document["nodes"]] == ["training", "ended", "gone"]
    pid = document["nodes"][0]["pid"]
    assert document["holder"].startswith(f"n0: pid {pid} on {host} ({process_identity(pid)})")
