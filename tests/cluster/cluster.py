"""Real nodes on one machine: a network namespace each, joined by a bridge in a namespace of its own.

    with TestCluster(2) as cluster:
        a, b = cluster.nodes
        a.run(["ssh", "node1", "hostname"]).wait()

Invariant: nothing of the machine itself is changed. Links, addresses, rules and mounts are made inside the cluster's
own namespaces, which lead nowhere else; they last as long as processes in them, and `keeper.py`, a process that by
design outlives the test run's, kills these and removes the cluster's folder however the test ends.

What the nodes share: the file system (but /dev/shm, /run, /sys), PIDs, processors, memory, and the machine's clock.
So a `pkill` in one node sees the processes of all, and of the machine.
"""

from __future__ import annotations

import itertools
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from tests.cluster.node import ClusterError, Holder, Node, sh
from tests.cluster.processes import kill_in
from tests.cluster.ssh import SshFiles, find_sshd, write_ssh_files

NAME_PREFIX = "ftc-"  # of folders and of the holders' command lines, followed by six random hexadecimal digits
_HERE = Path(__file__).parent
_NETWORK = "10.77.0"


def why_no_cluster(*, ssh: bool = True) -> str | None:
    """The reason why this machine cannot have a test cluster, for a skip; None when it can."""
    if sys.platform != "linux":
        return "network namespaces need Linux"
    if os.geteuid() != 0:
        return "network namespaces need root"
    tools = ["ip", "tc", "iptables-restore", "nsenter", "unshare", *(["ssh", "ssh-keygen", "pdsh"] if ssh else [])]
    missing = [tool for tool in tools if shutil.which(tool) is None]
    if ssh and find_sshd() is None:
        missing.append("sshd")
    if missing:
        return f"missing: {', '.join(missing)} (scripts/install-test-tools.sh installs them)"
    links = "ip link add name v0 type veth peer name v1 && ip link add name br0 type bridge"
    try:
        sh(["unshare", "--net", "--mount", "--uts", "sh", "-c", f"{links} && mount -t tmpfs tmpfs /dev/shm"])
    except (ClusterError, OSError) as error:
        return f"this kernel or container gives no namespaces, links or mounts: {error}"
    return None


class TestCluster:
    """`num_nodes` nodes named node0, node1, ...; all reach each other, and nothing else.

    `ssh`: an sshd in each. `shm_mib`: size of each node's own /dev/shm (None: the kernel's default, half the memory).
    """

    __test__ = False  # not a class of tests

    def __init__(self, num_nodes: int, ssh: bool = True, shm_mib: int | None = None) -> None:
        if not 1 <= num_nodes <= 200:
            raise ValueError(f"num_nodes is {num_nodes}: 1 to 200 fit into one /24")
        self.name = NAME_PREFIX + secrets.token_hex(3)
        self.folder = Path(tempfile.gettempdir()) / self.name
        self.nodes: list[Node] = []
        self.ssh_files: SshFiles | None = None
        self._num_nodes, self._ssh, self._shm_mib = num_nodes, ssh, shm_mib
        self._keeper: subprocess.Popen[str] | None = None
        self._switch: Holder | None = None
        self._holders: list[Holder] = []
        self._relay: subprocess.Popen[str] | None = None
        self._apart: set[tuple[Node, Node]] = set()  # (receiver, sender): what the receiver does not take
        self._loss: dict[Node, float] = {}  # percent
        self._loss_everywhere = 0.0
        self._is_delayed = False

    # -- life ----------------------------------------------------------------------------------------------------------

    def __enter__(self) -> TestCluster:
        try:
            self._build()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Kills every process in the cluster and removes all of it. A second call does nothing."""
        keeper, self._keeper = self._keeper, None
        if keeper is None:
            return
        assert keeper.stdin is not None
        assert keeper.stdout is not None
        try:
            keeper.stdin.write("end\n")
            keeper.stdin.close()
        except BrokenPipeError:
            pass  # somebody has killed the keeper: what it does is done below
        if keeper.wait(60) != 0:
            kill_in({holder.inode for holder in self._holders if holder.network >= 0})
            shutil.rmtree(self.folder, ignore_errors=True)
        keeper.stdout.close()
        for process in itertools.chain(*(node.started for node in self.nodes), [self._relay] if self._relay else []):
            process.wait(10)
        if self._relay is not None:
            _close(self._relay.stdout)
        for holder in self._holders:
            holder.close()

    def _build(self) -> None:
        self._keeper = subprocess.Popen(
            [sys.executable, "-S", "-m", "tests.cluster.keeper", str(self.folder)],
            cwd=_HERE.parents[1],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
            start_new_session=True,
        )
        assert self._keeper.stdout is not None
        if self._keeper.stdout.readline() != "ready\n":
            raise ClusterError("the cluster's keeper did not start: see its messages above")
        self.folder.mkdir(mode=0o700)
        addresses = {f"node{index}": f"{_NETWORK}.{index + 1}" for index in range(self._num_nodes)}
        if self._ssh:
            self.ssh_files = write_ssh_files(self.folder / "ssh", addresses)
        hosts = "127.0.0.1 localhost\n::1 localhost\n" + "".join(f"{ip} {name}\n" for name, ip in addresses.items())
        self._hold("switch", "", self.folder, "")
        for name in addresses:
            folder = self.folder / name
            folder.mkdir()
            (folder / "hosts").write_text(hosts)
            if self.ssh_files is not None:
                shutil.copy(self.ssh_files.config, folder / "ssh_config")
            self._hold(name, name, folder, f"size={self._shm_mib}m" if self._shm_mib else "size=50%")
        self._holders = [holder.ready() for holder in self._holders]
        self._switch, *holders = self._holders
        self._connect(self._switch, holders)
        env = {key: os.environ[key] for key in ("PATH", "HOME", "LANG", "LC_ALL", "TZ", "TMPDIR") if key in os.environ}
        for index, ((name, ip), holder) in enumerate(zip(addresses.items(), holders, strict=True)):
            node = Node(
                name=name,
                ip=ip,
                index=index,
                folder=self.folder / name,
                holder=holder,
                switch=self._switch,
                ssh_files=self.ssh_files,
                env=dict(env),
                set_loss=self._set_loss,
            )
            self.nodes.append(node)
            if self._ssh:
                node.start_sshd()

    def _hold(self, name: str, host: str, folder: Path, shm: str) -> None:
        holder = Holder.start(f"{self.name}-{name}", host, folder, shm)
        self._holders.append(holder)

    def _connect(self, switch: Holder, holders: Sequence[Holder]) -> None:
        assert self._keeper is not None
        assert self._keeper.stdin is not None
        for holder in (switch, *holders):
            self._keeper.stdin.write(f"{holder.pid}\n")
        lines = ["link add br0 type bridge", "link set br0 up"]
        for index, holder in enumerate(holders):
            lines += [
                f"link add p{index} type veth peer name eth0 netns {holder.pid}",
                f"link set p{index} master br0 up",
            ]
        switch.sh("ip", "-batch", "-", stdin="\n".join(lines))
        for index, holder in enumerate(holders):
            address = f"{_NETWORK}.{index + 1}/24 broadcast {_NETWORK}.255"
            holder.sh("ip", "-batch", "-", stdin=f"address add {address} dev eth0\nlink set eth0 up")

    # -- the network between the nodes ---------------------------------------------------------------------------------

    def partition(self, *groups: Sequence[Node]) -> None:
        """Nodes of different groups no longer hear each other; a node in no group still hears, and is heard by, all.

        Packets vanish in silence. A new call takes the place of the one before.
        """
        members = [node for group in groups for node in group]
        if len(members) != len(set(members)):
            raise ValueError(f"a node is in two groups: {groups}")
        self._apart = {
            pair for one, other in itertools.permutations(groups, 2) for pair in itertools.product(one, other)
        }
        self._write_rules()

    def heal(self) -> None:
        """Ends a partition. (A cut link is mended by its node.)"""
        self._apart = set()
        self._write_rules()

    def lossy(self, percent: float) -> None:
        """Loses this share of the packets between any two nodes; 0: none."""
        self._loss_everywhere = _checked_percent(percent)
        self._write_rules()

    def _set_loss(self, node: Node, percent: float) -> None:
        self._loss[node] = _checked_percent(percent)
        self._write_rules()

    def delay(self, ms: float) -> None:
        """Each packet between two nodes arrives `ms` later: a round trip takes twice that. 0: no delay."""
        self._is_delayed = False
        self._write_rules()
        if self._relay is not None:
            self._relay.terminate()
            self._relay.wait(10)
            _close(self._relay.stdout)
            self._relay = None
        if ms <= 0:
            return
        assert self._switch is not None
        pids = [str(node.holder.pid) for node in self.nodes]
        self._relay = subprocess.Popen(
            [
                "nsenter",
                f"--net=/proc/{self._switch.pid}/ns/net",
                sys.executable,
                str(_HERE / "delay.py"),
                str(ms),
                *pids,
            ],
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert self._relay.stdout is not None
        if self._relay.stdout.readline() != "ready\n":
            raise ClusterError("no delay: this kernel has no NFQUEUE, see the messages above")
        self._is_delayed = True
        self._write_rules()

    def _write_rules(self) -> None:
        """All rules are at the receiver: a drop at the sender would be an error that its program sees."""
        for node in self.nodes:
            others = [other for other in self.nodes if other is not node]
            rules = [f"-s {sender.ip} -j DROP" for receiver, sender in self._apart if receiver is node]
            losses = [("", self._loss_everywhere), ("", self._loss.get(node, 0.0))]
            losses += [(f"-s {other.ip} ", self._loss.get(other, 0.0)) for other in others]
            rules += [
                f"{match}-m statistic --mode random --probability {percent / 100:.6f} -j DROP"
                for match, percent in losses
                if percent > 0
            ]
            if self._is_delayed:
                rules.append("-j NFQUEUE --queue-num 0")  # last: a packet that comes out of the queue is taken
            table = ["*filter", ":INPUT ACCEPT", *(f"-A INPUT -i eth0 {rule}" for rule in rules), "COMMIT", ""]
            node.holder.sh("iptables-restore", "-w", stdin="\n".join(table))

    # -- commands ------------------------------------------------------------------------------------------------------

    @property
    def ssh_command(self) -> list[str]:
        """`ssh` with the cluster's own keys, hosts and settings; to be run in a node."""
        assert self.ssh_files is not None
        return ["ssh", "-F", str(self.ssh_files.config)]

    @property
    def pdsh_env(self) -> dict[str, str]:
        assert self.ssh_files is not None
        return {"PDSH_RCMD_TYPE": "ssh", "PDSH_SSH_ARGS_APPEND": f"-F {self.ssh_files.config}"}


def _close(stream: IO[Any] | None) -> None:
    if stream is not None:
        stream.close()


def _checked_percent(percent: float) -> float:
    if not 0 <= percent <= 100:
        raise ValueError(f"percent is {percent}: 0 to 100")
    return percent
