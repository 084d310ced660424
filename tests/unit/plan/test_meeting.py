"""Where agents meet: seeds, port, bounds, and where the token comes from."""

from __future__ import annotations

from typing import Any

import pytest

from launcher.cluster.model import Timing, Wanted
from launcher.errors import UserError
from launcher.plan.environment import Network
from launcher.plan.meeting import Meeting, plan_meeting
from launcher.platforms.detect import Asked, Outside, detect_place
from launcher.platforms.place import Place
from tests.unit.plan.plan_inputs import config
from tests.unit.platforms import environments as envs

NETWORK = Network("eth0", "10.1.0.9", "10.1.0.5", "route")
DLC = detect_place(envs.DLC)
SLURM = detect_place(envs.SLURM)


def meeting(
    place: Place, cluster: dict[str, Any] | None = None, environ: dict[str, str] | None = None, **more: Any
) -> Meeting:
    return plan_meeting(config({"cluster": cluster or {}, **more}), place, NETWORK, environ or {})


def test_on_dlc_the_master_alone_is_known_and_its_port_is_the_platforms() -> None:
    met = meeting(DLC)
    assert (met.name, met.address) == ("n1", "10.1.0.5:23456")
    assert met.seeds == ((envs.DLC["MASTER_ADDR"], 23456),)
    assert met.own_seed is None
    assert met.awaited_names == (envs.DLC["MASTER_ADDR"],)
    assert "PAI-DLC" in met.port_reason


def test_on_slurm_every_host_is_known() -> None:
    met = meeting(SLURM)
    assert [host for host, _ in met.seeds] == list(SLURM.hosts)
    assert {port for _, port in met.seeds} == {29430}
    assert met.own_seed == SLURM.node_rank
    assert met.name == f"n{SLURM.node_rank}"
    assert SLURM.hosts[met.own_seed or 0] not in met.awaited_names


def test_hosts_of_job_yaml_lose_the_user_that_is_for_ssh() -> None:
    place = detect_place({}, Asked(hosts=("me@a", "b")), Outside(names=frozenset({"b"})))
    assert meeting(place).seeds == (("a", 29430), ("b", 29430))


@pytest.mark.parametrize(
    "place",
    [
        Place("KubeDL", 2, 0, master_addr="localhost", master_port=23456),
        Place("cluster.hosts", 2, 0, hosts=("localhost", "b"), master_addr="localhost", master_port=23456),
    ],
)
def test_this_node_is_known_by_its_own_address_whatever_its_name_means(place: Place) -> None:
    """Membership takes every address for a node of its own: under two addresses a node would follow itself."""
    found = meeting(place).seed_addresses({"localhost": "127.0.0.1", "b": "10.1.0.7"})
    assert found[0] == meeting(place).address == "10.1.0.5:23456"
    assert found[1:] == ("10.1.0.7:23456",) * (len(place.hosts) > 0)


def test_what_does_not_resolve_is_left_out_and_the_order_stays() -> None:
    place = Place("cluster.hosts", 4, 1, hosts=("a", "b", "c", "d"), master_addr="a")
    assert meeting(place).seed_addresses({"d": "10.1.0.4", "a": "10.1.0.1"}) == (
        "10.1.0.1:29430",
        "10.1.0.5:29430",
        "10.1.0.4:29430",
    )


@pytest.mark.parametrize(
    ("place", "cluster", "port"),
    [
        (DLC, {}, 23456),
        (DLC, {"agent_port": 4000}, 4000),
        (DLC, {"master_port": 29500}, 23456),
        (DLC, {"master_port": 23456}, 29430),  # the ranks of the first attempt are promised that one
        (SLURM, {}, 29430),
        (SLURM, {"master_port": 29430}, 29431),
    ],
)
def test_the_port(place: Place, cluster: dict[str, Any], port: int) -> None:
    met = meeting(place, cluster)
    assert met.agent_port == port
    assert met.agent_port != cluster.get("master_port")


def test_one_port_for_agents_and_ranks_is_refused() -> None:
    with pytest.raises(UserError, match="both 4000"):
        meeting(DLC, {"agent_port": 4000, "master_port": 4000})


def test_nodes_of_which_nobody_says_where_they_are() -> None:
    place = Place("Slurm", 2, 1, evidence=(("SLURM_NNODES", "2"),))
    with pytest.raises(UserError, match=r"Slurm \(SLURM_NNODES=2\) says that there are 2 nodes, but not where"):
        meeting(place)


@pytest.mark.parametrize(("nodes", "wanted"), [(2, Wanted(2, 2)), ((2, 4), Wanted(2, 4))])
def test_how_many_are_wanted(nodes: Any, wanted: Wanted) -> None:
    assert meeting(Place("x", nodes, 0, master_addr="m")).wanted == wanted


def test_bounds_come_from_job_yaml() -> None:
    default = meeting(DLC).timing
    assert default == Timing(), "the defaults of the two are the same"
    timing = meeting(DLC, {"wait_seconds": 100, "gather_seconds": 0}, spot={"grace_seconds": 60}).timing
    assert (timing.bound_s, timing.gather_s, timing.pause_s) == (100, 0, 55)


@pytest.mark.parametrize("grace_s", [0.5, 2, 25, 300])
def test_the_agreed_save_ends_within_the_grace(grace_s: float) -> None:
    assert 0 < meeting(DLC, spot={"grace_seconds": grace_s}).timing.pause_s < grace_s


@pytest.mark.parametrize(("wait_s", "gather_s"), [(20, 30), (10, 10), (1000, 5000)])
def test_gathering_ends_before_the_wait_for_nodes_does(wait_s: float, gather_s: float) -> None:
    timing = meeting(DLC, {"wait_seconds": wait_s, "gather_seconds": gather_s}).timing
    assert timing.gather_s < timing.bound_s


@pytest.mark.parametrize(
    ("cluster", "environ", "source"),
    [
        ({"token": "t0ps3cret"}, {"FTLAUNCH_TOKEN": "x"}, "job.yaml"),
        ({}, {"FTLAUNCH_TOKEN": "t0ps3cret"}, "FTLAUNCH_TOKEN"),
        ({}, {"FTLAUNCH_TOKEN": " "}, "output folder"),
        ({}, {}, "output folder"),
    ],
)
def test_the_token_is_named_by_its_source_and_never_shown(
    cluster: dict[str, Any], environ: dict[str, str], source: str
) -> None:
    met = meeting(DLC, cluster, environ)
    assert met.token_source == source
    assert "t0ps3cret" not in repr(met)
