"""`ftlaunch check`: preflight only. Exit code 0, or 3 when a finding would stop the start."""

from __future__ import annotations

import argparse
import json
import os

from launcher.agent.prepare import Prepared, prepare
from launcher.errors import ExitCode, UserError
from launcher.preflight.finding import Severity, worst
from launcher.preflight.table import render_table


def main(options: argparse.Namespace) -> int:
    prepared = prepare(options.config, options.set, os.environ, write=False)
    refused = worst(prepared.findings) is Severity.ERROR
    unresumable = _why_not_resumed(prepared)
    if options.json:
        document = {
            "v": 1,
            "refused": refused or unresumable is not None,
            "head_only": prepared.plan.is_head_only,
            "findings": [finding.to_json(os.environ) for finding in prepared.findings],
            "resume": str(unresumable) if unresumable else prepared.resume_preview(),
        }
        print(json.dumps(document, ensure_ascii=False, indent=2))
    else:
        if prepared.plan.is_head_only:
            print(
                "this machine is none of the nodes: it trains nothing, and nothing of it is checked but whether it "
                "knows the hosts; run ftlaunch check on a node for the rest"
            )
        print(render_table(prepared.findings, os.environ))
    if refused:
        return int(ExitCode.REFUSED)
    if unresumable is not None:
        raise unresumable
    return int(ExitCode.FINISHED)


def _why_not_resumed(prepared: Prepared) -> UserError | None:
    """What a start would refuse about the output folder."""
    try:
        prepared.resume_preview()
    except UserError as error:
        return error
    return None
