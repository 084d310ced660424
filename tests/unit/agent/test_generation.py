"""The processes of one attempt, with real ones in the place of ranks."""

from __future__ import annotations

import os
import select
import signal
import socket
from pathlib import Path

import pytest

from launcher.agent.crew import Seat, Turn
from launcher.agent.generation import RankProcess, contract, free_port, port_is_free
from launcher.errors import UserError
from launcher.link import Link, pair


def start(script: str) -> RankProcess:
    pid = os.posix_spawn("/bin/sh", ["sh", "-c", script], {"PATH": os.environ["PATH"]})
    ours, theirs = pair()
    theirs.close()
    return RankProcess(0, pid, os.pidfd_open(pid), Link(ours), Path("rank-0.log"))


def wait_for_end(process: RankProcess) -> None:
    """As the supervisor does: the pidfd becomes readable."""
    assert select.select([process.pidfd], [], [], 15.0)[0]


@pytest.mark.parametrize(
    ("script", "code", "number"),
    [("exit 0", 0, None), ("exit 3", 3, None), ("kill -9 $$", None, 9), ("kill -SEGV $$", None, signal.SIGSEGV)],
)
def test_how_a_rank_ended(script: str, code: int | None, number: int | None) -> None:
    process = start(script)
    wait_for_end(process)
    exit_ = process.reap()
    assert exit_ is not None
    assert (exit_.code, exit_.signal, exit_.killed_by_us) == (code, number, False)
    assert exit_.clean == (code == 0)
    assert process.reap() is exit_, "asked again, it says the same"
    process.close()


def test_a_running_rank_has_no_exit_until_it_is_killed() -> None:
    process = start("exec sleep 300")
    assert process.reap() is None
    process.kill()
    wait_for_end(process)
    exit_ = process.reap()
    assert exit_ is not None
    assert (exit_.signal, exit_.killed_by_us) == (signal.SIGKILL, True)
    process.kill()  # of one that is gone: nothing happens
    assert process.exit is exit_
    process.close()


@pytest.mark.parametrize(("script", "code", "number"), [("exit 1", 1, None), ("kill -SEGV $$", None, signal.SIGSEGV)])
def test_a_rank_that_had_ended_by_itself_is_no_victim_of_the_kill_that_followed(
    script: str, code: int | None, number: int | None
) -> None:
    """Two ranks fail together: the group is killed for the first before the second was collected."""
    process = start(script)
    wait_for_end(process)
    process.kill()
    exit_ = process.reap()
    process.close()
    assert exit_ is not None
    assert (exit_.code, exit_.signal) == (code, number)
    assert not exit_.killed_by_us


def test_the_contract_is_that_of_deepspeeds_launcher() -> None:
    seats = (Seat("n0", "10.1.0.5", 3), Seat("n1", "10.1.0.6", 2))
    turn = Turn(1, "start", seats, index=1, master_port=20123)
    ranks = [contract(turn, rank, 20123) for rank in turn.ranks]
    assert [(r["RANK"], r["LOCAL_RANK"]) for r in ranks] == [("3", "0"), ("4", "1")]
    for rank in ranks:
        assert (rank["WORLD_SIZE"], rank["LOCAL_SIZE"], rank["LOCAL_WORLD_SIZE"]) == ("5", "2", "2")
        assert (rank["CROSS_RANK"], rank["CROSS_SIZE"]) == ("1", "2")
        assert (rank["MASTER_ADDR"], rank["MASTER_PORT"]) == ("10.1.0.5", "20123")


def test_a_free_port_can_be_listened_at_and_differs_from_time_to_time() -> None:
    ports = {free_port("127.0.0.1") for _ in range(20)}
    assert len(ports) > 10
    assert all(20000 <= port < 32768 for port in ports), "below the range of outgoing connections"
    for port in ports:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", port))
            listener.listen()


def test_a_port_in_use_is_not_free() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        assert not port_is_free("127.0.0.1", port)
        with pytest.raises(UserError, match=f"cluster.master_port: {port} is in use"):
            free_port("127.0.0.1", port)
    assert port_is_free("127.0.0.1", port)
    assert free_port("127.0.0.1", port) == port
