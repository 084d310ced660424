"""Interface and addresses for one node: everything stays on the loopback, unless job.yaml names an interface."""

from __future__ import annotations

from launcher.config.models import JobConfig
from launcher.errors import UserError
from launcher.host.facts import HostFacts
from launcher.plan.environment import Network


def choose_network(config: JobConfig, facts: HostFacts) -> Network:
    """Raises UserError when the interface that job.yaml names does not exist or has no IPv4 address."""
    node_ip = _address_for_hostfile(facts)
    if config.cluster.interface == "auto":
        reason = "one node: the loopback reaches every rank, and no container bridge can be picked by mistake"
        return Network("lo", "127.0.0.1", node_ip, reason)
    name = config.cluster.interface
    nic = facts.nic(name)
    if nic is None or not nic.ipv4:
        there = ", ".join(f"{n.name} ({', '.join(n.ipv4) or 'no IPv4 address'})" for n in facts.nics)
        what = "is not there" if nic is None else "has no IPv4 address"
        raise UserError(f"cluster.interface: {name} {what} on this node. It has: {there}. Use one of these, or auto.")
    return Network(name, nic.ipv4[0], nic.ipv4[0], "cluster.interface")


def _address_for_hostfile(facts: HostFacts) -> str:
    for kind in ("ethernet", "infiniband", "other"):
        for nic in facts.nics:
            if nic.kind == kind and nic.up and nic.ipv4:
                return nic.ipv4[0]
    return "127.0.0.1"
