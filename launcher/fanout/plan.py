"""What a start has to bring up on other machines: a pure function of job.yaml, the place and the environment."""

from __future__ import annotations

import os
import secrets
import shlex
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from launcher.config.load import LoadedJob
from launcher.errors import UserError
from launcher.fanout.deepspeed_runner import runner_argv
from launcher.fanout.exported import exported_environ
from launcher.fanout.order import AGENT, NodeOrder
from launcher.fanout.packed_job import pack_job
from launcher.fanout.presence import run_key
from launcher.fanout.ssh import node_argv
from launcher.platforms.place import Place
from launcher.platforms.told import NODE_VARIABLE, tell_place

_NAMED_BY_JOB = ("cluster.hosts", "hostfile")


@dataclass(frozen=True)
class Remote:
    """A machine on which this start brings up an agent. `host` is what ssh is given: `user@` and aliases count."""

    rank: int
    name: str
    host: str


@dataclass(frozen=True)
class FanOut:
    """`own_rank`: this machine's node; None where it is none of them. With DeepSpeed's runner `remotes` are all nodes,
    this machine included. `agent`: what the interpreter is told to run on each, before `--as-node`."""

    launcher: Literal["ssh", "deepspeed"]
    own_rank: int | None
    remotes: tuple[Remote, ...]
    job: LoadedJob
    place: Place
    environ: Mapping[str, str]
    agent: tuple[str, ...] = AGENT

    @property
    def output_dir(self) -> Path:
        return Path(self.job.config.output_dir)

    def shown(self) -> tuple[tuple[str, str], ...]:
        """(node, command) for people; ssh's own configuration is not looked at, it may take away some `-o`."""
        if self.launcher == "deepspeed":
            return (("this machine", shlex.join(runner_argv(self.output_dir, self.place, self.agent))),)
        return tuple(
            (f"{remote.name} ({remote.host})", shlex.join(node_argv(remote.host, {}, self.environ)))
            for remote in self.remotes
        )

    def order(self, remote: Remote | None, head: str, folder: Path) -> NodeOrder:
        """For one node; for all of them where DeepSpeed's launch.py says which one it is (None)."""
        exported = exported_environ(self.environ, folder)
        token = self.job.config.cluster.token or self.environ.get("FTLAUNCH_TOKEN")
        if token:
            exported["FTLAUNCH_TOKEN"] = token
        nodes = range(len(self.place.hosts))
        return NodeOrder(
            run=run_key(self.job.config.output_dir, remote.name if remote else ""),
            name=remote.name if remote else "",
            rank=remote.rank if remote else None,
            places=tuple(
                tell_place(self.place, rank) if remote is None or rank == remote.rank else "" for rank in nodes
            ),
            head=head,
            head_name=f"the start on {socket.gethostname()} (pid {os.getpid()})",
            marker=secrets.token_hex(8),
            folder=str(folder),
            environ=exported,
            job=pack_job(self.job),
            agent=self.agent,
        )


def plan_fan_out(job: LoadedJob, place: Place, environ: Mapping[str, str]) -> FanOut | None:
    """None where nothing is to be started elsewhere: one machine, a platform that starts every node, an agent that a
    head has started, `cluster.launcher: none`. Raises UserError where it is asked for and the hosts are not known."""
    asked = job.config.cluster.launcher
    if asked == "none" or NODE_VARIABLE in environ:
        return None
    # A platform's launcher (MPI) starts nothing by itself; on every other platform each node has its own start.
    if asked == "auto" and not (place.platform in _NAMED_BY_JOB or place.node_rank is None):
        return None
    if not place.hosts:
        if place.max_nodes == 1:
            return None
        raise UserError(
            f"{job.place('cluster.launcher')}: cluster.launcher: {asked} needs the machines' names, and nothing says "
            f"them ({place.platform}). Write cluster.hosts: [HOST, ...], or cluster.hostfile; or remove "
            f"cluster.launcher where the platform starts ftlaunch on every node."
        )
    remotes = tuple(Remote(rank, f"n{rank}", host) for rank, host in enumerate(place.hosts))
    others = tuple(remote for remote in remotes if remote.rank != place.node_rank)
    if not others:
        return None
    if asked == "deepspeed":
        return FanOut("deepspeed", None, remotes, job, place, environ)
    return FanOut("ssh", place.node_rank, others, job, place, environ)
