"""The agent's side of the fork server: start it, ask it for ranks, start it anew when it has died."""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from launcher.process import RUN_TOKEN_VARIABLE

FD_VARIABLE = "FTLAUNCH_FORKSERVER_FD"
ONCE_VARIABLE = "FTLAUNCH_FORKSERVER_ONCE"
_ANSWER_BYTES = 65536
_DEATH_BOUND_S = 10.0


class ForkServerError(Exception):
    """The fork server died or did not answer in time; `log_path` holds what it said."""

    def __init__(self, message: str, log_path: Path, exit_code: int | None) -> None:
        super().__init__(message)
        self.log_path = log_path
        self.exit_code = exit_code


@dataclass(frozen=True)
class Readiness:
    import_seconds: float
    num_threads: int
    cuda_touched: bool


class ForkServer:
    """One running fork server. With `once`, it becomes the first rank it is asked for instead of forking."""

    def __init__(self, environ: Mapping[str, str], token: str, log_path: Path, *, once: bool = False) -> None:
        self.log_path = log_path
        self.readiness: Readiness | None = None
        log_path.parent.mkdir(parents=True, exist_ok=True)
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        env = {**environ, RUN_TOKEN_VARIABLE: token, FD_VARIABLE: str(theirs.fileno())}
        if once:
            env[ONCE_VARIABLE] = "1"
        with log_path.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "launcher.train.forkserver"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=env,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        theirs.close()

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def pid(self) -> int:
        return self.process.pid

    def alive(self) -> bool:
        return self.process.poll() is None

    def read_readiness(self) -> Readiness:
        """Called when the socket is readable for the first time. Raises ForkServerError when the imports failed."""
        answer = self._answer(timeout_s=5.0)
        self.readiness = Readiness(
            float(answer["import_seconds"]), int(answer["num_threads"]), bool(answer["cuda_touched"])
        )
        return self.readiness

    def start_rank(self, spec: Path, environ: Mapping[str, str], link: socket.socket, log_path: Path) -> int:
        """Fork one rank; its pid. The rank is (or at once becomes) a child of this process.

        `environ` holds only what differs from the fork server's own environment.
        """
        log_path.parent.mkdir(parents=True, exist_ok=True)
        log_fd = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            request = json.dumps({"spec": str(spec), "environ": dict(environ)}).encode()
            socket.send_fds(self._socket, [request], [link.fileno(), log_fd])
        except OSError as error:
            raise self._failed(f"the fork server is gone ({error})") from error
        finally:
            os.close(log_fd)
        return int(self._answer(timeout_s=30.0)["pid"])

    def hand_over(self) -> None:
        """This process has become a rank (`once`): the caller watches and reaps it from now on."""
        self._socket.close()
        self.process.returncode = (
            0  # keeps Popen from reaping, or complaining about, a process that is not its own any more
        )

    def stop(self) -> None:
        self._socket.close()
        if self.alive():
            self.process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # stuck in the kernel: nothing more can be done here
            self.process.wait(timeout=_DEATH_BOUND_S)

    def _answer(self, timeout_s: float) -> dict[str, float | int | bool]:
        readable, _, _ = select.select([self._socket], [], [], timeout_s)
        packet = self._socket.recv(_ANSWER_BYTES) if readable else b""
        if not packet:
            raise self._failed(
                "the fork server died" if readable else f"no answer of the fork server within {timeout_s:.0f} s"
            )
        answer: dict[str, float | int | bool] = json.loads(packet)
        return answer

    def _failed(self, message: str) -> ForkServerError:
        deadline = time.monotonic() + 2.0
        while self.alive() and time.monotonic() < deadline:
            time.sleep(0.01)
        return ForkServerError(message, self.log_path, self.process.poll())
