"""The way into a run of several nodes: where the others may be found, under which token, and who this node is there."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from functools import partial

from launcher.agent.cluster_crew import ClusterCrew
from launcher.agent.cluster_folder import ClusterFolder
from launcher.agent.generation import free_port, port_is_free
from launcher.agent.peer_tier import Place
from launcher.agent.prepare import Prepared
from launcher.cluster.membership import Membership
from launcher.cluster.model import Node
from launcher.errors import ExitCode, Stopped, UserError
from launcher.event_loop import EventLoop
from launcher.plan.cluster_identity import cluster_identity
from launcher.plan.meeting import TOKEN_VARIABLE, Meeting
from launcher.plan.network import ipv4_of
from launcher.transport.transport import Transport

_RETRY_S = 1.0
_SAY_EVERY_S = 30.0


def join_cluster(
    prepared: Prepared,
    folder: ClusterFolder,
    loop: EventLoop,
    say: Callable[[str], None],
    stopped: Callable[[], bool],
    environ: Mapping[str, str],
) -> ClusterCrew:
    """The crew of this node, which listens from now on. Raises UserError for a port in use, Stopped."""
    job, plan, meeting = prepared.job, prepared.plan, prepared.plan.meeting
    assert meeting is not None  # a run on one node has no crew to join
    seeds = find_seeds(meeting, say, stopped, ExitCode(job.config.spot.exit_code))
    port = _listening_port(meeting)
    me = Node(meeting.name, f"{meeting.host_ip}:{port}", plan.num_ranks.value, folder.incarnation)
    token = job.config.cluster.token or environ.get(TOKEN_VARIABLE, "").strip() or folder.drawn_token()
    rng = random.Random()
    membership = Membership(
        me,
        seeds=seeds,
        wanted=meeting.wanted,
        timing=meeting.timing,
        identity=cluster_identity(job, plan, prepared.facts, folder.folder_id),
        rng=rng,
        free_port=partial(free_port, meeting.host_ip),
        durable=folder.durable,
    )
    say(f"this is {me.name} at {me.address}, of {plan.place.shown_nodes} nodes; looking for {', '.join(seeds)}")
    return ClusterCrew(
        loop,
        membership,
        folder,
        lambda on_message, on_unreachable, on_refused: Transport(
            loop,
            token=token,
            run_id=f"{folder.folder_id}-{folder.epoch}",
            host=meeting.host_ip,
            port=port,
            on_message=on_message,
            on_unreachable=on_unreachable,
            on_refused=on_refused,
            say=say,
        ),
        heartbeat_s=meeting.timing.heartbeat_s,
        say=say,
        stop_exit_code=ExitCode(job.config.spot.exit_code),
        peer_place=None
        if job.config.checkpoint.peer == "off"
        else lambda run_id: Place(node=me.name, run_id=run_id, token=token, host=meeting.host_ip),
    )


def find_seeds(
    meeting: Meeting, say: Callable[[str], None], stopped: Callable[[], bool], stop_exit_code: ExitCode
) -> tuple[str, ...]:
    """`IPv4:port` of the seeds. On Kubernetes the master's name resolves only once its pod is there: waited for, by
    all nodes but the one that comes first itself. Raises Stopped at the bound, or when asked to stop."""
    began = said_at = time.monotonic()
    while True:
        found = {name: addresses[0] for name, addresses in ipv4_of(meeting.awaited_names).items()}
        missing = [name for name in meeting.awaited_names if name not in found]
        if not missing or found or meeting.own_seed == 0:
            for name in missing:
                say(f"{name} does not resolve to an IPv4 address; it may still come by itself")
            return meeting.seed_addresses(found)
        now = time.monotonic()
        names, waited_s = ", ".join(missing), now - began
        if waited_s > meeting.timing.bound_s or stopped():
            raise Stopped(
                f"waited {waited_s:.0f} s for the name {names} to resolve (cluster.wait_seconds is "
                f"{meeting.timing.bound_s:g}): is that node up, and does this one use the cluster's name server?",
                stop_exit_code,
            )
        if said_at == began or now - said_at > _SAY_EVERY_S:
            said_at = now
            say(f"waiting for the name {names} to resolve")
        time.sleep(_RETRY_S)


def _listening_port(meeting: Meeting) -> int:
    """The agreed one. A node that others look for cannot take another; any other tells where it listens."""
    if port_is_free(meeting.host_ip, meeting.agent_port):
        return meeting.agent_port
    if meeting.own_seed == 0:
        raise UserError(
            f"port {meeting.agent_port} ({meeting.port_reason}) is in use at {meeting.host_ip}, and the other nodes "
            f"look for this one there. End what listens there, or set cluster.agent_port to another on all nodes."
        )
    return free_port(meeting.host_ip)
