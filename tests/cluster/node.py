"""One node of a test cluster: processes in its namespaces, its link, its speed."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.cluster.processes import kill_in, namespace_of, processes_in
from tests.cluster.ssh import SshFiles, find_sshd

TRAFFIC = (sys.executable, "-I", "-S", str(Path(__file__).with_name("traffic.py")))


class ClusterError(Exception):
    """The test cluster itself failed: nothing that the code under test did."""


def sh(argv: Sequence[str], stdin: str = "") -> str:
    """Output of a short command; its words when it fails."""
    done = subprocess.run(argv, input=stdin, capture_output=True, text=True, timeout=30, check=False)
    if done.returncode != 0:
        raise ClusterError(f"{shlex.join(argv)} gave {done.returncode}: {done.stderr.strip()}\n{stdin}".rstrip())
    return done.stdout


@dataclass(frozen=True)
class Holder:
    """The process that keeps namespaces alive, and the network namespace, held open so that its inode stays its own."""

    process: subprocess.Popen[str]
    network: int  # file descriptor

    @classmethod
    def start(cls, label: str, host: str, folder: Path, shm: str) -> Holder:
        """Returns at once; `ready` waits until the namespaces can be entered."""
        kinds = ["--net", "--mount", "--uts"] if host else ["--net"]
        script = str(Path(__file__).with_name("holder.sh"))
        process = subprocess.Popen(
            ["unshare", *kinds, "sh", script, label, host, str(folder), shm],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        return cls(process, -1)

    def ready(self) -> Holder:
        assert self.process.stdout is not None
        if self.process.stdout.readline() != "ready\n":
            raise ClusterError(f"the namespaces could not be made (exit {self.process.wait()}): see its messages above")
        return Holder(self.process, os.open(f"/proc/{self.process.pid}/ns/net", os.O_RDONLY))

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def inode(self) -> int:
        return os.fstat(self.network).st_ino

    def sh(self, *argv: str, stdin: str = "") -> str:
        """A command in the network namespace alone: the machine's own file system and tools."""
        return sh(["nsenter", f"--net=/proc/{self.pid}/ns/net", *argv], stdin)

    def close(self) -> None:
        """After the keeper has killed the process."""
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            stream.close()
        self.process.wait(10)
        if self.network >= 0:
            os.close(self.network)


@dataclass(eq=False)
class Node:
    name: str
    ip: str
    index: int
    folder: Path
    holder: Holder
    switch: Holder
    ssh_files: SshFiles | None
    env: dict[str, str]  # of every process that `run` starts; a test may add to it
    set_loss: Callable[[Node, float], None]
    started: list[subprocess.Popen[Any]] = field(default_factory=list)

    def __repr__(self) -> str:
        return f"<{self.name} {self.ip}>"

    @property
    def hosts_file(self) -> Path:
        """/etc/hosts of this node. Write to it in place (`write_text`): it is a bind mount."""
        return self.folder / "hosts"

    def run(self, argv: Sequence[str], *, env: Mapping[str, str] | None = None, **popen: Any) -> subprocess.Popen[Any]:
        """Starts a process in the node; the PID of the Popen is the program's own. Arguments are those of Popen.

        `env` is added to the node's own, a small one: nothing comes from the tests' environment but PATH,
        HOME and the language. Returns once the process is in the node, so that `kill_all` is sure to find it.
        """
        popen.setdefault("start_new_session", True)  # Ctrl-C in the developer's terminal is no event of the cluster
        directory = os.fspath(popen.pop("cwd", None) or os.getcwd())
        enter = ["nsenter", f"--target={self.holder.pid}", "--net", "--mount", "--uts", "--"]
        go = ["sh", "-c", 'cd "$0" && exec "$@"', directory]  # a change of mount namespace ends in its root
        process = subprocess.Popen([*enter, *go, *argv], env={**self.env, **(env or {})}, **popen)
        self.started.append(process)
        while process.poll() is None and namespace_of(process.pid) != self.holder.inode:
            time.sleep(0.0005)
        return process

    def output(self, argv: Sequence[str], *, timeout_s: float = 30, **popen: Any) -> str:
        """What a short command prints; CalledProcessError with its messages when it fails."""
        process = self.run(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **popen)
        try:
            out, err = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            raise
        if process.returncode != 0:
            raise subprocess.CalledProcessError(process.returncode, list(argv), out, err)
        return str(out)

    def processes(self) -> list[int]:
        return [pid for pid in processes_in({self.holder.inode}) if pid != self.holder.pid]

    def kill_all(self) -> list[int]:
        """SIGKILL to every process in the node, sshd and what came in over ssh too; returns their PIDs.

        The others see closed connections at once, as when a container is killed. For a machine that falls silent, `cut`
        first. The node's /dev/shm keeps its files. `start_sshd` makes the node reachable over ssh again.
        """
        killed = kill_in({self.holder.inode}, spared={self.holder.pid})
        for process in self.started:
            if process.pid in killed:
                process.wait(10)
        return killed

    def cut(self) -> None:
        """Pulls the cable: no carrier, no error at open connections, packets are lost in silence."""
        self.switch.sh("ip", "link", "set", self.port, "down")

    def mend(self) -> None:
        self.switch.sh("ip", "link", "set", self.port, "up")

    def shape(self, *, mbit: float | None) -> None:
        """Bounds what the node sends, and separately what it receives; None: no bound."""
        for holder, device in ((self.holder, "eth0"), (self.switch, self.port)):
            if mbit is None:
                if "tbf" in holder.sh("tc", "qdisc", "show", "dev", device):
                    holder.sh("tc", "qdisc", "del", "dev", device, "root")
            else:
                burst_bytes = max(16_384, int(mbit * 1e6 / 8 / 100))  # 10 ms, at least a few packets
                rate = ["rate", f"{int(mbit * 1e6)}bit", "burst", str(burst_bytes), "latency", "50ms"]
                holder.sh("tc", "qdisc", "replace", "dev", device, "root", "tbf", *rate)

    def lossy(self, percent: float) -> None:
        """Loses this share of the packets that the node sends and of those that it receives; 0: none."""
        self.set_loss(self, percent)

    def reaches(self, other: Node, *, timeout_s: float = 1.0) -> bool:
        """Whether TCP gets an answer, be it a refusal."""
        return self.run([*TRAFFIC, "connect", other.ip, "22", str(timeout_s)], stderr=subprocess.DEVNULL).wait() == 0

    def start_sshd(self, *, within_s: float = 10.0) -> None:
        """Again after `kill_all`, for example."""
        if self.ssh_files is None:
            raise ClusterError("the cluster was made with ssh=False")
        log = self.ssh_files.log(self.name)
        log.write_text("")
        sshd = find_sshd()
        assert sshd is not None
        argv = [sshd, "-D", "-f", str(self.ssh_files.sshd_config(self.name)), "-E", str(log)]
        process = self.run(argv, stdin=subprocess.DEVNULL, start_new_session=True)
        deadline = time.monotonic() + within_s
        while "Server listening" not in log.read_text():
            if process.poll() is not None or time.monotonic() > deadline:
                raise ClusterError(f"sshd of {self.name} does not listen (exit {process.poll()}): {log.read_text()}")
            time.sleep(0.01)  # sshd tells of its readiness by its log alone

    @property
    def port(self) -> str:
        """The switch's end of the node's link."""
        return f"p{self.index}"
