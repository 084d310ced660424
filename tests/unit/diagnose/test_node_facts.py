"""Evidence of a node: what has grown is told, who does not answer is left behind, and nobody waits for him."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from launcher.diagnose import node_facts
from launcher.diagnose.node_facts import Counters, Unanswered, collect, node_evidence, take_counters


def test_a_reader_that_blocks_is_left_behind_and_one_that_fails_is_told() -> None:
    for_ever = threading.Event()

    def fails() -> None:
        raise OSError("no such card")

    began_s = time.monotonic()
    told = collect({"good": lambda: 7, "blocked": for_ever.wait, "failed": fails}, 0.2)
    for_ever.set()
    assert time.monotonic() - began_s < 5
    assert told == {"good": 7, "blocked": "no answer within 0.2 s", "failed": "no such card"}
    assert isinstance(told["blocked"], Unanswered)


def test_what_grew_since_the_attempt_began_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = Counters(
        time.time(),
        2,
        {"max": 5, "oom_kill": 2, "current": 10},
        {"mlx5_0/1": {"state": "ACTIVE", "link_downed": 0}, "mlx5_1/1": {"state": "ACTIVE", "link_downed": 1}},
    )
    down = {"mlx5_0/1": {"state": "DOWN", "link_downed": 1}, "mlx5_1/1": {"state": "ACTIVE", "link_downed": 1}}
    monkeypatch.setattr(node_facts, "read_cgroup_oom_kills", lambda: 3)
    monkeypatch.setattr(node_facts, "read_memory_counters", lambda: {"max": 9, "oom_kill": 3, "current": 90})
    monkeypatch.setattr(node_facts, "read_rdma_counters", lambda: down)
    node = node_evidence(before, "n1", {"output_dir": tmp_path, "lost": tmp_path / "none"})
    assert (node.node, node.cgroup_oom_kills) == ("n1", 1)
    assert node.facts["memory_grown"] == {"max": 4, "oom_kill": 1}
    assert node.facts["rdma_grown"] == {"mlx5_0/1": {"link_downed": 1, "state": "ACTIVE -> DOWN"}}
    assert node.facts["disks"]["output_dir"]["free_bytes"] > 0
    assert "disk lost" in node.facts["unanswered"]


def test_this_machine_answers() -> None:
    node = node_evidence(take_counters(), "", {})
    assert node.facts["shm"]["size_bytes"] == node.shm_size_bytes
