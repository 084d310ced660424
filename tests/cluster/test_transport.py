"""Agents' messages on networks that are slow, lose packets or fall apart."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from typing import Any

from tests.cluster.cluster import TestCluster
from tests.cluster.node import Node

SILENCE_S = 3.0  # what membership takes for death


def start(node: Node, seconds: float, *leader: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.cluster.beats", node.ip, str(seconds), *leader]
    process = node.run(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def beats(leader: Node, member: Node, seconds: float, meanwhile: Any = lambda: None) -> list[dict[str, Any]]:
    """What each of the two has seen, the leader first."""
    processes = [start(leader, seconds)]
    try:
        processes.append(start(member, seconds, leader.ip))
        meanwhile()
        return [json.loads(process.communicate(timeout=seconds + 30)[0]) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def test_lost_packets_and_a_long_way_silence_nobody(two_nodes: TestCluster) -> None:
    leader, member = two_nodes.nodes
    two_nodes.delay(200)
    two_nodes.lossy(5)
    for seen in beats(leader, member, 25.0):
        assert seen["longest"] < SILENCE_S
        assert seen["heard"] > 30
        assert seen["unreachable"] == 0


def test_a_network_that_falls_apart_is_silence_and_heals_at_once(two_nodes: TestCluster) -> None:
    leader, member = two_nodes.nodes

    def part() -> None:
        time.sleep(3)
        two_nodes.partition([leader], [member])
        time.sleep(5)
        two_nodes.heal()

    for seen in beats(leader, member, 12.0, part):
        assert 4.5 < seen["longest"] < 6.5
        assert seen["unreachable"] == 0
