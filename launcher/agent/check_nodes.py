"""This node's part of `ftlaunch check` on several nodes: what it tells of itself, and where the others are."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from launcher.agent.check_together import MEET_WITHIN_S, Together, check_together
from launcher.agent.prepare import Prepared
from launcher.plan.cluster_identity import cluster_identity
from launcher.plan.meeting import TOKEN_VARIABLE
from launcher.preflight.cluster_facts import ClusterFacts, NodeReport
from launcher.preflight.finding import Severity


def check_nodes_together(
    prepared: Prepared, environ: Mapping[str, str], *, say: Callable[[str], None]
) -> ClusterFacts | None:
    """None for one node, on a head, and where the agents' port is taken: by the run itself, or by something else, which
    is a finding of its own."""
    plan, inputs = prepared.plan, prepared.inputs
    meeting = plan.meeting
    if meeting is None or inputs is None or plan.is_head_only or inputs.agent_port_free is False:
        return None
    say(f"waiting up to {MEET_WITHIN_S:g} s for ftlaunch check on the other nodes")
    config = prepared.job.config
    host, port = meeting.seeds[0]
    leads = plan.place.node_rank == 0
    return check_together(
        Together(
            report=report_of(prepared),
            leader=(meeting.host_ip if leads else host, port),
            is_leader=leads,
            host_ip=meeting.host_ip,
            num_wanted=plan.num_nodes,
            output_dir=prepared.output_dir.absolute(),
            token=config.cluster.token or environ.get(TOKEN_VARIABLE, "").strip() or _drawn_token(prepared.output_dir),
            has_speed=config.check.speed,
            backend_device=inputs.device if "torch" in prepared.facts.versions else "",
            interface=plan.network.interface,
        )
    )


def report_of(prepared: Prepared) -> NodeReport:
    plan, facts = prepared.plan, prepared.facts
    identity = cluster_identity(prepared.job, plan, facts)
    nic = facts.nic(plan.network.interface)
    traits = {
        **identity.versions,
        **identity.contract,
        "driver": facts.versions.get("driver", ""),
        "GPUs": ", ".join(sorted({gpu.name for gpu in facts.gpus})),
        "kernel": facts.versions.get("kernel", ""),
        "MTU": str(nic.mtu) if nic else "",
    }
    wrong = [finding for finding in prepared.findings if finding.severity is not Severity.OK]
    return NodeReport(
        name=plan.meeting.name if plan.meeting else "n0",
        hostname=facts.hostname,
        traits={name: value for name, value in traits.items() if value},
        findings=tuple((finding.id, finding.severity.value, finding.measured) for finding in wrong),
    )


def _drawn_token(output_dir: Path) -> str:
    """The token of a run that is there already; "" before its first start."""
    try:
        return (output_dir / "ftlaunch" / "cluster" / "token").read_text("utf-8").strip()
    except OSError:
        return ""
