"""Network interfaces and RDMA devices of this node, and which interfaces other nodes can possibly reach."""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil  # type: ignore[import-untyped,unused-ignore]  # stubs are a package of their own

ROOT = Path("/")
NicKind = Literal["loopback", "docker", "link-local", "ethernet", "infiniband", "other"]

# Bridges and tunnels that container engines and CNI plug-ins make; their addresses exist on this host only.
# A plain bridge such as br0 or br-ex may carry the host's own address and is not one of them.
CONTAINER_BRIDGE = re.compile(
    r"(docker\d|docker_gwbridge|br-[0-9a-f]{12}|podman\d|cni\d|cni-|cbr\d|virbr\d|lxcbr\d|lxdbr\d"
    r"|flannel\.|cali|vxlan\.calico|tunl\d|kube-ipvs|kube-bridge|nodelocaldns|cilium_|weave)"
)

ARPHRD_ETHER, ARPHRD_INFINIBAND, ARPHRD_LOOPBACK = 1, 32, 772  # <linux/if_arp.h>, as /sys/class/net/*/type says


@dataclass(frozen=True)
class Nic:
    name: str
    up: bool
    mtu: int
    speed_mbps: int | None  # None where the driver does not say (most virtual interfaces)
    ipv4: tuple[str, ...]
    ipv6: tuple[str, ...]
    kind: NicKind

    @property
    def addresses(self) -> tuple[str, ...]:
        return self.ipv4 + self.ipv6


def read_nics(root: Path = ROOT) -> tuple[Nic, ...]:
    """All interfaces, by name; none where the kernel does not tell (some sandboxes)."""
    try:
        addresses, stats = psutil.net_if_addrs(), psutil.net_if_stats()
    except OSError:
        return ()
    nics = []
    for name in sorted(addresses.keys() | stats.keys()):
        here = addresses.get(name, [])
        ipv4 = tuple(entry.address for entry in here if entry.family == socket.AF_INET)
        ipv6 = tuple(entry.address.partition("%")[0] for entry in here if entry.family == socket.AF_INET6)
        state = stats.get(name)
        nics.append(
            Nic(
                name=name,
                up=state is not None and state.isup,
                mtu=state.mtu if state else 0,
                speed_mbps=(state.speed or None) if state else None,
                ipv4=ipv4,
                ipv6=ipv6,
                kind=kind_of(name, _hardware_type(name, root), ipv4 + ipv6),
            )
        )
    return tuple(nics)


def read_rdma(root: Path = ROOT) -> tuple[str, ...]:
    """Names of RDMA devices, e.g. `mlx5_0` or `erdma_0`."""
    try:
        return tuple(sorted(entry.name for entry in (root / "sys/class/infiniband").iterdir()))
    except OSError:
        return ()


def kind_of(name: str, hardware_type: int | None, addresses: Iterable[str]) -> NicKind:
    """What other nodes can do with the interface. `hardware_type` is an ARPHRD number, None where unknown."""
    parsed = [ipaddress.ip_address(address) for address in addresses]
    if hardware_type == ARPHRD_LOOPBACK or name == "lo" or (parsed and all(a.is_loopback for a in parsed)):
        return "loopback"
    if CONTAINER_BRIDGE.match(name):
        return "docker"
    if parsed and all(a.is_link_local for a in parsed):
        return "link-local"
    if hardware_type == ARPHRD_INFINIBAND:
        return "infiniband"
    return "ethernet" if hardware_type == ARPHRD_ETHER else "other"


def _hardware_type(name: str, root: Path) -> int | None:
    try:
        return int((root / "sys/class/net" / name / "type").read_text())
    except (OSError, ValueError):
        return None
