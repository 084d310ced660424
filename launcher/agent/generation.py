"""One generation's processes: started on a fresh port, watched through pidfds and links, ended as a whole."""

from __future__ import annotations

import os
import random
import signal
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from launcher.agent.crew import Turn
from launcher.agent.lifecycle import RankExit
from launcher.errors import UserError
from launcher.link import Link

# Below Linux's default ephemeral range (32768 and up), so that no outgoing connection takes it in between.
_PORTS = range(20000, 32000)


@dataclass
class RankProcess:
    """A started rank. `pidfd` becomes readable when it ends."""

    rank: int
    pid: int
    pidfd: int
    link: Link
    log_path: Path
    exit: RankExit | None = None
    killed_by_us: bool = False

    def kill(self) -> None:
        if self.exit is None:
            self.killed_by_us = True
            try:
                signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
            except ProcessLookupError:
                return

    def reap(self) -> RankExit | None:
        """Collect the exit status; None while it runs."""
        if self.exit is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid == 0:
                return None
            code = os.waitstatus_to_exitcode(status)
            self.exit = RankExit(
                code=code if code >= 0 else None,
                signal=-code if code < 0 else None,
                at_s=time.monotonic(),
                # It may have ended by itself just before our SIGKILL: then it is no victim of ours.
                killed_by_us=self.killed_by_us and code == -signal.SIGKILL,
            )
        return self.exit

    def close(self) -> None:
        self.link.close()
        os.close(self.pidfd)


def free_port(address: str, wanted: int | None = None) -> int:
    """A port nobody listens on at `address`; a random one, so that two jobs that start together rarely meet.

    `wanted` (cluster.master_port) is taken for the first attempt only; the caller passes None afterwards, because a
    store must never be met again by a later attempt.
    """
    for port in [wanted] if wanted is not None else random.sample(_PORTS, 200):
        if port_is_free(address, port):
            return port
    if wanted is not None:
        raise UserError(f"cluster.master_port: {wanted} is in use at {address}. Leave it out: a free port is taken.")
    raise UserError(f"none of 200 ports tried between {_PORTS.start} and {_PORTS.stop} is free at {address}")


def port_is_free(address: str, port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections in TIME_WAIT do not count as taken
        try:
            probe.bind((address, port))
        except OSError:
            return False
        return True


def contract(turn: Turn, rank: int, master_port: int) -> Mapping[str, str]:
    """What differs from rank to rank and from attempt to attempt in DeepSpeed's environment contract."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank - turn.ranks.start),
        "WORLD_SIZE": str(turn.world_size),
        "LOCAL_SIZE": str(turn.mine.num_ranks),
        "LOCAL_WORLD_SIZE": str(turn.mine.num_ranks),
        "CROSS_RANK": str(turn.index),
        "CROSS_SIZE": str(turn.num_nodes),
        "MASTER_ADDR": turn.master_addr,
        "MASTER_PORT": str(master_port),
    }
