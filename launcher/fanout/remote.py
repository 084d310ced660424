"""One node as its head sees it: a connection that is made, lost and made again, and how its agent ended.

Invariant: an agent is started only by an order over a live connection, and at most one lives on a machine (see
presence.py); so connecting again is always safe, and is the answer to everything but an exit code that is final.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
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
_SSH_FAILED = 255
_KEPT_LINES = 20
_AGAIN_AFTER_S = 300.0  # one kind of trouble is told again
_LAST_LINE_CHARS = 500


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
        self.trouble = ""  # why no agent could be started when it was tried last
        self.last_line = ""  # of the agent, or why there is none: its error where it has named one
        self._pid = 0  # of the agent whose output `_num_bytes` counts
        self._num_bytes = 0
        self._had_to = 0  # what comes again up to here has been shown
        self._heard_at = ""
        self._failures = 0
        self._said: dict[str, float] = {}  # when each kind of trouble was said

    @property
    def final_code(self) -> int | None:
        """The exit code after which no agent is started here any more; none after a stop."""
        return self.last_code if self.last_code in FINAL_CODES and not self.stopping else None

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
            self._num_bytes += len(line) + 1
            if self._num_bytes > self._had_to:
                self._heard_at = time.strftime("%H:%M:%S")
                self._screen.show(self.task.name, line)
                self._remember(line)
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
        elif kind == frames.REFUSED:
            self._refused(str(found["why"]), int(found["code"]))

    def _go_on_reading(self, pid: int, begins: int, unheard: int) -> None:
        """The agent's newest output comes again; see AgentHost._accept."""
        is_known = pid == self._pid
        self._had_to = self._num_bytes if is_known else unheard
        self._pid, self._num_bytes = pid, begins
        if begins > self._had_to:
            since = f" from {self._heard_at} on" if is_known and self._heard_at else ""
            self._screen.say(
                f"{self.shown}: {begins - self._had_to} bytes of its output{since} were not received; its own records "
                f"are in the output folder: ftlaunch/events/{self.task.name}.jsonl and ftlaunch/logs/"
            )

    def _remember(self, line: bytes) -> None:
        text = line.decode("utf-8", "replace").strip()[:_LAST_LINE_CHARS]
        if text and not (_is_error(self.last_line) and not _is_error(text)):
            self.last_line = text

    def _refused(self, why: str, code: int) -> None:
        self._end_ssh()
        self.may_live = self.is_busy = False
        self.last_code, self.last_line, self.trouble = code, why, ""
        self._screen.say(f"{self.shown}: {why}. It is not tried again")
        self._over()

    def _held(self, attached: bool, found: dict[str, object]) -> None:
        self.state = State.HELD
        self.is_busy = False
        self.may_live = True
        self.trouble = ""
        self._said.clear()
        if attached:
            self._screen.say(f"{self.shown}: its agent runs already (pid {found['pid']}); connected to it")
            self._go_on_reading(int(str(found["pid"])), int(str(found["begins"])), int(str(found["unheard"])))
        else:
            self.last_line = ""
            self._pid, self._num_bytes, self._had_to = int(str(found["pid"])), 0, 0
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
            again = "" if code == 0 or code not in FINAL_CODES or self.stopping else "; it is not started again"
            self._screen.say(f"{self.shown}: agent {how}{again}")
            self._over()
            return
        self._pause(self._next_pause_s(), "ended", f"agent {how}; starting it again")

    def _busy(self, by: str) -> None:
        if self.stopping:
            self.may_live = False
            self._over()
            return
        self._failures = 0
        self.is_busy = True
        self.trouble = ""
        self._pause(BUSY_PAUSE_S, "busy", f"its agent runs already, under {by}: left alone")

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
                1.0,
                "lost",
                f"the connection is lost ({words or _why(code)}); if its agent lives, it goes on. Connecting again",
            )
        else:
            self._fail(words or _why(code), _kind_of(words) if code == _SSH_FAILED else "")

    def _fail(self, why: str, kind: str = "") -> None:
        """`kind`: of what ssh says in many words while a machine goes and comes; else every other `why` is one."""
        self.is_busy = False
        self.trouble = why
        if not self.may_live and (self.stopping or not self.is_wanted):
            self._over()
            return
        pause_s = self._next_pause_s()
        self._pause(
            pause_s, kind or why, f"no agent could be started: {why}\ntry: {self.task.try_command}\ntrying again"
        )

    def _next_pause_s(self) -> float:
        self._failures += 1
        return float(min(LONGEST_PAUSE_S, 2.0 ** (self._failures - 1)))

    def _pause(self, seconds: float, kind: str, why: str) -> None:
        """One kind of trouble is said once, and again in one line after five minutes, however often it is tried."""
        self.state = State.PAUSING
        first, *others = why.splitlines()
        now = time.monotonic()
        if kind not in self._said:
            self._screen.say("\n".join([f"{self.shown}: {first}", *(f"    {line}" for line in others)]))
            self._said[kind] = now
        elif kind != "busy" and now - self._said[kind] > _AGAIN_AFTER_S:
            self._screen.say(f"{self.shown}: still {first}")
            self._said[kind] = now
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


def _is_error(line: str) -> bool:
    return line.startswith("ftlaunch") and " error: " in line


def _kind_of(words: str) -> str:
    """A machine that goes and comes is "timed out", "No route to host", "Connection refused": one kind."""
    if any(text in words for text in ("Permission denied", "Host key verification", "HOST IDENTIFICATION")):
        return "login"
    return "name" if "resolve hostname" in words else "unreachable"


def _why(code: int | None) -> str:
    if code is None:
        return "the far end closed it"
    if code < 0:
        return f"ssh was killed by {_signal_name(-code)}"
    known = {127: "the interpreter is not there", 126: "the interpreter cannot be run", _SSH_FAILED: "ssh failed"}
    return f"ssh ended with {code}" + (f": {known[code]}" if code in known else "")
