"""The agent's side of the fork server: start it, ask it for ranks, end it. Nothing here waits.

Invariant: answers carry no names, so whoever does not take the answer to a request must not ask again: the next answer
would be taken for that of another rank.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from launcher.process import RUN_TOKEN_VARIABLE

FD_VARIABLE = "FTLAUNCH_FORKSERVER_FD"
ONCE_VARIABLE = "FTLAUNCH_FORKSERVER_ONCE"
TEMPLATE_VARIABLE = "FTLAUNCH_FORKSERVER_TEMPLATE"
_ANSWER_BYTES = 65536


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

    @classmethod
    def from_json(cls, packet: bytes) -> Readiness:
        said = json.loads(packet)
        return cls(float(said["import_seconds"]), int(said["num_threads"]), bool(said["cuda_touched"]))


@dataclass(frozen=True)
class TemplateState:
    """How far the fork server is with the ranks' inputs. `state`: working, ready or failed."""

    state: str
    phase: str = ""
    done: str = ""
    reason: str = ""


class ForkServer:
    """One running fork server. With `once`, it becomes the first rank it is asked for instead of forking; with
    `template` (path of a spec) it prepares the inputs that ranks of this spec begin with."""

    def __init__(
        self,
        environ: Mapping[str, str],
        token: str,
        log_path: Path,
        *,
        once: bool = False,
        template: Path | None = None,
    ) -> None:
        self.log_path = log_path
        self.readiness: Readiness | None = None
        self.template = TemplateState("working") if template and not once else None
        log_path.parent.mkdir(parents=True, exist_ok=True)
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setblocking(False)  # this end only; the fork server waits for requests
        env = {**environ, RUN_TOKEN_VARIABLE: token, FD_VARIABLE: str(theirs.fileno())}
        if once:
            env[ONCE_VARIABLE] = "1"
        elif template is not None:
            env[TEMPLATE_VARIABLE] = str(template)
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

    def ask_for_rank(
        self, spec: Path, environ: Mapping[str, str], link: socket.socket, log_path: Path, memory: Sequence[int] = ()
    ) -> bool:
        """Have one rank forked, which is (or at once becomes) a child of this process; the answer is its pid. False
        where the fork server is gone. Raises OSError where the log cannot be opened.

        `environ` holds only what differs from the fork server's own environment; `memory` are descriptors of
        this process's memory: first for its progress record, then for its snapshots.
        """
        log_path.parent.mkdir(parents=True, exist_ok=True)
        log_fd = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            request = json.dumps({"spec": str(spec), "environ": dict(environ)}).encode()
            socket.send_fds(self._socket, [request], [link.fileno(), log_fd, *memory])
        except OSError:
            return False
        finally:
            os.close(log_fd)
        return True

    def receive(self) -> bytes:
        """The answer that is there (the socket is readable); empty when the fork server is gone."""
        try:
            return self._socket.recv(_ANSWER_BYTES)
        except ConnectionResetError:  # it died with a request unread
            return b""

    def heed(self, packet: bytes) -> bool:
        """Whether it is a notice about the template, and no answer."""
        said = json.loads(packet) if packet else {}
        if "template" not in said:
            return False
        self.template = TemplateState(**said["template"])
        return True

    def hand_over(self) -> None:
        """This process has become a rank (`once`): the caller watches and reaps it from now on."""
        self._socket.close()
        self.process.returncode = (
            0  # keeps Popen from reaping, or complaining about, a process that is not its own any more
        )

    def kill(self) -> None:
        """Ask it nothing more. It is dead once `alive` says so: the caller waits for that."""
        self._socket.close()
        if self.alive():
            self.process.kill()
