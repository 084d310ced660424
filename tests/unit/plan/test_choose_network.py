"""The interface and the address that other nodes reach this one by, with routes and names of invented networks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from launcher.errors import UserError
from launcher.host.facts import Nic
from launcher.host.routes import NoRouteError, Route
from launcher.plan.environment import Network
from launcher.plan.network import choose_network
from launcher.platforms.place import Place
from tests.unit.plan.plan_inputs import config, host

ONE = Place("one machine", 1, 0)
# eth0 is 10.1.0.5 (plan_inputs), eth1 of this page 192.168.7.5; docker0 and lo are there too.
NICS = (*host().nics[:2], Nic("eth1", True, 9000, None, ("192.168.7.5",), (), "ethernet"), *host().nics[3:])


def names(**known: str) -> Callable[[Sequence[str]], Mapping[str, frozenset[str]]]:
    """A name server: `names(node_2="10.1.0.7 fe80::7")`; `_` stands for `-`."""
    table = {name.replace("_", "-"): frozenset(ips.split()) for name, ips in known.items()}
    return lambda asked: {name: table[name] for name in asked if name in table}


def routes(address: str) -> Route:
    """10.* by eth0, 192.168.* by eth1, the rest by eth0's gateway."""
    if address.startswith("127."):
        return Route("lo", "127.0.0.1", address)
    if address.startswith("192.168."):
        return Route("eth1", "192.168.7.5", address)
    if address.startswith("172."):
        raise NoRouteError(f"no route to {address}")
    return Route("eth0", "10.1.0.5", address)


def no_route(address: str) -> Route:
    raise NoRouteError(f"no route to {address}")


def network(place: Place, known: Any = None, route_to: Any = routes, more: dict[str, Any] | None = None) -> Network:
    return choose_network(config(more), host(nics=NICS), place, known or names(), route_to)


def master(rank: int, address: str, num_nodes: int = 2) -> Place:
    return Place("DLC", num_nodes, rank, master_addr=address, master_port=23456, evidence=(("RANK", str(rank)),))


def listed(rank: int | None, *hosts: str) -> Place:
    return Place("cluster.hosts", len(hosts), rank, master_addr=hosts[0].rpartition("@")[2], hosts=hosts)


# -- one node ----------------------------------------------------------------------------------------------------------


def test_one_node_stays_on_the_loopback_and_its_hostfile_names_a_real_address() -> None:
    found = choose_network(config(), host(), ONE)
    assert (found.interface, found.master_addr, found.node_ip) == ("lo", "127.0.0.1", "10.1.0.5")


def test_one_node_asks_nobody() -> None:
    def fail(asked: object) -> Any:
        raise AssertionError(asked)

    assert network(ONE, fail, fail).interface == "lo"
    assert network(master(0, "dlc1-master-0", num_nodes=1), fail, fail).interface == "lo"


def test_a_node_without_network_is_itself() -> None:
    assert choose_network(config(), host(nics=()), ONE).node_ip == "127.0.0.1"


@pytest.mark.parametrize("place", [ONE, master(1, "10.1.0.7")])
def test_an_interface_that_was_asked_for(place: Place) -> None:
    found = network(place, more={"cluster": {"interface": "eth1"}})
    assert (found.interface, found.node_ip, found.reason) == ("eth1", "192.168.7.5", "cluster.interface")


@pytest.mark.parametrize("place", [ONE, master(1, "10.1.0.7")])
@pytest.mark.parametrize(("name", "said"), [("eth9", "eth9 is not there"), ("eth2", "eth2 has no IPv4 address")])
def test_an_interface_that_cannot_be_used_names_those_that_can(place: Place, name: str, said: str) -> None:
    with pytest.raises(UserError) as caught:
        network(place, more={"cluster": {"interface": name}})
    assert said in str(caught.value)
    assert "eth0 (10.1.0.5)" in str(caught.value)


# -- several nodes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("place", "known", "interface", "ip", "reason"),
    [
        pytest.param(master(1, "10.1.0.7"), names(), "eth0", "10.1.0.5", "the route to 10.1.0.7", id="an address"),
        pytest.param(master(1, "192.168.7.1"), names(), "eth1", "192.168.7.5", "route", id="another interface"),
        pytest.param(
            master(1, "dlc1-master-0"),
            names(dlc1_master_0="192.168.7.1"),
            "eth1",
            "192.168.7.5",
            "the route to dlc1-master-0 (192.168.7.1)",
            id="a name",
        ),
        pytest.param(master(0, "m"), names(m="192.168.7.5"), "eth1", "192.168.7.5", "address (m)", id="the master"),
        pytest.param(master(0, "m"), names(m="10.96.0.9"), "eth0", "10.1.0.5", "route to m", id="a service's address"),
        pytest.param(master(0, "localhost"), names(localhost="127.0.0.1"), "eth0", "10.1.0.5", "other", id="lo"),
        pytest.param(master(0, "m"), names(m="172.17.0.1"), "eth0", "10.1.0.5", "other networks", id="docker's bridge"),
        pytest.param(master(1, "m"), names(), "eth0", "10.1.0.5", "m cannot be resolved yet", id="not there yet"),
        pytest.param(master(1, "m"), names(m="fd00::1"), "eth0", "10.1.0.5", "m cannot be resolved", id="IPv6 only"),
        pytest.param(
            listed(0, "a", "me@b"), names(a="127.0.1.1", b="192.168.7.9"), "eth1", "192.168.7.5", "to b (", id="Debian"
        ),
        pytest.param(
            listed(0, "a", "b"), names(a="10.96.0.9", b="192.168.7.9"), "eth1", "192.168.7.5", "to b (", id="service"
        ),
        pytest.param(listed(1, "10.1.0.7", "192.168.7.5"), names(), "eth1", "192.168.7.5", "this node's", id="named"),
        pytest.param(listed(2, "a", "b", "c"), names(b="192.168.7.9"), "eth1", "192.168.7.5", "to b", id="one there"),
        pytest.param(listed(None, "a", "b"), names(a="192.168.7.9"), "eth1", "192.168.7.5", "to a", id="a head"),
    ],
)  # fmt: skip
def test_which_interface(place: Place, known: Any, interface: str, ip: str, reason: str) -> None:
    found = network(place, known)
    assert (found.interface, found.node_ip) == (interface, ip)
    assert reason in found.reason


def test_without_any_route_the_first_interface_is_taken() -> None:
    found = network(master(0, "m"), names(), no_route)
    assert (found.interface, found.node_ip) == ("eth0", "10.1.0.5")
    assert "the first interface with an address" in found.reason


def test_a_node_that_nobody_can_reach_is_refused() -> None:
    with pytest.raises(UserError, match=r"no interface of this node has an IPv4 address .*\(interfaces: lo\)"):
        choose_network(config(), host(nics=NICS[-1:]), master(0, "m"), names(), no_route)


@pytest.mark.parametrize("address", ["127.0.0.1", "10.1.0.5", "here"])
def test_two_nodes_that_both_believe_to_be_the_master_are_told(address: str) -> None:
    known = names(here="127.0.1.1 192.168.7.5")
    with pytest.raises(UserError) as caught:
        network(master(1, address), known)
    assert "this is node 1 (RANK=1)" in str(caught.value)
    assert f"at {address}, which is this machine itself" in str(caught.value)
    assert network(master(0, address), known).node_ip != "127.0.0.1"


def test_the_hosts_are_shown_by_their_addresses_where_these_are_known() -> None:
    found = network(listed(2, "a", "root@b", "10.1.0.5", "d"), names(a="10.1.0.9 10.1.0.10 fe80::1", b="10.1.0.2"))
    assert found.nodes == ("10.1.0.9", "10.1.0.2", "10.1.0.5", "d")
    assert found.unresolved == ("d",)
    assert found.master_addr == "10.1.0.9", "as numbers: 10.1.0.10 is the greater one"


def test_the_masters_name_is_kept_until_it_resolves() -> None:
    found = network(master(1, "dlc1-master-0"))
    assert (found.master_addr, found.unresolved, found.nodes) == ("dlc1-master-0", ("dlc1-master-0",), ())
    assert network(master(0, "dlc1-master-0")).master_addr == "10.1.0.5"
