"""Interface and addresses. One node: everything stays on the loopback. Several: what the others reach this node by.

A name that does not resolve is no error here: on Kubernetes the master's record comes with its pod. It is named in
`Network.unresolved`, and a start waits for it.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from launcher.config.models import JobConfig
from launcher.errors import UserError
from launcher.host.facts import HostFacts
from launcher.host.routes import NoRouteError, Route, interface_to
from launcher.plan.environment import Network
from launcher.platforms.outside import resolve_names
from launcher.platforms.place import Place

Resolve = Callable[[Sequence[str]], Mapping[str, frozenset[str]]]
RouteTo = Callable[[str], Route]

# Of TEST-NET-1 (RFC 5737): nobody has it, and nothing is sent; the route to it is the one to other networks.
_ELSEWHERE = "192.0.2.1"
_OF_THIS_MACHINE_ONLY = ("loopback", "docker", "link-local")


def choose_network(
    config: JobConfig,
    facts: HostFacts,
    place: Place,
    resolve: Resolve = resolve_names,
    route_to: RouteTo = interface_to,
) -> Network:
    """`resolve`: all names at once, bounded, those without an address left out. `route_to`: an address's route.

    Raises UserError when the interface that job.yaml names does not exist or has no IPv4 address, when this is not
    node 0 and node 0's name means this machine, and when no interface has an IPv4 address.
    """
    if place.max_nodes == 1:
        return _one_node(config, facts)
    look = _Look(facts, place, ipv4_of(_names(place), resolve), route_to)
    found = _asked_interface(config, facts) or look.by_own_name() or look.by_route() or look.by_default_route()
    nodes = tuple(
        found.ip if rank == place.node_rank else next(iter(look.known.get(host, ())), host)
        for rank, host in enumerate(hosts_of(place))
    )
    master = found.ip if place.node_rank == 0 else next(iter(look.known.get(look.master, ())), look.master)
    return Network(found.interface, master, found.ip, found.reason, nodes, look.unresolved)


def hosts_of(place: Place) -> tuple[str, ...]:
    """The hosts in the order of node ranks, without the `user@` that is for ssh alone."""
    return tuple(host.rpartition("@")[2] for host in place.hosts)


@dataclass(frozen=True)
class _Found:
    interface: str
    ip: str
    reason: str


def _one_node(config: JobConfig, facts: HostFacts) -> Network:
    asked = _asked_interface(config, facts)
    if asked is not None:
        return Network(asked.interface, asked.ip, asked.ip, asked.reason)
    reason = "one node: the loopback reaches every rank, and no container bridge can be picked by mistake"
    best = _first_usable(facts)
    return Network("lo", "127.0.0.1", best[1] if best else "127.0.0.1", reason)


def _asked_interface(config: JobConfig, facts: HostFacts) -> _Found | None:
    name = config.cluster.interface
    if name == "auto":
        return None
    nic = facts.nic(name)
    if nic is None or not nic.ipv4:
        there = ", ".join(f"{n.name} ({', '.join(n.ipv4) or 'no IPv4 address'})" for n in facts.nics)
        what = "is not there" if nic is None else "has no IPv4 address"
        raise UserError(f"cluster.interface: {name} {what} on this node. It has: {there}. Use one of these, or auto.")
    return _Found(name, nic.ipv4[0], "cluster.interface")


@dataclass(frozen=True)
class _Look:
    """`known`: IPv4 addresses of each host that resolves, in an order that is the same on every node."""

    facts: HostFacts
    place: Place
    known: Mapping[str, tuple[str, ...]]
    route_to: RouteTo

    @property
    def master(self) -> str:
        hosts = hosts_of(self.place)
        return hosts[0] if hosts else self.place.master_addr or ""

    @property
    def unresolved(self) -> tuple[str, ...]:
        return tuple(name for name in _names(self.place) if name not in self.known)

    def by_own_name(self) -> _Found | None:
        """What the list of hosts, or MASTER_ADDR on node 0, says of this node: the others use the same list, and an
        address besides it would make two nodes of one. A name that means the loopback here says nothing."""
        hosts, rank = hosts_of(self.place), self.place.node_rank
        name = hosts[rank] if hosts and rank is not None and rank < len(hosts) else self.master if rank == 0 else None
        if name is None:
            return None
        own = {ip: nic.name for nic in self.facts.nics if nic.kind not in _OF_THIS_MACHINE_ONLY for ip in nic.ipv4}
        ip = next((ip for ip in self.known.get(name, ()) if ip in own), None)
        return None if ip is None else _Found(own[ip], ip, f"{ip} is this node's address" + f" ({name})" * (ip != name))

    def by_route(self) -> _Found | None:
        self._refuse_to_be_the_master()
        for name, ip in self._targets():
            try:
                route = self.route_to(ip)
            except NoRouteError:
                continue
            if route.interface != "lo":
                return _Found(route.interface, route.source_ip, f"the route to {name}" + f" ({ip})" * (ip != name))
        return None

    def by_default_route(self) -> _Found:
        """Nobody can be asked for yet; the first who connects shows whether this was right."""
        why = f"{' and '.join(self.unresolved[:2])} cannot be resolved yet; " if self.unresolved else ""
        try:
            route = self.route_to(_ELSEWHERE)
            if route.interface != "lo":
                return _Found(route.interface, route.source_ip, f"{why}the route to other networks")
        except NoRouteError:
            pass
        best = _first_usable(self.facts)
        if best is None:
            there = ", ".join(nic.name for nic in self.facts.nics) or "none"
            raise UserError(
                f"no interface of this node has an IPv4 address that other nodes could reach (interfaces: {there}). "
                f"Give it one, or name the interface: cluster.interface."
            )
        return _Found(*best, f"{why}the first interface with an address")

    def _targets(self) -> Iterator[tuple[str, str]]:
        """The master first; node 0 looks at the others."""
        rank = self.place.node_rank
        names = list(_names(self.place))
        if rank == 0:
            names = names[1:] + names[:1]
        for index, name in enumerate(names):
            if not (self.place.hosts and rank not in (0, None) and index == rank):
                yield from ((name, ip) for ip in self.known.get(name, ()))

    def _refuse_to_be_the_master(self) -> None:
        if self.place.node_rank in (0, None):
            return
        own = {ip for nic in self.facts.nics for ip in nic.ipv4}
        ips = self.known.get(self.master, ())
        if ips and all(ip in own or ipaddress.ip_address(ip).is_loopback for ip in ips):
            raise UserError(
                f"this is node {self.place.node_rank} ({self.place.shown_evidence}), but node 0 is said to be at "
                f"{self.master}, which is this machine itself ({', '.join(ips)}). Give every node the address of node "
                f"0 (MASTER_ADDR, or the first of cluster.hosts), and each its own index."
            )


def _names(place: Place) -> tuple[str, ...]:
    """Hosts in node order; without them the master alone."""
    return hosts_of(place) or ((place.master_addr,) if place.master_addr else ())


def ipv4_of(names: Sequence[str], resolve: Resolve = resolve_names) -> dict[str, tuple[str, ...]]:
    """Addresses of the names that have any, in an order that is the same on every node. Bounded, all at once."""
    literal = {name: (name,) for name in names if _is_ipv4(name)}
    resolved = resolve([name for name in names if name not in literal]) if len(literal) < len(names) else {}
    # Sorted as numbers: every node that asks the same name server takes the same one first.
    sets = {name: tuple(sorted(filter(_is_ipv4, ips), key=ipaddress.IPv4Address)) for name, ips in resolved.items()}
    return literal | {name: ips for name, ips in sets.items() if ips}


def _is_ipv4(text: str) -> bool:
    try:
        ipaddress.IPv4Address(text)
    except ValueError:
        return False
    return True


def _first_usable(facts: HostFacts) -> tuple[str, str] | None:
    for kind in ("ethernet", "infiniband", "other"):
        for nic in facts.nics:
            if nic.kind == kind and nic.up and nic.ipv4:
                return nic.name, nic.ipv4[0]
    return None
