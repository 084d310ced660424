"""`ftlaunch check`: preflight only. Exit code 0, or 3 when a finding would stop the start."""

from __future__ import annotations

import argparse
import json
import os

from launcher.agent.prepare import prepare
from launcher.errors import ExitCode
from launcher.preflight.finding import Severity, worst
from launcher.preflight.table import render_table


def main(options: argparse.Namespace) -> int:
    prepared = prepare(options.config, options.set, os.environ, write=False)
    prepared.resume_preview()  # a folder that a start would refuse is refused here as well
    refused = worst(prepared.findings) is Severity.ERROR
    if options.json:
        findings = [finding.to_json(os.environ) for finding in prepared.findings]
        print(json.dumps({"v": 1, "refused": refused, "findings": findings}, ensure_ascii=False, indent=2))
    else:
        print(render_table(prepared.findings, os.environ))
    return int(ExitCode.REFUSED if refused else ExitCode.FINISHED)
