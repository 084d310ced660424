"""`cluster.launcher: deepspeed`: DeepSpeed's own runner starts one agent on each host, over pdsh as it does by default.

The order lies in the output folder, readable by this user alone; the command names only its path. The runner works in
`ftlaunch/launch/`, where it finds `.deepspeed_env`, and changes into that folder on every host.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.errors import ExitCode, UserError
from launcher.plan.launch_files import hostfile_text
from launcher.platforms.place import Place

if TYPE_CHECKING:
    from launcher.fanout.plan import FanOut

HOSTFILE = "hostfile.agents"  # beside `hostfile`, which counts ranks: here each host has one slot, for its agent
ORDER = "order.json"
LAUNCH_PY_KILLS_AFTER_S = 30.0  # launch.py, terminate_process_tree
_STOP_MARGIN_S = 30.0
_KNOWN_CODES = frozenset(int(code) for code in ExitCode)


def launch_folder(output_dir: Path) -> Path:
    return output_dir / "ftlaunch" / "launch"


def runner_argv(output_dir: Path, place: Place, agent: Sequence[str]) -> list[str]:
    """Naming the master spares the runner an ssh to the first host, and a wrong guess of its address."""
    folder = launch_folder(output_dir)
    return [
        sys.executable,
        "-m",
        "deepspeed.launcher.runner",
        f"--hostfile={folder / HOSTFILE}",
        f"--master_addr={address_of(place.hosts[0])}",
        "--force_multi",
        "--no_local_rank",
        *("--module" if part == "-m" else part for part in agent),
        f"--as-node={folder / ORDER}",
    ]


def address_of(host: str) -> str:
    """IPv4 where the name has one; the name as it is where it has none yet."""
    name = host.rpartition("@")[2]
    with contextlib.suppress(OSError, UnicodeError):
        return str(socket.getaddrinfo(name, None, socket.AF_INET)[0][4][0])
    return name


def agents_hostfile(hosts: Sequence[str]) -> str:
    """A user before `@` stays: pdsh takes it."""
    users = [host[: host.rfind("@") + 1] for host in hosts]
    return hostfile_text([(user + address_of(host), 1) for user, host in zip(users, hosts, strict=True)])


class Runner:
    """One run of DeepSpeed's runner. What it cannot do is said at the start; see docs/clusters.md."""

    def __init__(self, fan_out: FanOut, say: Callable[[str], None], head: str) -> None:
        self._fan_out, self._say, self._head = fan_out, say, head
        self._config = fan_out.job.config
        self._folder = launch_folder(fan_out.output_dir)
        self._process: subprocess.Popen[bytes] | None = None
        self._stopped = False

    def start(self) -> None:
        """Raises UserError for what is missing on this machine."""
        if self._process is not None:
            return
        if importlib.util.find_spec("deepspeed") is None:
            raise UserError("cluster.launcher: deepspeed: DeepSpeed is not installed on this machine")
        if shutil.which("pdsh") is None:
            raise UserError(
                "cluster.launcher: deepspeed: DeepSpeed's runner uses pdsh, which is not installed on this machine. "
                "Install it (apt-get install pdsh), or write cluster.launcher: ssh."
            )
        if self._config.spot.grace_seconds > LAUNCH_PY_KILLS_AFTER_S - 2:
            self._say(
                f"spot.grace_seconds is {self._config.spot.grace_seconds:g}, but DeepSpeed's launch.py kills the "
                f"agents {LAUNCH_PY_KILLS_AFTER_S:.0f} s after a stop; cluster.launcher: ssh keeps to it"
            )
        order = self._fan_out.order(None, self._head, self._folder)
        self._folder.mkdir(parents=True, exist_ok=True)
        (self._folder / HOSTFILE).write_text(agents_hostfile(self._fan_out.place.hosts), "utf-8")
        path = self._folder / ORDER
        path.unlink(missing_ok=True)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(fd, "wb") as stream:
            stream.write(order.to_line())
            stream.flush()
            os.fsync(stream.fileno())
        argv = runner_argv(self._fan_out.output_dir, self._fan_out.place, self._fan_out.agent)
        self._say(f"DeepSpeed's runner starts {len(self._fan_out.remotes)} agents: {' '.join(argv)}")
        environ = {**os.environ, "PYTHONPATH": _python_path(), "DS_ENV_FILE": ".deepspeed_env"}
        self._process = subprocess.Popen(
            argv, cwd=self._folder, env=environ, stdin=subprocess.DEVNULL, start_new_session=True
        )

    def stop(self) -> None:
        """Called from a signal handler, again for every signal; the runner answers the first one with a pkill."""
        if self._process is not None and not self._stopped:
            self._stopped = True
            self._process.terminate()

    def wait(self) -> int:
        """pdsh -S gives the highest exit code of all hosts."""
        assert self._process is not None
        code = self._process.wait()
        if self._stopped:
            self._wait_for_agents()
            return 0 if code == 0 else self._config.spot.exit_code
        if code in _KNOWN_CODES:
            return code
        self._say(f"DeepSpeed's runner ended with {code}, which is no exit code of an agent; run it again")
        return self._config.spot.exit_code

    def _wait_for_agents(self) -> None:
        """The runner does not wait for those that it has told to end; they hold the run's lock while they live."""
        deadline = time.monotonic() + self._config.spot.grace_seconds + _STOP_MARGIN_S
        try:
            fd = os.open(self._fan_out.output_dir / "ftlaunch" / "lock", os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return
        try:
            while time.monotonic() < deadline:
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    return
                except BlockingIOError:
                    time.sleep(0.2)  # a lock has no event
                except OSError:
                    self._say("this file system has no locks: whether the agents have ended cannot be seen from here")
                    return
            self._say("not all agents have ended in time: one still holds the lock of the output folder")
        finally:
            os.close(fd)

    def close(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_STOP_MARGIN_S)
        (self._folder / ORDER).unlink(missing_ok=True)


def _python_path() -> str:
    """The runner passes PYTHONPATH on, its own working directory in front."""
    root = str(Path(__file__).absolute().parents[2])
    return os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH", "")])])
