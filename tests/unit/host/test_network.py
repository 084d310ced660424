"""Interfaces and routes: kinds from names and addresses, the rest in a network namespace of its own."""

from __future__ import annotations

import json
import socket
import threading
import time

import pytest

from launcher.host import routes
from launcher.host.bounded import within
from launcher.host.nics import ARPHRD_ETHER, ARPHRD_INFINIBAND, ARPHRD_LOOPBACK, kind_of
from tests.unit.host.namespaces import InNamespace

INTERFACES = (
    "mount -t sysfs sysfs /sys",  # the one inherited shows the interfaces outside
    "ip link set lo up",
    "for nic in eth0 eth1 docker0; do ip link add $nic type veth peer name peer-$nic; ip link set peer-$nic up; done",
    "ip addr add 10.1.0.5/24 dev eth0 && ip addr add fd00:1::5/64 dev eth0 nodad && ip link set eth0 up mtu 9000",
    "ip addr add 10.2.0.5/24 dev eth1 && ip link set eth1 up",
    "ip addr add 172.17.0.1/16 dev docker0 && ip link set docker0 up",
    "ip link add eth2 type veth peer name peer-eth2",
    "ip route add 10.9.0.0/16 via 10.2.0.1",
)


@pytest.mark.parametrize(
    ("name", "hardware", "addresses", "kind"),
    [
        ("lo", ARPHRD_LOOPBACK, ["127.0.0.1", "::1"], "loopback"),
        ("eth0", ARPHRD_ETHER, ["10.0.0.1", "fe80::1"], "ethernet"),
        ("eth0", ARPHRD_ETHER, [], "ethernet"),
        ("ib0", ARPHRD_INFINIBAND, ["10.1.0.1"], "infiniband"),
        ("docker0", ARPHRD_ETHER, ["172.17.0.1"], "docker"),
        ("br-0123456789ab", ARPHRD_ETHER, ["172.18.0.1"], "docker"),
        ("br-ex", ARPHRD_ETHER, ["10.0.0.1"], "ethernet"),
        ("cali12345", ARPHRD_ETHER, ["fe80::1"], "docker"),
        ("eth3", ARPHRD_ETHER, ["169.254.7.1", "fe80::1"], "link-local"),
        ("tun0", None, ["10.8.0.1"], "other"),
    ],
)
def test_kinds(name: str, hardware: int | None, addresses: list[str], kind: str) -> None:
    assert kind_of(name, hardware, addresses) == kind


@pytest.mark.root
def test_interfaces_of_a_namespace(in_namespace: InNamespace) -> None:
    code = """
import dataclasses, json
from launcher.host.nics import read_nics
from tests.unit.host.namespaces import InNamespace
print(json.dumps({nic.name: dataclasses.asdict(nic) for nic in read_nics()}))
"""
    nics = json.loads(in_namespace(code, *INTERFACES))
    assert {name: nic["kind"] for name, nic in nics.items() if name in ("lo", "eth0", "docker0")} == {
        "lo": "loopback",
        "eth0": "ethernet",
        "docker0": "docker",
    }
    assert nics["eth0"]["ipv4"] == ["10.1.0.5"]
    assert "fd00:1::5" in nics["eth0"]["ipv6"]
    assert nics["eth0"]["mtu"] == 9000
    assert (nics["eth1"]["up"], nics["eth2"]["up"]) == (True, False)


@pytest.mark.root
def test_the_interface_is_the_one_of_the_route(in_namespace: InNamespace) -> None:
    code = """
import json
import socket
from launcher.host.routes import NoRouteError, interface_to
answers = {}
for address in ("10.1.0.9", "10.9.3.3", "10.2.0.5", "fd00:1::9", "[fd00:1::9]", "127.0.0.1", "10.77.0.1"):
    try:
        route = interface_to(address)
        answers[address] = [route.interface, route.source_ip]
    except NoRouteError as error:
        answers[address] = str(error)
print(json.dumps(answers))
"""
    answers = json.loads(in_namespace(code, *INTERFACES))
    assert answers == {
        "10.1.0.9": ["eth0", "10.1.0.5"],
        "10.9.3.3": ["eth1", "10.2.0.5"],  # behind a gateway
        "10.2.0.5": ["eth1", "10.2.0.5"],  # this node's own address: the interface that holds it
        "fd00:1::9": ["eth0", "fd00:1::5"],
        "[fd00:1::9]": ["eth0", "fd00:1::5"],
        "127.0.0.1": ["lo", "127.0.0.1"],
        "10.77.0.1": "no route to 10.77.0.1 (10.77.0.1: Network is unreachable)",
    }


def test_localhost_by_name() -> None:
    assert routes.interface_to("localhost").interface == "lo"


@pytest.mark.parametrize("name", ["a..b", ""])
def test_a_name_that_is_none_is_no_route(name: str) -> None:
    with pytest.raises(routes.NoRouteError, match="cannot be resolved"):
        routes.resolve(name)


def test_a_resolver_that_never_answers_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    released = threading.Event()

    def never(*_: object, **__: object) -> list[object]:
        released.wait(30)
        return []

    monkeypatch.setattr(socket, "getaddrinfo", never)
    begin = time.monotonic()
    with pytest.raises(routes.NoRouteError, match=r"resolving master-0 gave no answer within 0\.1 s"):
        routes.resolve("master-0", timeout_s=0.1)
    assert time.monotonic() - begin < 5
    released.set()


def test_within_hands_back_the_value_or_the_error() -> None:
    assert within(5, lambda: 7, "seven") == 7
    with pytest.raises(ZeroDivisionError):
        within(5, lambda: 1 // 0, "nothing")
