"""The fan-out process: `python -m launcher.fanout.process FD` beside the agent of a head, or alone where the head is no
node.

It has a session of its own, so that Ctrl-C and the agent's clean-up leave it alone, and lives no longer than the
process that started it: the end of file on its standard input ends it, and with it every ssh. The agents elsewhere go
on then.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from launcher.event_loop import EventLoop
from launcher.fanout import frames
from launcher.fanout.pipes import Lines, Outlet
from launcher.fanout.remote import FINAL_CODES, STOPPED_CODES, RemoteNode, State, Task
from launcher.fanout.screen import Screen
from launcher.fanout.ssh import node_argv, own_settings, try_argv

ENDS_WITHIN_S = 60.0  # after the end of one node's agent, the others': they know of it by membership
_LEAVES_WITHIN_S = 10.0  # the same where this node alone may have been stopped or refused
STOP_MARGIN_S = 30.0  # beyond spot.grace_seconds
_HELLO_WITHIN_S = 1.0
_LAST_WORDS_S = 2.0
_ONE_NODES_CODES = (2, 3)  # final, but for this node alone: the others know nothing of it


@dataclass(frozen=True)
class Settings:
    """`nodes`: (name, host, marker, order to start, order to look) each. `wait_s`: without any agent alive, for a head
    that is no node. `presence_fd`: the socket that shows that this machine's agent is the head's own; -1 for none.
    `is_fixed`: the run cannot go on without any of its nodes."""

    nodes: tuple[tuple[str, str, str, str, str], ...]
    grace_s: float
    stop_exit_code: int
    wait_s: float
    has_agent: bool
    presence_fd: int
    head_name: str
    is_fixed: bool = False


def make_tasks(settings: Settings) -> list[Task]:
    own = own_settings([host for _, host, *_ in settings.nodes])
    return [
        Task(
            name=name,
            host=host,
            argv=tuple(node_argv(host, own[host], os.environ)),
            try_command=shlex.join(try_argv(host, own[host], os.environ)),
            marker=marker,
            start=start.encode("utf-8", "surrogateescape"),
            look=look.encode("utf-8", "surrogateescape"),
        )
        for name, host, marker, start, look in settings.nodes
    ]


class FanOutProcess:
    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._loop = EventLoop(self._tick)
        self._screen = Screen(self._loop)
        self._control = Lines(0)
        self._deadline_s: float | None = None
        self._stop_name = ""
        self._told_to_stop = False
        self._final: RemoteNode | None = None  # the first to end with a code that is final
        self._report = Outlet(1, self._loop)  # for the head, see `final_line`
        self._misses = False  # the run ends for want of nodes
        self._ended = False
        self._orphaned = False
        self._beaten_s = self._lived_s = time.monotonic()
        self._remotes = [RemoteNode(task, self._loop, self._screen, self._look) for task in make_tasks(settings)]

    def run(self) -> int:
        self._loop.register(self._control, self._obey)
        if self._settings.presence_fd >= 0:
            listener = socket.socket(fileno=self._settings.presence_fd)
            listener.setblocking(False)
            self._loop.register(listener, lambda: self._tell_busy(listener))
        for remote in self._remotes:
            remote.connect()
        while not (self._orphaned or self._is_over()):
            self._loop.wait()
        if not self._orphaned:
            self._name_the_rest()
        for remote in self._remotes:
            remote.close()
        deadline = time.monotonic() + _LAST_WORDS_S
        while not self._screen.is_empty and time.monotonic() < deadline:
            self._loop.wait()
        return exit_code([remote.last_code for remote in self._remotes], self._told_to_stop, self._settings)

    # -- what the head says --------------------------------------------------------------------------------------------

    def _obey(self) -> None:
        for line in self._control.read():
            word, _, value = line.decode("ascii", "replace").strip().partition(" ")
            if word == "stop":
                self._told_to_stop = True
                self._stop(value)
            elif word == "ended":
                self._head_ended(int(value))
        if self._control.closed:
            self._loop.unregister(self._control)
            self._orphaned = not self._ended

    def _stop(self, name: str) -> None:
        if not self._stop_name:
            self._set_deadline(self._settings.grace_s + STOP_MARGIN_S)
        self._stop_name = name
        for remote in self._remotes:
            remote.stop(name)

    def _head_ended(self, code: int) -> None:
        self._ended = True
        if self._stop_name:
            return
        self._misses = code in STOPPED_CODES
        self._run_is_over(ENDS_WITHIN_S if code in (0, 1) else _LEAVES_WITHIN_S)

    def _run_is_over(self, within_s: float) -> None:
        if self._deadline_s is None:
            self._set_deadline(within_s)
            for remote in self._remotes:
                remote.let_go()

    def _set_deadline(self, seconds: float) -> None:
        self._deadline_s = time.monotonic() + seconds

    # -- what is seen --------------------------------------------------------------------------------------------------

    def _look(self) -> None:
        """Something has changed at a node. A head with an agent of its own learns of the run's end from that one, and
        of an end that is final for its node from here."""
        if self._final is None:
            self._final = next((remote for remote in self._remotes if remote.final_code is not None), None)
            if self._final is not None:
                self._report.write(final_line(self._final))
        if self._settings.has_agent:
            return
        if self._final is not None and self._final.last_code in _ONE_NODES_CODES and self._deadline_s is None:
            self._stop_for_want_of(self._final)
        if any(remote.last_code in (0, 1) for remote in self._remotes):
            self._run_is_over(ENDS_WITHIN_S)
        idle = all(remote.state in (State.PAUSING, State.OVER) and not remote.may_live for remote in self._remotes)
        told = all(remote.last_code in (*FINAL_CODES, *STOPPED_CODES) for remote in self._remotes)
        if idle and told:
            self._run_is_over(0.0)

    def _stop_for_want_of(self, gone: RemoteNode) -> None:
        """What goes on without it only waits for it, where the number of nodes is fixed."""
        if not self._settings.is_fixed or self._stop_name:
            return
        running = [remote.shown for remote in self._remotes if remote.state is State.HELD]
        if running:
            self._screen.say(f"{gone.shown} has ended and every node is needed: stopping {', '.join(running)}")
        self._stop("SIGTERM")

    def _tick(self) -> None:
        now = time.monotonic()
        if now - self._beaten_s >= frames.ALIVE_EVERY_S:
            self._beaten_s = now
            for remote in self._remotes:
                remote.beat()
        if any(remote.state is State.HELD or remote.is_busy for remote in self._remotes):
            self._lived_s = now
        if not self._settings.has_agent and now - self._lived_s > self._settings.wait_s and self._deadline_s is None:
            self._screen.say(f"no node has had an agent for {self._settings.wait_s:.0f} s (cluster.wait_seconds)")
            self._misses = True
            self._run_is_over(0.0)

    def _is_over(self) -> bool:
        if all(remote.state is State.OVER for remote in self._remotes):
            # Beside an agent there is nothing left to do but to keep its socket.
            return not self._settings.has_agent or self._ended
        if self._deadline_s is None or time.monotonic() <= self._deadline_s:
            return False
        if self._final is not None and self._final.last_code != 0 and not self._stop_name:
            self._stop_for_want_of(self._final)
            return not self._stop_name
        return True

    def _name_the_rest(self) -> None:
        for remote in self._remotes:
            if self._misses and remote.trouble:
                self._screen.say(f"{remote.shown}: {remote.trouble}")
        running = [remote.shown for remote in self._remotes if remote.state is not State.OVER and remote.may_live]
        if not running:
            return
        if self._stop_name:
            bound_s = self._settings.grace_s + STOP_MARGIN_S
            self._screen.say(f"not ended within {bound_s:.0f} s of the stop: {', '.join(running)}. Look there.")
        else:
            self._screen.say(
                f"agents that go on by themselves: {', '.join(running)}. The same command shows them again."
            )

    def _tell_busy(self, listener: socket.socket) -> None:
        """Another head has come for this machine's agent, which is the one beside this process."""
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        with connection:
            connection.settimeout(_HELLO_WITHIN_S)
            try:
                marker = str(json.loads(connection.recv(4096))["marker"])
                connection.sendall(frames.frame(marker, frames.BUSY, by=self._settings.head_name))
            except (OSError, ValueError, KeyError, TypeError):
                return


def final_line(remote: RemoteNode) -> bytes:
    """What the head is told over this process's standard output."""
    fields = {"node": remote.shown, "code": remote.last_code, "line": remote.last_line}
    return json.dumps(fields).encode() + b"\n"


def exit_code(codes: Sequence[int | None], stopped: bool, settings: Settings) -> int:
    """For a head that is no node: 0 where any node knows of the planned end, else the worst that a rerun would meet."""
    wrong = (1,) if stopped else (1, 2, 3)  # a stop is the reason for what comes after it
    return next((code for code in (0, *wrong) if code in codes), settings.stop_exit_code)


def main() -> int:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: None)  # the head passes them on; not SIG_IGN, which every ssh would inherit
    with os.fdopen(int(sys.argv[1]), "rb") as stream:
        fields = json.loads(stream.read())
    return FanOutProcess(Settings(**{**fields, "nodes": tuple(tuple(node) for node in fields["nodes"])})).run()


if __name__ == "__main__":
    raise SystemExit(main())
