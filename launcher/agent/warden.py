"""The warden: a tiny process that outlives a killed agent just long enough to end everything the agent had started.

It holds the read end of a pipe whose write end only the agent has. End-of-file means that the agent is gone, however
it died; then every process whose environment carries the run's random token gets SIGKILL, until none is left.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time

from launcher.process import RUN_TOKEN_VARIABLE, carriers_of, kill_all

_SWEEP_FOR_S = 10.0
_QUIET_SWEEPS = 3  # a process that was between fork and exec while we looked shows up in the next sweep


class Warden:
    """The agent's side."""

    def __init__(self, token: str) -> None:
        self._token = token
        self._write_end = -1
        self.process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        read_end, self._write_end = os.pipe()
        environ = {name: value for name, value in os.environ.items() if name != RUN_TOKEN_VARIABLE}
        process = subprocess.Popen(
            [sys.executable, "-m", "launcher.agent.warden", self._token],
            stdin=read_end,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            env=environ,
        )
        os.close(read_end)
        return process

    def ensure_running(self) -> bool:
        """Start it again if somebody has killed it; True when that was needed."""
        if self.process.poll() is None:
            return False
        os.close(self._write_end)
        self.process = self._start()
        return True

    def release(self) -> None:
        """The agent ends in order: let the warden look once and go."""
        os.close(self._write_end)
        try:
            self.process.wait(timeout=_SWEEP_FOR_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def main(token: str) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(OSError):
        os.read(0, 1)  # returns at end-of-file: nothing is ever written
    deadline = time.monotonic() + _SWEEP_FOR_S
    quiet = 0
    while quiet < _QUIET_SWEEPS and time.monotonic() < deadline:
        pids = carriers_of(token)
        kill_all(pids)
        quiet = 0 if pids else quiet + 1
        time.sleep(0.05)


if __name__ == "__main__":
    main(sys.argv[1])
