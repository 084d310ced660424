"""Which interface leads to another node: the one whose address that node will see, as the kernel's routes say."""

from __future__ import annotations

import ipaddress
import socket
from dataclasses import dataclass
from typing import Any

from launcher.host.bounded import within
from launcher.host.nics import read_nics

RESOLVE_WITHIN_S = 5.0
ANY_PORT = 9  # "discard": connecting a UDP socket sends nothing, the kernel only chooses the route


class NoRouteError(OSError):
    """The address has no route, or its name no address. A caller may retry: peers may not have started yet."""


@dataclass(frozen=True)
class Route:
    interface: str
    source_ip: str
    destination_ip: str


def interface_to(addr: str, timeout_s: float = RESOLVE_WITHIN_S) -> Route:
    """The route to `addr` (name, IPv4 or IPv6). The first resolved address that has a route wins.

    Raises `NoRouteError` with the reason; never waits longer than `timeout_s`.
    """
    reasons = []
    for address in resolve(addr, timeout_s):
        try:
            source_ip = _source_address(address)
        except OSError as error:
            reasons.append(f"{address}: {error.strerror or error}")
            continue
        interface = interface_of(source_ip)
        if interface is not None:
            return Route(interface, source_ip.partition("%")[0], address)
        reasons.append(f"{address}: its source address {source_ip} belongs to no interface here")
    raise NoRouteError(f"no route to {addr} ({'; '.join(reasons)})")


def resolve(addr: str, timeout_s: float = RESOLVE_WITHIN_S) -> tuple[str, ...]:
    """Addresses of a name, in the resolver's order. Raises `NoRouteError` where there is none within `timeout_s`."""
    host = addr.strip("[]")
    try:
        answers = within(
            timeout_s, lambda: socket.getaddrinfo(host, ANY_PORT, type=socket.SOCK_DGRAM), f"resolving {addr}"
        )
    except (OSError, UnicodeError) as error:  # UnicodeError: a label that is empty or longer than 63 characters
        raise NoRouteError(f"the name {addr} cannot be resolved: {error}") from error
    return tuple(dict.fromkeys(_scoped(answer[4]) for answer in answers))


def interface_of(ip: str) -> str | None:
    """The interface that holds the address `ip` (IPv6 link-local ones with their `%scope`)."""
    if "%" in ip:
        return ip.partition("%")[2]
    wanted = ipaddress.ip_address(ip)
    if wanted.is_loopback:
        return "lo"
    holders = (nic.name for nic in read_nics() if any(ipaddress.ip_address(a) == wanted for a in nic.addresses))
    return next(holders, None)


def _source_address(address: str) -> str:
    family, _, _, _, target = socket.getaddrinfo(
        address, ANY_PORT, type=socket.SOCK_DGRAM, flags=socket.AI_NUMERICHOST
    )[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(target)
        return _scoped(probe.getsockname())


def _scoped(socket_address: tuple[Any, ...]) -> str:
    """`ip`, or `ip%interface` for IPv6 addresses that mean something on one link only."""
    ip = str(socket_address[0]).partition("%")[0]
    scope = int(socket_address[3]) if len(socket_address) == 4 else 0
    return f"{ip}%{socket.if_indextoname(scope)}" if scope else ip
