"""Agents reduced to a loop and a courier, each with a real process."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from launcher.agent.courier_client import CourierClient, Permit
from launcher.agent.peer_tier import Fetched, PeerTier, Place, Sent
from launcher.agent.resume_folder import HeldSnapshot
from launcher.checkpoint.manifest import Manifest
from launcher.checkpoint.snapshot import SnapshotIdentity, read_snapshot, verify_snapshot
from launcher.courier.messages import Discarded, Failure, Progress, Published, Written
from launcher.event_loop import EventLoop
from launcher.host.storage import StorageKind
from tests.unit.courier.snapshots import Slot

REPOSITORY = Path(__file__).parents[3]
BOUND_S = 30.0

Made = Callable[[], "Agent"]


class Agent:
    """The requests below wait, in the loop, for their answer."""

    def __init__(self, folder: Path) -> None:
        self.loop = EventLoop()
        self.said: list[str] = []
        self.token = secrets.token_hex(16)
        environ = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
        self.log_path = folder / "courier.log"
        self.courier = CourierClient(self.loop, environ, self.token, self.log_path, self.said.append)

    def wait_until(self, happened: Callable[[], Any], bound_s: float = BOUND_S) -> None:
        deadline = time.monotonic() + bound_s
        while not happened():
            assert time.monotonic() < deadline, f"not within {bound_s} s; {self.said}; {self.log()}"
            self.loop.wait(0.05)

    def log(self) -> str:
        return self.log_path.read_text() if self.log_path.exists() else ""

    def write(
        self,
        slots: list[Slot],
        output_dir: Path,
        name: str = "checkpoint-5",
        generation: int = 1,
        on_progress: Callable[[Progress], None] = lambda progress: None,
        storage: StorageKind = StorageKind.POSIX,
    ) -> Written | Failure:
        outcomes: list[Written | Failure] = []
        self.courier.write(slots, output_dir, storage, generation, name, outcomes.append, on_progress)
        self.wait_until(lambda: outcomes)
        return outcomes[0]

    def publish(
        self,
        manifest: Manifest,
        output_dir: Path,
        name: str = "checkpoint-5",
        generation: int = 1,
        keep: int = 2,
        may_publish: Callable[[Permit], None] = lambda permit: permit(True, ""),
        storage: StorageKind = StorageKind.POSIX,
    ) -> Published | Failure:
        outcomes: list[Published | Failure] = []
        self.courier.publish(manifest, output_dir, storage, generation, name, may_publish, outcomes.append, keep=keep)
        self.wait_until(lambda: outcomes, BOUND_S + 10)
        return outcomes[0]

    def discard(
        self,
        output_dir: Path,
        name: str = "checkpoint-5",
        generation: int = 1,
        storage: StorageKind = StorageKind.POSIX,
    ) -> Discarded | Failure:
        outcomes: list[Discarded | Failure] = []
        self.courier.discard(output_dir, storage, generation, name, outcomes.append)
        self.wait_until(lambda: outcomes)
        return outcomes[0]

    @property
    def pid(self) -> int:
        """Of the courier that is there now."""
        return self.courier.pids[-1]

    def close(self) -> None:
        self.courier.close()
        self.loop.close()


@pytest.fixture
def make_agent(tmp_path: Path) -> Iterator[Made]:
    agents: list[Agent] = []

    def make() -> Agent:
        agents.append(Agent(tmp_path / f"node-{len(agents)}"))
        return agents[-1]

    yield make
    for agent in agents:
        agent.close()


@pytest.fixture
def agent(make_agent: Made) -> Agent:
    return make_agent()


def is_gone(pid: int, bound_s: float = 15.0) -> bool:
    deadline = time.monotonic() + bound_s
    while time.monotonic() < deadline:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX":
                return True
        except OSError:
            return True
        time.sleep(0.01)
    return False


class Node(Agent):
    """An agent among others."""

    def __init__(self, folder: Path, name: str, token: str = "secret of the run", **place: Any) -> None:
        super().__init__(folder)
        self.own: list[HeldSnapshot] = []
        self.ports: list[int | Failure] = []
        self.kept: list[tuple[str, int]] = []
        self.peers = PeerTier(
            self.courier,
            Place(name, "feedface", token, "127.0.0.1", **{"stall_s": 5.0, **place}),
            own=lambda: self.own,
            on_listening=self.ports.append,
            on_kept=lambda source, step: self.kept.append((source, step)),
        )
        self.wait_until(lambda: self.ports)

    @property
    def port(self) -> int:
        port = self.ports[-1]
        assert isinstance(port, int), port
        return port

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def has(self, slots: list[Slot]) -> None:
        """These are snapshots of its own ranks."""
        for identity, fd in slots:
            snapshot = read_snapshot(fd)
            assert snapshot is not None
            assert snapshot.identity == identity
            self.own.append(HeldSnapshot(snapshot, fd))

    def held_contents(self) -> dict[str, dict[str, bytes]]:
        """The newest step that is kept for other nodes; all are read and verified: "rank at step" -> files."""
        with self.peers.lent() as lent:
            for held in lent:
                assert verify_snapshot(held.fd, held.snapshot) == ""
            moments = [(held.snapshot.identity.generation, held.snapshot.identity.step) for held in lent]
            return {
                f"{held.snapshot.identity.rank} at {held.snapshot.identity.step}": contents_of(held)
                for held, moment in zip(lent, moments, strict=True)
                if moment == max(moments)
            }

    def held_steps(self) -> set[int]:
        return {identity.step for identity in self.peers.inventory()}

    def close(self) -> None:
        self.peers.close()
        super().close()


def contents_of(held: HeldSnapshot) -> dict[str, bytes]:
    return {e.name: os.pread(held.fd, e.record.size_bytes, e.offset) for e in held.snapshot.files}


def wait_for_all(nodes: list[Node], happened: Callable[[], Any], bound_s: float = BOUND_S) -> None:
    """The loops of all nodes go on meanwhile."""
    deadline = time.monotonic() + bound_s
    while not happened():
        assert time.monotonic() < deadline, f"not within {bound_s} s; {[(node.said, node.log()) for node in nodes]}"
        for node in nodes:
            node.loop.wait(0.005)


class Nodes:
    """Each with a courier."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.all: list[Node] = []

    def add(self, name: str, **place: Any) -> Node:
        self.all.append(Node(self._folder / f"{len(self.all)}-{name}", name, **place))
        return self.all[-1]

    def wait_until(self, happened: Callable[[], Any], bound_s: float = BOUND_S) -> None:
        wait_for_all(self.all, happened, bound_s)

    def send(self, source: Node, address: str, slots: list[Slot]) -> Sent | Failure:
        outcomes: list[Sent | Failure] = []
        source.peers.send(address, slots, outcomes.append)
        self.wait_until(lambda: outcomes)
        return outcomes[0]

    def fetch(self, asking: Node, address: str, wanted: list[SnapshotIdentity]) -> Fetched | Failure:
        outcomes: list[Fetched | Failure] = []
        asking.peers.fetch(address, wanted, outcomes.append)
        self.wait_until(lambda: outcomes)
        return outcomes[0]

    def inventory(self, asking: Node, address: str) -> list[SnapshotIdentity] | Failure:
        outcomes: list[list[SnapshotIdentity] | Failure] = []
        asking.peers.ask_inventory(address, outcomes.append)
        self.wait_until(lambda: outcomes)
        return outcomes[0]


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    made = Nodes(tmp_path)
    yield made
    for node in made.all:
        node.close()
