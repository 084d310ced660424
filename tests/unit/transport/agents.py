"""Transports with what they have heard, and strangers with a raw socket."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

from launcher.cluster.codec import message_from_json, message_to_json
from launcher.cluster.messages import Beat, Message
from launcher.cluster.model import Node
from launcher.event_loop import EventLoop
from launcher.transport import framing
from launcher.transport.body import encode, join
from launcher.transport.framing import SEAL_HEADER, Reader, Received
from launcher.transport.seal import Seal
from launcher.transport.transport import Transport

TOKEN = "0123456789abcdef"


class Agents:
    """Any number of transports on one loop in this thread."""

    def __init__(self) -> None:
        self.all: list[Agent] = []
        self.servers: list[Server] = []
        self.loop = EventLoop(self._tick)

    def _tick(self) -> None:
        for agent in self.all:
            agent.transport.tick()

    def start(self, name: str, *, token: str = TOKEN, run_id: str = "run", port: int = 0) -> Agent:
        agent = Agent(self.loop, name, token, run_id, port)
        self.all.append(agent)
        return agent

    def run_until(self, condition: Callable[[], object], seconds: float = 5.0) -> None:
        until = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < until, f"has not come about within {seconds:g} s"
            self.loop.set_bound("test", min(0.05, max(0.0, until - time.monotonic())), lambda: None)
            self.loop.wait()

    def now(self) -> float:
        return time.monotonic()

    def run_for(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        self.run_until(lambda: time.monotonic() >= until, seconds + 5)

    def close(self) -> None:
        for agent in self.all:
            agent.transport.close(linger_s=0)
        for server in self.servers:
            server.close()
        self.loop.close()


class Agent:
    """reply: what it sends to the sender of a message while it handles it."""

    def __init__(self, loop: EventLoop, name: str, token: str, run_id: str, port: int) -> None:
        self.heard: list[Message] = []
        self.unreachable: list[str] = []
        self.said: list[str] = []
        self.reply: Callable[[Message], Message | None] = lambda message: None
        self.transport = Transport(
            loop,
            token=token,
            run_id=run_id,
            host="127.0.0.1",
            port=port,
            on_message=self._hear,
            on_unreachable=self.unreachable.append,
            say=self.said.append,
        )
        self.node = Node(name, f"127.0.0.1:{self.transport.port}", 1, f"{name}-incarnation")

    @property
    def address(self) -> str:
        return self.node.address

    def beat(self, number: int = 1) -> Beat:
        return Beat(self.node, number, number)

    def send(self, other: Agent, message: Message) -> None:
        self.transport.send(other.address, message)

    def _hear(self, message: Message) -> None:
        self.heard.append(message)
        answer = self.reply(message)
        if answer is not None:
            self.transport.send(message.sender.address, answer)


def connect(agent: Agent) -> socket.socket:
    return socket.create_connection(("127.0.0.1", agent.transport.port), timeout=10)


class Server:
    """A peer made by hand, on the same loop: takes connections and requests, and answers when the test says so."""

    def __init__(self, agents: Agents, port: int = 0) -> None:
        self._loop = agents.loop
        self._listener = socket.create_server(("127.0.0.1", port))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.connections: list[socket.socket] = []
        self.asked: list[tuple[socket.socket, Received]] = []
        self.open = 0
        self._loop.register(self._listener, self._accept)
        agents.servers.append(self)

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        reader = Reader(answers=False)
        self.connections.append(connection)
        self.open += 1
        self._loop.register(connection, lambda: self._read(connection, reader))

    def _read(self, connection: socket.socket, reader: Reader) -> None:
        try:
            data = connection.recv(1 << 20)
        except OSError:
            data = b""
        if not data:
            self.open -= 1
            self._loop.unregister(connection)
            connection.close()
        self.asked += [(connection, request) for request in reader.feed(data)] if data else []

    def answer(self, index: int, *messages: Message, token: str = TOKEN, run_id: str = "run") -> bytes:
        """What to send for request number `index`."""
        body = join([encode(message) for message in messages])
        return framing.answer(Seal(token, run_id).of_answer(self.asked[index][1].headers[SEAL_HEADER], body), body)

    def drop(self, connection: socket.socket, *, reset: bool = False) -> None:
        if reset:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._loop.unregister(connection)
        connection.close()

    def stop_listening(self) -> None:
        self._loop.unregister(self._listener)
        self._listener.close()

    def close(self) -> None:
        for end in (self._listener, *self.connections):
            if end.fileno() >= 0:
                self._loop.unregister(end)
                end.close()


@contextlib.contextmanager
def other_process(**settings: str) -> Iterator[Other]:
    """An agent in a process of its own."""
    other = Other(settings)
    try:
        yield other
    finally:
        other.kill()


class Other:
    """Its lines: first its address, then each message it hears."""

    def __init__(self, settings: dict[str, str]) -> None:
        command = [sys.executable, "-m", "tests.unit.transport.agents", json.dumps(settings)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, bufsize=1)
        assert self.process.stdout is not None
        self._lines = self.process.stdout
        self.address = self._lines.readline().strip()

    def hear(self) -> Message:
        return message_from_json(json.loads(self._lines.readline()))

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self._lines.close()


def _live(settings: dict[str, str]) -> None:
    """Answers every message with a heartbeat, until it is killed."""
    agents = Agents()
    agent = agents.start(settings.get("name", "other"), port=int(settings.get("port", "0")))
    print(agent.address, flush=True)

    def reply(message: Message) -> Message:
        print(json.dumps(message_to_json(message)), flush=True)
        if "call" in settings:
            agent.transport.send(settings["call"], agent.beat(9))
        return agent.beat(8)

    agent.reply = reply
    if "call" in settings:
        agent.transport.send(settings["call"], agent.beat(9))
    agents.run_until(lambda: False, 60)


if __name__ == "__main__":
    _live(json.loads(sys.argv[1]))
