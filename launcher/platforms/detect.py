"""Where am I: which platform started this process, how many nodes it counts, and which variables say so.

Invariant: a place is never guessed. job.yaml wins over the platform; where job.yaml and the platform, or two platforms,
contradict each other, both are named and nothing starts. The table is in `table.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from launcher.errors import UserError
from launcher.platforms.nesting import refuse_nesting
from launcher.platforms.nodelist import read_hostfile
from launcher.platforms.place import Asked, Nodes, Outside, Place, Sight, show_nodes
from launcher.platforms.readers import index_of_this_machine
from launcher.platforms.row import Platform
from launcher.platforms.table import BY_HAND, PLATFORMS
from launcher.platforms.told import told_place

__all__ = ["PLATFORMS", "Asked", "Outside", "Place", "Platform", "detect_place", "refuse_nesting"]

ONE_MACHINE = "one machine"
_HERE = frozenset({"localhost", "127.0.0.1", "::1"})


def detect_place(environ: Mapping[str, str], asked: Asked | None = None, outside: Outside | None = None) -> Place:
    """The place of this process. Raises UserError where it is not certain, with both readings and the way out.

    `outside` gives access to files and names; without it only the environment is looked at.
    """
    told = told_place(environ)
    if told is not None:
        return told  # the head has looked, with what job.yaml asks for
    sight = Sight(environ, asked or Asked(), outside or Outside())
    place = _listed(sight) if sight.asked.hosts or sight.asked.hostfile else _found(sight)
    return _with_what_is_asked(place, sight.asked)


def _found(sight: Sight) -> Place:
    rows = [row for row in PLATFORMS if row.is_here(sight.environ)]
    places = [row.place(sight) for row in rows]
    for place in places[1:]:
        if (place.num_nodes, place.node_rank) != (places[0].num_nodes, places[0].node_rank):
            raise UserError(
                f"two platforms are recognised, and they disagree: {_said(places[0])}; {_said(place)}. Unset the "
                f"variables of the one that is not meant, or name the hosts in cluster.hosts."
            )
    place = places[0] if places else _unknown(sight)
    if place.node_rank is not None and place.node_rank >= place.max_nodes:
        raise UserError(
            f"{place.platform} ({place.shown_evidence}): this would be node {place.node_rank}, counted from 0, "
            f"of {place.max_nodes}: one of the two is wrong"
        )
    _refuse_contradiction(place, sight.asked)
    return place


def _said(place: Place) -> str:
    which = "a launcher" if place.node_rank is None else f"node {place.node_rank}"
    return f"{place.platform} says {which} of {place.shown_nodes} ({place.shown_evidence})"


def _unknown(sight: Sight) -> Place:
    """A world that no known platform explains: every node would start a run of its own in the same folder."""
    environ, asked = sight.environ, sight.asked.num_nodes
    world_size = environ.get("WORLD_SIZE", "")
    if asked is not None and asked != 1:
        if BY_HAND.is_here(environ):
            return BY_HAND.place(sight)
        raise UserError(
            f"cluster.nodes asks for {show_nodes(asked)} nodes, but no platform that ftlaunch knows is recognised, and "
            f"job.yaml names no hosts. Write cluster.hosts: [HOST, ...]; or set MASTER_ADDR and NODE_RANK in each "
            f"node's environment. docs/platforms.md lists the variables that are looked for."
        )
    if world_size.isdigit() and int(world_size) > 1 and asked is None:
        raise UserError(
            f"WORLD_SIZE={world_size} is set, but no platform that ftlaunch knows is recognised: it may count nodes "
            f"(DLC, KubeDL) or processes (Kubeflow PyTorchJob). If this is one machine by itself, unset WORLD_SIZE and "
            f"RANK, or write cluster.nodes: 1; if it is one of several nodes, write their number there. "
            f"docs/platforms.md lists the variables that are looked for."
        )
    return Place(ONE_MACHINE, 1, 0)


def _refuse_contradiction(place: Place, asked: Asked) -> None:
    """What job.yaml asks for wins where the platform can give it. Else some nodes would wait for others that never
    come, or start a run of their own."""
    if asked.num_nodes is None or place.platform in (ONE_MACHINE, BY_HAND.name):
        return
    fewest, most = asked.num_nodes if isinstance(asked.num_nodes, tuple) else (asked.num_nodes, asked.num_nodes)
    if fewest <= place.max_nodes <= most:
        return
    raise UserError(
        f"{place.platform} has started {place.shown_nodes} nodes ({place.shown_evidence}), cluster.nodes asks for "
        f"{show_nodes(asked.num_nodes)}. Submit the job with as many nodes as cluster.nodes says, or leave "
        f"cluster.nodes out: then the platform's number counts."
    )


def _with_what_is_asked(place: Place, asked: Asked) -> Place:
    evidence = place.evidence
    if asked.num_nodes is not None and not place.hosts and place.platform != ONE_MACHINE:
        evidence = (*evidence, ("cluster.nodes", show_nodes(asked.num_nodes)))
    return replace(
        place,
        evidence=evidence,
        num_nodes=place.num_nodes if asked.num_nodes is None else asked.num_nodes,
        num_ranks_per_node=asked.num_ranks_per_node or place.num_ranks_per_node,
    )


# -- hosts that job.yaml names -----------------------------------------------------------------------------------------


def _listed(sight: Sight) -> Place:
    asked = sight.asked
    hosts, slots = asked.hosts, None
    evidence: tuple[tuple[str, str], ...] = (("cluster.hosts", ", ".join(hosts)),)
    if asked.hostfile is not None:
        text = sight.outside.read_text(asked.hostfile)
        if text is None:
            why = sight.outside.why_unreadable(asked.hostfile)
            raise UserError(
                f"cluster.hostfile: {asked.hostfile}: {why}. Give the path of a file with a line HOST slots=N for each "
                f"machine, which this machine can read."
            )
        lines = read_hostfile(text, asked.hostfile)
        hosts, slots = tuple(host for host, _ in lines), _common_slots(lines, asked)
        evidence = (("hostfile", asked.hostfile),)
    addresses = tuple(host.rpartition("@")[2] for host in hosts)
    most = asked.num_nodes[1] if isinstance(asked.num_nodes, tuple) else asked.num_nodes or 1
    if most > len(hosts):
        raise UserError(
            f"cluster.nodes asks for {show_nodes(asked.num_nodes or 1)} nodes, but {asked.hostfile or 'cluster.hosts'} "
            f"names {len(hosts)}: {', '.join(hosts)}. Add the missing hosts, or write cluster.nodes: "
            f"{show_nodes(_at_most(len(hosts), asked.num_nodes))}."
        )
    if asked.num_nodes == 1 < len(hosts):
        raise UserError(
            f"cluster.nodes asks for 1 node, but {asked.hostfile or 'cluster.hosts'} names {len(hosts)}: "
            f"{', '.join(hosts)}. Name the one that is meant, or leave cluster.nodes out: then all are."
        )
    rank = _own_index(addresses, sight)
    if rank is None:
        _refuse_a_stranger(addresses, sight)
    return Place(
        platform="cluster.hosts" if asked.hostfile is None else "hostfile",
        num_nodes=len(hosts),
        node_rank=rank,
        num_ranks_per_node=slots,
        master_addr=addresses[0],
        hosts=hosts,
        evidence=evidence,
    )


def _at_most(num_hosts: int, asked: Nodes | None) -> Nodes:
    """(1, 2) of (1, 3) where two hosts are named."""
    return (asked[0], num_hosts) if isinstance(asked, tuple) and asked[0] < num_hosts else num_hosts


def _common_slots(lines: Sequence[tuple[str, int | None]], asked: Asked) -> int | None:
    """Ranks of each node, as DeepSpeed reads them; all nodes train with equally many."""
    counts = {count for _, count in lines}
    if len(counts) > 1 and asked.num_ranks_per_node is None:
        said = ", ".join(f"{host} slots={count or 'none'}" for host, count in lines)
        raise UserError(
            f"the hostfile {asked.hostfile} gives its hosts different numbers of slots ({said}); every node trains "
            f"with the same number of ranks. Write that number into each line, or set cluster.nproc_per_node."
        )
    return counts.pop() if len(counts) == 1 else None


def _own_index(addresses: tuple[str, ...], sight: Sight) -> int | None:
    if len(addresses) > 1 and (loops := _HERE.intersection(addresses)):
        raise UserError(
            f"cluster.hosts names {', '.join(sorted(loops))}, which is another machine on each of them: write an "
            f"address that the others reach"
        )
    here = sight.names | (_HERE if len(addresses) == 1 else frozenset())
    index = index_of_this_machine(addresses, here)
    if index is not None:
        return index
    resolved = sight.outside.resolve(addresses)
    own = here - _HERE
    mine = [index for index, host in enumerate(addresses) if host in own or resolved.get(host, frozenset()) & own]
    if len(mine) > 1:
        raise UserError(
            f"cluster.hosts: {' and '.join(addresses[index] for index in mine)} are both this machine; name each "
            f"machine once"
        )
    return mine[0] if mine else None


def _refuse_a_stranger(addresses: tuple[str, ...], sight: Sight) -> None:
    """A head outside the list is right on bare machines; a platform that starts every node would have many heads."""
    for row in PLATFORMS:
        if row.is_here(sight.environ):
            seen = ", ".join(f"{name}={value}" for name, value in row.evidence(sight.environ))
            raise UserError(
                f"this machine ({', '.join(sorted(sight.names))}) is none of cluster.hosts ({', '.join(addresses)}), "
                f"but {row.name} has started it ({seen}). Remove cluster.hosts: then the platform's nodes count; or "
                f"name this machine there."
            )
