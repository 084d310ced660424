"""`ftlaunch check`: preflight only. Exit code 0, or 3 when a finding would stop the start."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

from launcher.agent.check_nodes import check_nodes_together
from launcher.agent.prepare import Prepared, prepare
from launcher.agent.step_needs import needs_of
from launcher.errors import ExitCode, UserError
from launcher.i18n import Text
from launcher.preflight.checks import run_checks
from launcher.preflight.cluster_facts import ClusterFacts
from launcher.preflight.finding import Finding, Severity, worst
from launcher.preflight.table import render_table

TOOK = Text("checked in {seconds} s; nothing was started", "检查用时 {seconds} 秒；未启动任何程序")


def main(options: argparse.Namespace) -> int:
    began = time.monotonic()
    prepared = prepare(options.config, options.set, os.environ, write=False)
    cluster = check_nodes_together(prepared, os.environ, say=_say)
    findings = _all_findings(prepared, cluster)
    refused = worst(findings) is Severity.ERROR
    unresumable = _why_not_resumed(prepared)
    if options.json:
        document = {
            "v": 1,
            "refused": refused or unresumable is not None,
            "head_only": prepared.plan.is_head_only,
            "findings": [finding.to_json(os.environ) for finding in findings],
            "seconds": round(time.monotonic() - began, 2),
            "cluster": cluster.to_json() if cluster else None,
            "resume": str(unresumable) if unresumable else prepared.resume_preview(),
        }
        print(json.dumps(document, ensure_ascii=False, indent=2))
    else:
        if prepared.plan.is_head_only:
            print(
                "this machine is none of the nodes: it trains nothing, and nothing of it is checked but whether it "
                "knows the hosts; run ftlaunch check on a node for the rest"
            )
        print(render_table(findings, os.environ))
        print(TOOK.format(seconds=f"{time.monotonic() - began:.1f}").pick(os.environ))
    if refused:
        return int(ExitCode.REFUSED)
    if unresumable is not None:
        raise unresumable
    return int(ExitCode.FINISHED)


def _all_findings(prepared: Prepared, cluster: ClusterFacts | None) -> tuple[Finding, ...]:
    """Those of this node, those of all nodes together, and what the others found on themselves."""
    if cluster is None or prepared.inputs is None:
        return prepared.findings
    own = run_checks(replace(prepared.inputs, cluster=cluster, step_needs=needs_of(prepared)))
    name = prepared.plan.meeting.name if prepared.plan.meeting else ""
    others = {node.name: node.findings for node in cluster.nodes if node.name != name}
    told = findings_of_others(others, [(one.id, one.severity.value, one.measured) for one in prepared.findings])
    return tuple(sorted([*own, *told], key=lambda finding: finding.severity.rank))


def findings_of_others(
    others: Mapping[str, Sequence[tuple[str, str, str]]], own: Sequence[tuple[str, str, str]]
) -> list[Finding]:
    """One for each thing that is wrong, with the nodes where it is so; nothing for what is so on this one and all."""
    names: dict[tuple[str, str, str], list[str]] = {}
    for name, findings in others.items():
        for finding in findings:
            names.setdefault(finding, []).append(name)
    return [
        Finding(
            id_,
            Severity(severity),
            f"{' '.join(where)}: {measured}",
            f"see {where[0]}",
            Text(f"found on {', '.join(where)}", f"出现在 {'、'.join(where)}"),
            Text("that node's own table has the remedy", "处理办法见该节点自己的输出"),
        )
        for (id_, severity, measured), where in names.items()
        if len(where) < len(others) or (id_, severity, measured) not in own
    ]


def _say(text: str) -> None:
    print(f"ftlaunch: {text}", file=sys.stderr, flush=True)


def _why_not_resumed(prepared: Prepared) -> UserError | None:
    """What a start would refuse about the output folder."""
    try:
        prepared.resume_preview()
    except UserError as error:
        return error
    return None
