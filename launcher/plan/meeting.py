"""Where and how the agents of several nodes meet: name and address of this node, where others may be found, bounds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from launcher.cluster.model import Timing, Wanted
from launcher.config.models import JobConfig
from launcher.errors import UserError
from launcher.plan.environment import Network
from launcher.plan.network import hosts_of
from launcher.platforms.place import Place

TOKEN_VARIABLE = "FTLAUNCH_TOKEN"
DEFAULT_AGENT_PORT = 29430
# Of spot.grace_seconds, for the agent's own end after the agreed save: telling the others, a last flush.
_MARGIN_S, _MARGIN_SHARE = 5.0, 0.2

TokenSource = Literal["job.yaml", "FTLAUNCH_TOKEN", "output folder"]


@dataclass(frozen=True)
class Meeting:
    """One node's view of the meeting; nothing is resolved, nothing listens yet.

    seeds: (host, port) in the order of node ranks: every host where they are known, else the master alone. `own_seed`
    is this node's place among them, None where it is not there. What a seed's name means is found out by the start,
    but for the own one: it is `host_ip`, whatever name server says (`localhost`, a service's virtual address).
    """

    name: str
    host_ip: str
    agent_port: int
    port_reason: str
    seeds: tuple[tuple[str, int], ...]
    own_seed: int | None
    wanted: Wanted
    timing: Timing
    token_source: TokenSource

    @property
    def address(self) -> str:
        return f"{self.host_ip}:{self.agent_port}"

    @property
    def awaited_names(self) -> tuple[str, ...]:
        """Hosts of the seeds without this node: what a start has to resolve."""
        return tuple(host for index, (host, _) in enumerate(self.seeds) if index != self.own_seed)

    def seed_addresses(self, found: Mapping[str, str]) -> tuple[str, ...]:
        """`IPv4:port` of the seeds in their order; `found`: IPv4 of the names that resolve, the others are left out."""
        ips = (self.host_ip if i == self.own_seed else found.get(host) for i, (host, _) in enumerate(self.seeds))
        both = zip(ips, self.seeds, strict=True)
        return tuple(dict.fromkeys(f"{ip}:{port}" for ip, (_, port) in both if ip is not None))


def node_name(place: Place) -> str:
    """`n<node rank>`, on every platform. A head that is no node has none."""
    return "head" if place.node_rank is None else f"n{place.node_rank}"


def plan_meeting(config: JobConfig, place: Place, network: Network, environ: Mapping[str, str]) -> Meeting:
    """For a node of several. Raises UserError where nothing says where another node may be found."""
    hosts = hosts_of(place)
    names = hosts or ((place.master_addr,) if place.master_addr else ())
    if not names:
        raise UserError(
            f"{place.platform} ({place.shown_evidence}) says that there are {place.shown_nodes} nodes, but not where: "
            f"set MASTER_ADDR to the address of node 0 on each of them, or name them in cluster.hosts"
        )
    port, reason = agent_port(config, place)
    rank = place.node_rank
    return Meeting(
        name=node_name(place),
        host_ip=network.node_ip,
        agent_port=port,
        port_reason=reason,
        seeds=tuple((name, port) for name in names),
        own_seed=rank if rank is not None and rank < len(names) else None,
        wanted=Wanted(place.min_nodes, place.max_nodes),
        timing=plan_timing(config, place.max_nodes),
        token_source=token_source(config, environ),
    )


def agent_port(config: JobConfig, place: Place) -> tuple[int, str]:
    """The port, the same on every node, and why. The platform's MASTER_PORT first: a service of Kubernetes may let
    through no other. It goes to the agents and not to the ranks, whose port changes with every attempt."""
    cluster = config.cluster
    if cluster.agent_port is not None:
        if cluster.agent_port == cluster.master_port:
            raise UserError(
                f"cluster.agent_port and cluster.master_port are both {cluster.agent_port}: the agents and the ranks "
                f"cannot listen on one port. Leave out cluster.master_port: a free one is taken."
            )
        return cluster.agent_port, "cluster.agent_port"
    if place.master_port is not None and place.master_port != cluster.master_port:
        return place.master_port, f"MASTER_PORT of {place.platform}"
    if cluster.master_port == DEFAULT_AGENT_PORT:
        return DEFAULT_AGENT_PORT + 1, f"the next after cluster.master_port {DEFAULT_AGENT_PORT}"
    return DEFAULT_AGENT_PORT, "default"


def plan_timing(config: JobConfig, num_nodes: int) -> Timing:
    """Bounds from job.yaml; heartbeats, silence and votes are membership's own.

    gather_s is at most half of what a node waits in all, or it would give up before it stops gathering. pause_s leaves
    the agent some of spot.grace_seconds for its own end.
    """
    wait_s, grace_s = float(config.cluster.wait_seconds), float(config.spot.grace_seconds)
    return Timing(
        gather_s=min(float(config.cluster.gather_seconds), wait_s / 2),
        bound_s=wait_s,
        pause_s=grace_s - min(_MARGIN_S, _MARGIN_SHARE * grace_s),
    ).of_size(num_nodes)


def token_source(config: JobConfig, environ: Mapping[str, str]) -> TokenSource:
    """Where the run's token comes from; the token itself is in no plan."""
    if config.cluster.token is not None:
        return "job.yaml"
    return "FTLAUNCH_TOKEN" if environ.get(TOKEN_VARIABLE, "").strip() else "output folder"
