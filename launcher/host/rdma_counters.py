"""RDMA ports of this node, and what their cards have counted. From sysfs, which every container can read."""

from __future__ import annotations

from pathlib import Path

ROOT = Path("/")

# Of hw_counters and counters the ones that grow when something is wrong; names are those of mlx5, efa and the IB core.
ERROR_COUNTERS = frozenset(
    """
    link_downed link_error_recovery symbol_error local_link_integrity_errors excessive_buffer_overrun_errors
    port_rcv_errors port_xmit_discards port_xmit_constraint_errors port_rcv_remote_physical_errors
    local_ack_timeout_err out_of_sequence packet_seq_err rnr_nak_retry_err roce_adp_retrans_to
    req_cqe_error req_remote_access_errors req_remote_invalid_request
    resp_cqe_error resp_local_length_error resp_remote_access_errors
    rx_drops rdma_read_wr_err rdma_write_wr_err
    """.split()  # noqa: SIM905  # a list of words, one line a card's part
)


def read_rdma_counters(root: Path = ROOT) -> dict[str, dict[str, str | int]]:
    """`mlx5_0/1` -> its state and its error counters."""
    ports: dict[str, dict[str, str | int]] = {}
    for port in sorted((root / "sys/class/infiniband").glob("*/ports/*")):
        found: dict[str, str | int] = {}
        for name in ("state", "phys_state"):  # "4: ACTIVE", "5: LinkUp"
            if text := _read(port / name):
                found[name] = text.partition(": ")[2] or text
        for folder in ("counters", "hw_counters"):
            for file in sorted((port / folder).glob("*")):
                if file.name in ERROR_COUNTERS and (text := _read(file)).isdigit():
                    found[file.name] = int(text)
        ports[f"{port.parts[-3]}/{port.name}"] = found
    return ports


def _read(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""  # a virtual function counts less than a card
