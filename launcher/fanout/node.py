"""`python -m launcher.fanout.node`: what a head starts over ssh on the machine of a node. Not for people.

It reads the order, starts the agent in a session of its own and stands between the two: the agent never waits for a
connection that is stuck, and lives on when it breaks. A head that comes (again) finds this process by its socket.

Invariant: the agent gets the stop signals that a head sends and no others from here; the end of a connection is none.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from launcher.errors import UserError
from launcher.event_loop import EventLoop
from launcher.fanout import frames
from launcher.fanout.order import NodeOrder, OtherVersion
from launcher.fanout.pipes import Lines, Outlet
from launcher.fanout.presence import claim, is_ours, reach

_ORDER_WITHIN_S = 60.0
_ORDER_BYTES = 16 << 20
_HELLO_WITHIN_S = 1.0
_LAST_WORDS_S = 5.0  # for what the agent has said to get out once it has ended
_KEPT_BYTES = 1 << 16  # of output, for a head that comes again
_STOP_SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP")


def main() -> int:
    for number in (signal.SIGINT, signal.SIGTERM):
        # A machine that shuts down signals everybody: the agent saves and ends, and then this process does.
        signal.signal(number, lambda *_: None)  # not SIG_IGN, which the agent would inherit
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as under nohup; in the agent too
    try:
        stdin = Lines(0, longest=_ORDER_BYTES)
        line, early = _first_line(stdin)
        order = NodeOrder.from_line(line)
    except UserError as error:
        if isinstance(error, OtherVersion):
            os.write(1, frames.frame(error.marker, frames.REFUSED, why=str(error), code=int(error.exit_code)))
        print(f"ftlaunch: error: {error}", file=sys.stderr)
        return int(error.exit_code)
    for _ in range(3):  # a holder may end between the two looks
        listener = claim(order.run)
        if listener is not None:
            return AgentHost(order, listener, stdin, early).run() if order.start else _say_none(order)
        connection = reach(order.run)
        if connection is not None:
            return _Relay(order, connection, stdin).run()
        time.sleep(0.2)
    os.write(1, frames.frame(order.marker, frames.BUSY, by="another process, which does not answer"))
    return 0


def _first_line(stdin: Lines) -> tuple[bytes, list[bytes]]:
    """The order, and what has come behind it already."""
    deadline = time.monotonic() + _ORDER_WITHIN_S
    lines: list[bytes] = []
    while not (lines or stdin.closed):
        if not select.select([stdin], [], [], max(0.0, deadline - time.monotonic()))[0]:
            break
        lines = stdin.read()
    if not lines:
        raise UserError("no order of a head came on standard input: this command is not for people")
    return lines[0], lines[1:]


def _say_none(order: NodeOrder) -> int:
    os.write(1, frames.frame(order.marker, frames.NONE))
    return 0


@dataclass(eq=False)
class _Front:
    """Somebody who listens: the head that owns the agent, or a start on this machine that only looks on."""

    marker: str
    lines: Lines
    outlet: Outlet
    owns: bool
    head: str
    head_name: str
    heard_at_s: float
    close: Callable[[], None]

    def tell(self, kind: str, **fields: Any) -> None:
        self.outlet.write(frames.frame(self.marker, kind, **fields))


class AgentHost:
    """The agent of this node, and everybody who listens to it."""

    def __init__(self, order: NodeOrder, listener: socket.socket, stdin: Lines, early: list[bytes]) -> None:
        self._order = order
        self._stdin, self._early = stdin, early
        self._listener = listener
        self._loop = EventLoop(self._tick)
        self._fronts: list[_Front] = []
        self._kept = bytearray()  # the newest output: on a connection that was dead already the last of it got lost
        self._num_bytes = 0  # of all output
        self._unheard = 0  # where in it the last owner went away
        self._agent: subprocess.Popen[bytes] | None = None
        self._output: Lines | None = None

    def run(self) -> int:
        order = self._order
        owner = self._add(self._stdin, 1, order.marker, owns=True, head=order.head, name=order.head_name)
        try:
            self._start()
        except OSError as error:
            owner.tell(frames.FAILED, why=f"{error.filename}: {error.strerror}")
            self._flush_all()
            return 0
        assert self._agent is not None
        owner.tell(frames.STARTED, pid=self._agent.pid)
        for line in self._early:
            self._obey(line)
        self._loop.register(self._listener, self._accept)
        pidfd = os.pidfd_open(self._agent.pid)
        self._loop.register(pidfd, lambda: None)
        while self._agent.poll() is None:
            self._loop.wait()
        self._loop.unregister(pidfd)
        self._last_output()
        for front in self._fronts:
            front.tell(frames.ENDED, code=self._agent.returncode)
        self._flush_all()
        return 0

    def _start(self) -> None:
        os.chdir(self._order.folder)
        order = os.memfd_create("order")
        with os.fdopen(order, "w+b") as stream:
            stream.write(self._order.to_line())
            stream.flush()
            stream.seek(0)
            self._agent = subprocess.Popen(
                [sys.executable, *self._order.agent, "--as-node"],
                stdin=stream,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        assert self._agent.stdout is not None
        self._output = Lines(self._agent.stdout.fileno())
        self._loop.register(self._output, self._pass_on)

    # -- output --------------------------------------------------------------------------------------------------------

    def _pass_on(self) -> None:
        assert self._output is not None
        data = b"".join(line + b"\n" for line in self._output.read())
        if self._output.closed:
            self._loop.unregister(self._output)
        for front in list(self._fronts):
            front.outlet.write(data)
        self._num_bytes += len(data)
        self._kept += data
        if len(self._kept) > _KEPT_BYTES:
            del self._kept[: self._kept.find(b"\n", len(self._kept) - _KEPT_BYTES) + 1]

    def _last_output(self) -> None:
        """What the agent wrote before it ended; a child of it may hold the pipe open, and is not waited for."""
        assert self._output is not None
        before = -1
        while not self._output.closed and before != 0:
            before = len(select.select([self._output.fd], [], [], 0)[0])
            self._pass_on()

    def _flush_all(self) -> None:
        deadline = time.monotonic() + _LAST_WORDS_S
        while any(not front.outlet.is_empty for front in self._fronts) and time.monotonic() < deadline:
            self._loop.wait()

    # -- who listens ---------------------------------------------------------------------------------------------------

    def _add(self, lines: Lines, write_fd: int, marker: str, *, owns: bool, head: str, name: str) -> _Front:
        def close() -> None:
            if front in self._fronts:
                self._fronts.remove(front)
                if owns:
                    self._unheard = self._num_bytes
                self._loop.unregister(lines)
                outlet.close()
                nothing = os.open(os.devnull, os.O_RDWR)
                for fd in (lines.fd, write_fd):
                    if fd > 2:
                        os.close(fd)
                    else:
                        os.dup2(nothing, fd)
                os.close(nothing)

        outlet = Outlet(write_fd, self._loop, on_closed=close)
        front = _Front(marker, lines, outlet, owns, head, name, time.monotonic(), close)
        self._fronts.append(front)
        self._loop.register(lines, lambda: self._hear(front))
        return front

    def _hear(self, front: _Front) -> None:
        for line in front.lines.read():
            front.heard_at_s = time.monotonic()
            self._obey(line)
        if front.lines.closed:
            front.close()

    def _obey(self, line: bytes) -> None:
        word, _, name = line.decode("ascii", "replace").strip().partition(" ")
        if word == "stop" and name in _STOP_SIGNALS and self._agent is not None:
            self._agent.send_signal(signal.Signals[name])

    def _tick(self) -> None:
        now = time.monotonic()
        for front in list(self._fronts):
            if front.owns and now - front.heard_at_s > frames.OWNER_SILENT_S:
                front.close()

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return
        with connection:
            if not is_ours(connection):
                return
            # Both ends are on this machine and ours, so this short wait is no danger to the agent.
            hello = _read_hello(connection)
            if hello is None:
                return
            owner = next((front for front in self._fronts if front.owns), None)
            owns = bool(hello["owns"])
            if owns and owner is not None and owner.head != hello["head"]:
                with contextlib.suppress(OSError):
                    connection.sendall(frames.frame(hello["marker"], frames.BUSY, by=owner.head_name))
                return
            if owns and owner is not None:
                owner.close()
            lines, write_fd = Lines(os.dup(connection.fileno())), os.dup(connection.fileno())
            front = self._add(lines, write_fd, hello["marker"], owns=owns, head=hello["head"], name=hello["head_name"])
        assert self._agent is not None
        # All that is kept goes out again, from byte `begins` of the output on. The head passes over what it has had:
        # it knows up to where, and one that comes for the first time begins where the last one went away.
        begins = self._num_bytes - len(self._kept)
        by = owner.head_name if owner else ""
        front.tell(frames.ATTACHED, pid=self._agent.pid, by=by, begins=begins, unheard=self._unheard)
        if owns:
            front.outlet.write(bytes(self._kept))


def hello(order: NodeOrder, *, owns: bool) -> bytes:
    """The first line over the socket of a node's agent."""
    fields = {"owns": owns, "head": order.head, "head_name": order.head_name, "marker": order.marker}
    return json.dumps(fields).encode() + b"\n"


def _read_hello(connection: socket.socket) -> dict[str, Any] | None:
    connection.settimeout(_HELLO_WITHIN_S)
    try:
        line = b""
        while not line.endswith(b"\n"):
            chunk = connection.recv(4096)
            if not chunk or len(line) > 4096:
                return None
            line += chunk
        fields = json.loads(line)
    except (OSError, ValueError):
        return None
    texts = ("head", "head_name", "marker")
    is_one = isinstance(fields, dict) and "owns" in fields and all(isinstance(fields.get(name), str) for name in texts)
    return fields if is_one else None


class _Relay:
    """Between the head that came over ssh and the process that runs this node's agent."""

    def __init__(self, order: NodeOrder, connection: socket.socket, stdin: Lines) -> None:
        self._loop = EventLoop(lambda: None)
        self._connection = connection
        connection.sendall(hello(order, owns=True))
        read_fd, write_fd = os.dup(connection.fileno()), os.dup(connection.fileno())
        self._there, self._to_there = Lines(read_fd), Outlet(write_fd, self._loop)
        self._here, self._to_here = stdin, Outlet(1, self._loop)
        self._loop.register(self._there, lambda: self._copy(self._there, self._to_here))
        self._loop.register(self._here, lambda: self._copy(self._here, self._to_there))
        self._heard = False
        self._began_s = time.monotonic()
        self._order = order

    def _copy(self, source: Lines, target: Outlet) -> None:
        self._heard = self._heard or source is self._there
        target.write(b"".join(line + b"\n" for line in source.read()))

    def run(self) -> int:
        while not (self._there.closed or self._here.closed or self._to_here.closed):
            self._loop.wait()
            if not self._heard and time.monotonic() - self._began_s > 5 * _HELLO_WITHIN_S:
                self._to_here.write(frames.frame(self._order.marker, frames.BUSY, by="a process that does not answer"))
                break
        deadline = time.monotonic() + _LAST_WORDS_S
        while not (self._to_here.is_empty and self._to_there.is_empty) and time.monotonic() < deadline:
            if self._there.closed:
                self._loop.unregister(self._there)
            if self._here.closed:
                self._loop.unregister(self._here)
            self._loop.wait()
        return 0


if __name__ == "__main__":
    raise SystemExit(main())
