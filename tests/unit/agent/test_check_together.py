"""Nodes that run `ftlaunch check` together: real sockets between threads of one process."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from launcher.agent.check_together import Together, check_together
from launcher.host.net_speed import SpeedAddress, measure, speed_server, why_unreachable
from launcher.preflight.cluster_facts import ClusterFacts, NodeReport


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def parts(count: int, folder: Path, **changes: object) -> list[Together]:
    port = free_port()
    return [
        replace(
            Together(
                report=NodeReport(f"n{rank}", f"host{rank}", {"torch": "2.13.0"}, (("shm.size", "error", "64 MiB"),)),
                leader=("127.0.0.1", port),
                is_leader=rank == 0,
                host_ip="127.0.0.1",
                num_wanted=count,
                output_dir=folder / "run",
                token="secret",
                meet_within_s=5.0,
                speed_seconds=0.05,
            ),
            **changes,  # type: ignore[arg-type]
        )
        for rank in range(count)
    ]


def together(nodes: Sequence[Together]) -> list[ClusterFacts]:
    with ThreadPoolExecutor(len(nodes)) as pool:
        return list(pool.map(check_together, nodes))


def test_three_nodes_find_out_the_same(tmp_path: Path) -> None:
    found = together(parts(3, tmp_path))
    first = found[0]
    assert [replace(facts, seconds=0.0) for facts in found[1:]] == [replace(first, seconds=0.0)] * 2
    assert sorted(node.name for node in first.nodes) == ["n0", "n1", "n2"]
    assert first.nodes[1].findings == (("shm.size", "error", "64 MiB"),)
    assert (first.unreachable, first.unseen) == ((), {})
    assert set(first.seen_after_s) == {"n1", "n2"}
    assert all(abs(node.clock_offset_s) < 0.5 and node.clock_error_s < 0.5 for node in first.nodes)
    assert {speed.source for speed in first.speeds} == {"n0", "n1", "n2"}
    assert all(speed.bytes_per_s > 1e6 and 0 < speed.latency_s < 0.1 for speed in first.speeds)
    assert list(tmp_path.iterdir()) == []


def test_speed_is_left_out_where_it_is_not_wanted(tmp_path: Path) -> None:
    assert together(parts(2, tmp_path, has_speed=False))[0].speeds == ()


def test_who_does_not_come_is_not_waited_for(tmp_path: Path) -> None:
    nodes = parts(3, tmp_path, meet_within_s=1.0)
    first, second = together(nodes[:2])
    assert sorted(node.name for node in first.nodes) == sorted(node.name for node in second.nodes) == ["n0", "n1"]
    assert first.num_wanted == 3
    (alone,) = together([parts(2, tmp_path, meet_within_s=0.2)[1]])
    assert [node.name for node in alone.nodes] == ["n1"]


def test_a_stranger_is_not_let_in(tmp_path: Path) -> None:
    nodes = parts(2, tmp_path, meet_within_s=1.0)
    first, stranger = together([nodes[0], replace(nodes[1], token="guessed")])
    assert [node.name for node in first.nodes] == ["n0"]
    assert [node.name for node in stranger.nodes] == ["n1"]


def test_a_node_that_does_not_see_the_folder_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("launcher.agent.check_together.SEEN_WITHIN_S", 0.3)
    monkeypatch.setattr("launcher.agent.check_together.nearest_existing", lambda folder: tmp_path / "leaders_own")
    (tmp_path / "leaders_own").mkdir()
    first = together(parts(2, tmp_path, has_speed=False))[0]
    assert first.unseen == {"n1": f"output_dir is {tmp_path}/run here, the first node wrote to {tmp_path}/leaders_own"}
    monkeypatch.setattr("launcher.agent.check_together.nearest_existing", lambda folder: tmp_path)
    monkeypatch.setattr(Path, "unlink", lambda self, missing_ok=False: None)
    monkeypatch.setattr(Path, "write_text", lambda self, text, encoding: Path(tmp_path / "elsewhere").touch())
    assert "not there after 0.3 s" in together(parts(2, tmp_path, has_speed=False))[0].unseen["n1"]


def test_facts_travel_whole() -> None:
    facts = ClusterFacts(2, (NodeReport("n0", "h", {"a": "b"}, (("x", "error", "1"),), 0.5, 0.1),), (("a", "b", "c"),))
    assert ClusterFacts.from_json(facts.to_json()) == facts


def test_the_speed_server_answers_only_who_knows_its_secret() -> None:
    with speed_server("127.0.0.1") as address:
        assert why_unreachable(address) == ""
        speed = measure("a", "b", address, 0.05)
        assert speed.bytes_per_s > 1e6
        wrong = SpeedAddress(address.host, address.port, "00" * 16)
        assert why_unreachable(wrong)
        with pytest.raises(OSError, match=r"closed|reset"):
            measure("a", "b", wrong, 0.05)
    assert "refused" in why_unreachable(address)
