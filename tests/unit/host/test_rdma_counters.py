"""RDMA ports from a tree as sysfs lays it out."""

from __future__ import annotations

from pathlib import Path

from launcher.host.rdma_counters import read_rdma_counters


def test_state_and_error_counters_of_every_port(tmp_path: Path) -> None:
    port = tmp_path / "sys/class/infiniband/mlx5_0/ports/1"
    for name, text in {
        "state": "4: ACTIVE\n",
        "phys_state": "5: LinkUp\n",
        "counters/link_downed": "2\n",
        "counters/port_xmit_data": "123456\n",
        "hw_counters/local_ack_timeout_err": "7\n",
        "hw_counters/lifespan": "10\n",
        "hw_counters/out_of_sequence": "broken\n",
    }.items():
        (port / name).parent.mkdir(parents=True, exist_ok=True)
        (port / name).write_text(text)
    assert read_rdma_counters(tmp_path) == {
        "mlx5_0/1": {"state": "ACTIVE", "phys_state": "LinkUp", "link_downed": 2, "local_ack_timeout_err": 7}
    }
    assert read_rdma_counters(tmp_path / "none") == {}
