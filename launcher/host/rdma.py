"""RDMA devices of this node as sysfs shows them: ports, and the table of GIDs that RoCE addresses are chosen from."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/")


@dataclass(frozen=True)
class Gid:
    index: int
    address: str  # as sysfs writes it: fe80:0000:...
    kind: str  # "RoCE v2", "IB/RoCE v1"; empty where the kernel does not say
    interface: str

    @property
    def ipv4(self) -> str | None:
        """The IPv4 address of a mapped GID (::ffff:a.b.c.d)."""
        try:
            mapped = ipaddress.IPv6Address(self.address).ipv4_mapped
        except ValueError:
            return None
        return str(mapped) if mapped else None


@dataclass(frozen=True)
class RdmaPort:
    device: str
    port: int
    is_active: bool
    link_layer: str  # "Ethernet" (RoCE, eRDMA) or "InfiniBand"
    rate: str  # "200 Gb/sec (4X HDR)"
    gids: tuple[Gid, ...]


@dataclass(frozen=True)
class Rdma:
    """`verbs`: device files that a program opens; none in a container that was not given them."""

    ports: tuple[RdmaPort, ...]
    verbs: tuple[str, ...]


def read_rdma_ports(root: Path = ROOT) -> Rdma:
    ports = []
    for device in _entries(root / "sys/class/infiniband"):
        for port in _entries(device / "ports"):
            ports.append(
                RdmaPort(
                    device=device.name,
                    port=int(port.name) if port.name.isdigit() else 0,
                    is_active="ACTIVE" in _read(port / "state"),
                    link_layer=_read(port / "link_layer"),
                    rate=_read(port / "rate"),
                    gids=tuple(_gids(port)),
                )
            )
    verbs = tuple(entry.name for entry in _entries(root / "dev/infiniband") if entry.name.startswith("uverbs"))
    return Rdma(tuple(ports), verbs)


def best_gid(port: RdmaPort) -> Gid | None:
    """RoCE v2 over IPv4 is what routers pass; then RoCE v2 over IPv6 that is not link-local."""
    second = [gid for gid in port.gids if gid.kind.endswith("v2")]
    routable = [gid for gid in second if not gid.address.startswith("fe80")]
    return next((gid for gid in second if gid.ipv4), routable[0] if routable else None)


def _gids(port: Path) -> Iterator[Gid]:
    for entry in sorted(_entries(port / "gids"), key=lambda path: int(path.name) if path.name.isdigit() else 0):
        address = _read(entry)
        if address and set(address) - set("0:"):  # an empty row is all zeros
            attributes = port / "gid_attrs"
            kind, interface = _read(attributes / "types" / entry.name), _read(attributes / "ndevs" / entry.name)
            yield Gid(int(entry.name), address, kind, interface)


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
