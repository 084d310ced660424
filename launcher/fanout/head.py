"""The near end of a fan-out, in the process of the start itself.

    fan_out = plan_fan_out(job, place, environ)
    if fan_out is not None:
        with Head(fan_out, console.say, signals.pending) as head:
            if head.runs_agent:
                ...  # refuse what this node cannot do
                head.start()
                code = ...  # the agent's life
            else:
                code = head.follow()
            head.ended(code)

Enter it with `StopSignals` in force (stop signals reach the handlers that are there, and are passed on to the nodes),
and before the run's lock is asked for; `start` before anything else is started.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from launcher.errors import ExitCode, RunsHereAlready, UserError
from launcher.fanout import deepspeed_runner, presence
from launcher.fanout.node import hello
from launcher.fanout.order import without_start
from launcher.fanout.pipes import Lines
from launcher.fanout.plan import FanOut, Remote
from launcher.fanout.process import ENDS_WITHIN_S, STOP_MARGIN_S, Settings
from launcher.fanout.viewer import view
from launcher.link import STOP_SIGNALS

_LEAVE_MARGIN_S = 10.0
_AGAIN_AFTER_S = 10.0  # what kills the fan-out (memory, a person) would only be fed


class Head:
    """`runs_agent`: this process is to be its node's agent. Else `follow` is what it does.

    Raises UserError where the head cannot do its part, RunsHereAlready where another start on this machine does it.
    """

    def __init__(
        self, fan_out: FanOut, say: Callable[[str], None], stopped: Callable[[], bool] = lambda: False
    ) -> None:
        """`stopped`: whether a stop signal has come already, before there was anybody to pass it on to."""
        self._fan_out = fan_out
        self._say = say
        self._stop_came_before = stopped
        self._config = fan_out.job.config
        self._id = secrets.token_hex(8)
        self._listener: socket.socket | None = None
        self._view: socket.socket | None = None
        self._before: dict[int, Any] = {}
        self._pid_fd = self._control = -1
        self._process: subprocess.Popen[bytes] | None = None
        self._runner: deepspeed_runner.Runner | None = None
        self._exit_code: int | None = None
        self._stopped = False
        self._started_s = 0.0
        self._marker = ""
        self._report: Lines | None = None
        self._final_end: tuple[str, int, str] | None = None

    @property
    def pid(self) -> int | None:
        """Of the fan-out process, which is not to be ended with what the agent has started."""
        return self._process.pid if self._process is not None else None

    @property
    def runs_agent(self) -> bool:
        return self._listener is not None

    def __enter__(self) -> Head:
        if self._fan_out.launcher == "deepspeed":
            self._runner = deepspeed_runner.Runner(self._fan_out, self._say, self._id)
        else:
            self._take_own_node()
        self._before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
        for number, before in self._before.items():
            if before is not signal.SIG_IGN:  # nohup
                signal.signal(number, self._pass_on)
        return self

    def start(self) -> None:
        """From now on agents are started elsewhere. Raises UserError where this machine has not what that takes."""
        if self._runner is not None:
            self._runner.start()
        elif self._process is None and self._has_ssh():
            self._start_process()
        if self._stopped or self._stop_came_before():
            self._stop(signal.SIGTERM)

    def _has_ssh(self) -> bool:
        """Where nobody has asked for ssh, the same command may be meant to be run on each machine."""
        if shutil.which("ssh") is not None:
            return True
        lack = "there is no `ssh` on this machine, and cluster.hosts names others"
        if self._fan_out.own_rank is None or self._config.cluster.launcher == "ssh":
            raise UserError(
                f"{lack}. Install OpenSSH's client; or write cluster.launcher: none and run the same command on each."
            )
        self._say(f"{lack}: run the same command on each of them")
        return False

    def _take_own_node(self) -> None:
        own_rank = self._fan_out.own_rank
        if own_rank is not None:
            key = presence.run_key(self._config.output_dir, f"n{own_rank}")
            self._listener = presence.claim(key)
            if self._listener is None:
                self._view = self._connect_to_own(key)

    def _connect_to_own(self, key: str) -> socket.socket:
        """Another head has started this machine's agent. Raises RunsHereAlready where it is a start on this machine."""
        remote = Remote(self._fan_out.own_rank or 0, f"n{self._fan_out.own_rank}", "")
        order = self._fan_out.order(remote, self._id, Path.cwd())
        connection = presence.reach(key)
        if connection is None:
            raise RunsHereAlready("this node's agent is run by another process on this machine, which does not answer")
        connection.sendall(hello(order, owns=False))
        self._marker = order.marker
        return connection

    def _start_process(self) -> None:
        folder, nodes = Path.cwd(), []
        for remote in self._fan_out.remotes:
            order = self._fan_out.order(remote, self._id, folder)
            lines = [one.to_line().decode("utf-8", "surrogateescape") for one in (order, without_start(order))]
            nodes.append((remote.name, remote.host, order.marker, lines[0], lines[1]))
        settings = Settings(
            nodes=tuple(nodes),
            grace_s=self._config.spot.grace_seconds,
            stop_exit_code=self._config.spot.exit_code,
            wait_s=self._config.cluster.wait_seconds,
            has_agent=self.runs_agent or self._view is not None,
            presence_fd=self._listener.fileno() if self._listener is not None else -1,
            head_name=f"the start on {socket.gethostname()} (pid {os.getpid()})",
            is_fixed=self._fan_out.place.min_nodes == self._fan_out.place.max_nodes,
        )
        settings_fd = os.memfd_create("fan-out")  # not an argument: it holds the token
        with os.fdopen(settings_fd, "w+b") as stream:
            stream.write(json.dumps(asdict(settings)).encode("utf-8", "surrogateescape"))
            stream.flush()
            stream.seek(0)
            read_end, self._control = os.pipe()
            self._process = subprocess.Popen(
                [sys.executable, "-m", "launcher.fanout.process", str(settings_fd)],
                stdin=read_end,
                stdout=subprocess.PIPE,
                pass_fds=[fd for fd in (settings_fd, settings.presence_fd) if fd >= 0],
                start_new_session=True,
            )
        os.close(read_end)
        assert self._process.stdout is not None
        self._report = Lines(self._process.stdout.fileno())
        self._pid_fd = os.pidfd_open(self._process.pid)
        self._started_s = time.monotonic()

    # -- while it runs -------------------------------------------------------------------------------------------------

    def _pass_on(self, number: int, stack: FrameType | None) -> None:
        self._stop(number)
        before = self._before[number]
        if callable(before):
            before(number, stack)

    def _stop(self, number: int) -> None:
        self._stopped = True
        name = signal.Signals(number).name
        self._tell(f"stop {name}\n")
        if self._runner is not None:
            self._runner.stop()
        if self._view is not None:
            with contextlib.suppress(OSError):
                self._view.sendall(f"stop {name}\n".encode())

    def _tell(self, line: str) -> None:
        if self._control >= 0:
            with contextlib.suppress(OSError):  # the fan-out is gone: nobody is left to tell
                os.write(self._control, line.encode())

    def look_after(self) -> None:
        """Now and then: a fan-out that somebody has killed is started again; it finds the agents that run."""
        self._read_report()
        if self._pid_fd < 0 or self._exit_code is not None or time.monotonic() < self._started_s + _AGAIN_AFTER_S:
            return
        if not select.select([self._pid_fd], [], [], 0)[0]:
            return
        self._say("the fan-out process was killed; the agents on the other machines run on, a new one looks for them")
        self._let_process_go()
        self._start_process()

    def final_end(self) -> tuple[str, int, str] | None:
        """The first other node whose agent has ended with a code that is final (0 to 3), that code and its last line
        (its error where it has named one). None while there is none, and after a stop. `look_after` finds out."""
        return self._final_end

    def _read_report(self) -> None:
        for line in self._report.read() if self._report is not None else ():
            try:
                found = json.loads(line)
            except ValueError:
                continue  # cut off when the fan-out was killed
            if self._final_end is None:
                self._final_end = (str(found["node"]), int(found["code"]), str(found["line"]))

    def follow(self) -> ExitCode:
        """Where this process is no agent: until the nodes' agents have ended; the exit code is theirs."""
        self.start()
        if self._runner is not None:
            return ExitCode(self._runner.wait())
        if self._view is not None:
            code = view(self._view, self._marker, self._say)
            return ExitCode(code if code in set(ExitCode) else self._config.spot.exit_code)
        assert self._process is not None
        code = self._process.wait()
        self._exit_code = code if code in set(ExitCode) else self._config.spot.exit_code
        return ExitCode(self._exit_code)

    def ended(self, code: int) -> None:
        """This start ends with `code`."""
        self._exit_code = int(code)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._exit_code is None:
            self._exit_code = int(getattr(error, "exit_code", ExitCode.FAILED))
        if self._runner is not None:
            self._runner.close()
        if self._process is not None:
            self._tell(f"ended {self._exit_code}\n")
            self._read_report()
            stop_s = self._config.spot.grace_seconds + STOP_MARGIN_S
            # After a final end the fan-out waits for the others, and stops them then.
            bound_s = stop_s if self._stopped else ENDS_WITHIN_S + (stop_s if self._final_end else 0.0)
            select.select([self._pid_fd], [], [], bound_s + _LEAVE_MARGIN_S)
            self._let_process_go()
        for connection in (self._listener, self._view):
            if connection is not None:
                connection.close()
        for number, before in self._before.items():
            signal.signal(number, before)

    def _let_process_go(self) -> None:
        """The agent may have collected it as an orphan: only the pidfd is sure to mean this process."""
        assert self._process is not None
        os.close(self._control)
        self._control = -1
        with contextlib.suppress(ProcessLookupError):
            if not select.select([self._pid_fd], [], [], 2.0)[0]:
                signal.pidfd_send_signal(self._pid_fd, signal.SIGKILL)
        os.close(self._pid_fd)
        self._pid_fd = -1
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._report = None
