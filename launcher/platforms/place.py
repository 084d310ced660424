"""What is found (`Place`), what job.yaml asks for (`Asked`), and what is looked at (`Sight`): plain frozen data."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

Nodes = int | tuple[int, int]  # a fixed number, or (fewest, most) where nodes may come and go


@dataclass(frozen=True)
class Place:
    """Where this process runs, and the variables (name, value) that say so.

    `node_rank` is None where this process is none of the nodes but only starts them: the launcher pod of an MPIJob, a
    head outside `cluster.hosts`. `num_ranks_per_node`, `master_addr`, `master_port` are None, `hosts` is empty, where
    nobody has said. `hosts` is in the order of node ranks. `master_addr` may be a DNS name that does not resolve yet:
    on Kubernetes its record comes with the master's pod.
    """

    platform: str
    num_nodes: Nodes
    node_rank: int | None
    num_ranks_per_node: int | None = None
    master_addr: str | None = None
    master_port: int | None = None
    hosts: tuple[str, ...] = ()
    evidence: tuple[tuple[str, str], ...] = ()

    @property
    def min_nodes(self) -> int:
        return self.num_nodes[0] if isinstance(self.num_nodes, tuple) else self.num_nodes

    @property
    def max_nodes(self) -> int:
        return self.num_nodes[1] if isinstance(self.num_nodes, tuple) else self.num_nodes

    @property
    def shown_nodes(self) -> str:
        """`4` or `2:4`, as job.yaml writes it."""
        return show_nodes(self.num_nodes)

    @property
    def shown_evidence(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in self.evidence)


@dataclass(frozen=True)
class Asked:
    """What job.yaml says about the cluster; None or empty for what it leaves to ftlaunch. What it says wins."""

    num_nodes: Nodes | None = None
    hosts: tuple[str, ...] = ()
    hostfile: str | None = None
    num_ranks_per_node: int | None = None


def _nothing_there(path: str) -> str | None:
    return None


def _no_reason(path: str) -> str:
    return "it cannot be read"


def _resolves_nothing(names: Sequence[str]) -> Mapping[str, frozenset[str]]:
    return {}


@dataclass(frozen=True)
class Outside:
    """Where detection looks beyond the environment; `launcher/platforms/outside.py` has the real one.

    `names`: host name and addresses of this machine. `read_text`: a file's text, None where it cannot be read;
    `why_unreadable`: the reason then, in words.
    `resolve`: host name -> its addresses, without those that do not resolve in time. `scontrol`: a Slurm node list
    expanded by Slurm itself, one host a line; None where that does not work.
    """

    names: frozenset[str] = frozenset()
    read_text: Callable[[str], str | None] = _nothing_there
    resolve: Callable[[Sequence[str]], Mapping[str, frozenset[str]]] = _resolves_nothing
    scontrol: Callable[[str], str | None] = _nothing_there
    why_unreadable: Callable[[str], str] = _no_reason


@dataclass(frozen=True)
class Sight:
    """All that detection looks at."""

    environ: Mapping[str, str]
    asked: Asked = field(default_factory=Asked)
    outside: Outside = field(default_factory=Outside)

    @property
    def names(self) -> frozenset[str]:
        """Names and addresses of this machine; in a pod HOSTNAME is the pod's name."""
        hostname = self.environ.get("HOSTNAME")
        return self.outside.names | ({hostname} if hostname else frozenset())


def show_nodes(nodes: Nodes) -> str:
    return f"{nodes[0]}:{nodes[1]}" if isinstance(nodes, tuple) else str(nodes)


def show_environ(environ: Mapping[str, str], *names: str) -> str:
    """`A=1, B=2` of those that are set."""
    return ", ".join(f"{name}={environ[name]}" for name in names if name in environ)
