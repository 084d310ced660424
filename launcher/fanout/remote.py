"""One node as its head sees it: a connection that is made, lost and made again, and how its agent ended.

Invariant: an agent is started only by an order over a live connection, and at most one lives on a machine (see
presence.py); so connecting again is always safe, and is the answer to everything but an exit code that is final.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from launcher.event_loop import EventLoop
from launcher.fanout import frames
from launcher.fanout.pipes import Lines, Outlet
from launcher.fanout.screen import Screen
from launcher.process import die_with_parent

FINAL_CODES = (0, 1, 2, 3)
STOPPED_CODES = (138, 143)
ANSWER_S = 60.0
BUSY_PAUSE_S = 30.0
LONGEST_PAUSE_S = 30.0
_ORDER_LIMIT = 32 << 20
_KEPT_LINES = 20


@dataclass(frozen=True)
class Task:
    """`start` and `look` are the order as lines: to start an agent, and only to find one that runs."""

    name: str
    host: str
    argv: tuple[str, ...]
    try_command: str
    marker: str
    start: bytes
    look: bytes


class State(Enum):
    PAUSING = "between two attempts"
    CONNECTING = "an ssh runs and has not said anything"
    HELD = "the agent runs and is ours"
    OVER = "nothing more is to be done"


class RemoteNode:
    """`changed` is called after every change of `state` or `last_code`."""

    def __init__(self, task: Task, loop: EventLoop, screen: Screen, changed: Callable[[], None]) -> None:
        self.task = task
        self.state = State.PAUSING
        self.last_code: int | None = None  # of the last agent that ended there
        self.may_live = False  # an agent of ours may live there, though no connection says so
        self.is_busy = False  # somebody else's agent lived there when it was looked at last
        self.stopping = ""  # name of the signal
        self.is_wanted = True  # an agent is to be started where none runs
        self._loop, self._screen, self._changed = loop, screen, changed
        self._ssh: _Ssh | None = None
        self._failures = 0
        self._said = ""

    @property
    def shown(self) -> str:
        return f"{self.task.name} ({self.task.host})" if self.task.name != self.task.host else self.task.name

    # -- what the head wants -------------------------------------------------------------------------------------------

    def connect(self) -> None:
        if self.state is not State.PAUSING:
            return
        self.state = State.CONNECTING
        order = self.task.look if self.stopping or not self.is_wanted else self.task.start
        try:
            self._ssh = _Ssh(self.task.argv, order, self._loop, self._hear, self._ssh_ended)
        except OSError as error:
            self._fail(f"ssh cannot be run: {error}")
            return
        ssh = self._ssh
        self._loop.set_bound(f"answer {self.task.name}", ANSWER_S, lambda: self._too_slow(ssh))

    def stop(self, signal_name: str) -> None:
        """A second one reaches the agent as a second signal."""
        self.stopping = signal_name
        if self.state is State.HELD and self._ssh is not None:
            self._ssh.write(frames.stop_line(signal_name))
        elif self.state is State.PAUSING:
            if self.may_live:
                self.connect()
            else:
                self._over()

    def beat(self) -> None:
        if self.state is State.HELD and self._ssh is not None:
            self._ssh.write(frames.ALIVE)

    def let_go(self) -> None:
        """The run is over: no agent is started any more. One that runs there is still shown until it ends."""
        self.is_wanted = False
        if self.state is not State.HELD:
            self._over()

    def close(self) -> None:
        if self._ssh is not None:
            self._ssh.kill()

    # -- what happens --------------------------------------------------------------------------------------------------

    def _hear(self, line: bytes) -> None:
        found = frames.parse_frame(self.task.marker, line)
        if found is None:
            self._screen.show(self.task.name, line)
            return
        kind = found["kind"]
        if kind in (frames.STARTED, frames.ATTACHED):
            self._held(kind == frames.ATTACHED, found)
        elif kind == frames.ENDED:
            self._agent_ended(int(found["code"]))
        elif kind == frames.BUSY:
            self._end_ssh()
            self._busy(str(found["by"]))
        elif kind == frames.NONE:
            self._end_ssh()
            self.may_live = False
            self._over()
        elif kind == frames.FAILED:
            self._end_ssh()
            self._fail(str(found["why"]))

    def _held(self, attached: bool, found: dict[str, object]) -> None:
        self.state = State.HELD
        self.is_busy = False
        self.may_live = True
        self._said = ""
        if attached:
            self._screen.say(f"{self.shown}: its agent runs already (pid {found['pid']}); connected to it")
        else:
            self._screen.say(f"{self.shown}: agent started (pid {found['pid']})")
        if self.stopping and self._ssh is not None:
            self._ssh.write(frames.stop_line(self.stopping))
        self._changed()

    def _agent_ended(self, code: int) -> None:
        self._end_ssh()
        self.may_live = False
        if code == frames.RUNS_ALREADY:
            self._busy("an ftlaunch that was started there")
            return
        self.last_code = code
        how = f"was killed by {_signal_name(-code)}" if code < 0 else f"ended with exit code {code}"
        if code in FINAL_CODES or self.stopping or not self.is_wanted:
            self._screen.say(f"{self.shown}: agent {how}")
            self._over()
            return
        self._pause(self._next_pause_s(), f"agent {how}; starting it again")

    def _busy(self, by: str) -> None:
        if self.stopping:
            self.may_live = False
            self._over()
            return
        self._failures = 0
        self.is_busy = True
        self._pause(BUSY_PAUSE_S, f"its agent runs already, under {by}: left alone")

    def _too_slow(self, ssh: _Ssh) -> None:
        if self._ssh is ssh and self.state is State.CONNECTING:
            self._end_ssh()
            self._fail(f"no answer within {ANSWER_S:.0f} s, though ssh has not failed")

    def _ssh_ended(self, code: int | None) -> None:
        """ssh, or the connection's far end, is gone, and the agent's end was not reported."""
        words = self._ssh.words() if self._ssh is not None else ""
        was_held = self.state is State.HELD
        self._end_ssh()
        if was_held:
            self._failures = 0
            self._pause(
                1.0, f"the connection is lost ({words or _why(code)}); its agent goes on by itself. Connecting again"
            )
        else:
            self._fail(words or _why(code))

    def _fail(self, why: str) -> None:
        self.is_busy = False
        if not self.may_live and (self.stopping or not self.is_wanted):
            self._over()
            return
        pause_s = self._next_pause_s()
        self._pause(pause_s, f"no agent could be started: {why}\ntry: {self.task.try_command}\ntrying again")

    def _next_pause_s(self) -> float:
        self._failures += 1
        return float(min(LONGEST_PAUSE_S, 2.0 ** (self._failures - 1)))

    def _pause(self, seconds: float, why: str) -> None:
        """The same words are said once, however often it is tried."""
        self.state = State.PAUSING
        if why != self._said:
            self._said = why
            first, *others = why.splitlines()
            self._screen.say("\n".join([f"{self.shown}: {first}", *(f"    {line}" for line in others)]))
        self._loop.set_bound(f"connect {self.task.name}", seconds, self.connect)
        self._changed()

    def _over(self) -> None:
        self._end_ssh()
        self.state = State.OVER
        self._changed()

    def _end_ssh(self) -> None:
        ssh, self._ssh = self._ssh, None
        if ssh is not None:
            ssh.kill()


class _Ssh:
    """One `ssh` process and its three pipes."""

    def __init__(
        self,
        argv: tuple[str, ...],
        order: bytes,
        loop: EventLoop,
        hear: Callable[[bytes], None],
        ended: Callable[[int | None], None],
    ) -> None:
        parent = os.getpid()
        self._loop, self._hear, self._on_ended = loop, hear, ended
        self._process = subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            preexec_fn=lambda: die_with_parent(parent),  # noqa: PLW1509 - this process has one thread
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self._out = Lines(self._process.stdout.fileno())
        self._err = Lines(self._process.stderr.fileno())
        self._in = Outlet(self._process.stdin.fileno(), loop, _ORDER_LIMIT)
        self._said: list[str] = []
        self._is_over = False
        loop.register(self._out, self._read)
        loop.register(self._err, self._read_words)
        self._in.write(order)

    def write(self, line: bytes) -> None:
        self._in.write(line)

    def words(self) -> str:
        """What ssh, the remote shell or the interpreter said; a multi-line complaint in one line, its end counts."""
        self._read_words()
        lines = [line.strip() for line in self._said if line.strip()]
        return "; ".join(lines[-3:])[-500:]

    def _read(self) -> None:
        for line in self._out.read():
            self._hear(line)
            if self._is_over:
                return
        if self._out.closed:
            self._loop.unregister(self._out)
            # ssh closes this when the far end does; then it ends, or its connection is of no use any more.
            try:
                code: int | None = self._process.wait(1.0)
            except subprocess.TimeoutExpired:
                code = None
            self._on_ended(code)

    def _read_words(self) -> None:
        if not self._err.closed:
            self._said += [line.decode("utf-8", "replace") for line in self._err.read()]
            del self._said[:-_KEPT_LINES]
        if self._err.closed:
            self._loop.unregister(self._err)

    def kill(self) -> None:
        if self._is_over:
            return
        self._is_over = True
        self._loop.unregister(self._out)
        self._loop.unregister(self._err)
        self._in.close()
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(2.0)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._process.stderr):
            if stream is not None:
                stream.close()


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _why(code: int | None) -> str:
    if code is None:
        return "the far end closed it"
    if code < 0:
        return f"ssh was killed by {_signal_name(-code)}"
    known = {127: "the interpreter is not there", 126: "the interpreter cannot be run", 255: "ssh failed"}
    return f"ssh ended with {code}" + (f": {known[code]}" if code in known else "")
