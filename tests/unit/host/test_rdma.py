"""RDMA devices from a tree as Linux shows it for a RoCE card, and which row of its GID table fits."""

from __future__ import annotations

from pathlib import Path

from launcher.host.rdma import Rdma, best_gid, read_rdma_ports

# cat /sys/class/infiniband/mlx5_0/ports/1/{state,rate,link_layer,gids/N,gid_attrs/*/N} of a two-port RoCE node.
PORT = {
    "state": "4: ACTIVE\n",
    "rate": "200 Gb/sec (4X HDR)\n",
    "link_layer": "Ethernet\n",
    "gids/0": "fe80:0000:0000:0000:ba3f:d2ff:fe12:3456\n",
    "gids/1": "fe80:0000:0000:0000:ba3f:d2ff:fe12:3456\n",
    "gids/2": "0000:0000:0000:0000:0000:ffff:0a01:0005\n",
    "gids/3": "0000:0000:0000:0000:0000:ffff:0a01:0005\n",
    "gids/4": "0000:0000:0000:0000:0000:0000:0000:0000\n",
    "gid_attrs/types/0": "IB/RoCE v1\n",
    "gid_attrs/types/1": "RoCE v2\n",
    "gid_attrs/types/2": "IB/RoCE v1\n",
    "gid_attrs/types/3": "RoCE v2\n",
    "gid_attrs/ndevs/3": "eth0\n",
}


def tree(root: Path, port: dict[str, str], device: str = "mlx5_0") -> Rdma:
    for name, text in port.items():
        path = root / "sys/class/infiniband" / device / "ports/1" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return read_rdma_ports(root)


def test_a_roce_port(tmp_path: Path) -> None:
    (tmp_path / "dev/infiniband").mkdir(parents=True)
    for name in ("uverbs0", "rdma_cm"):
        (tmp_path / "dev/infiniband" / name).touch()
    rdma = tree(tmp_path, PORT)
    (port,) = rdma.ports
    assert rdma.verbs == ("uverbs0",)
    assert (port.device, port.port, port.is_active, port.link_layer) == ("mlx5_0", 1, True, "Ethernet")
    assert [gid.index for gid in port.gids] == [0, 1, 2, 3]
    best = best_gid(port)
    assert best is not None
    assert (best.index, best.ipv4, best.interface) == (3, "10.1.0.5", "eth0")


def test_a_port_that_is_down_and_has_link_local_addresses_only(tmp_path: Path) -> None:
    (port,) = tree(
        tmp_path, {**{k: v for k, v in PORT.items() if not k.endswith(("2", "3"))}, "state": "1: DOWN"}
    ).ports
    assert not port.is_active
    assert best_gid(port) is None


def test_no_devices(tmp_path: Path) -> None:
    assert read_rdma_ports(tmp_path) == Rdma((), ())
