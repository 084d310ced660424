"""`ftlaunch diagnose PATH...`: cause, proof and remedy from logs, a run folder or an incident bundle."""

from __future__ import annotations

import argparse
import json

from launcher.diagnose.bundle import screen
from launcher.diagnose.sources import read_sources
from launcher.diagnose.verdict import diagnose
from launcher.errors import UserError


def main(options: argparse.Namespace) -> int:
    if not options.paths:
        raise UserError("diagnose: give at least one path: a log, an output_dir, or an incident folder")
    sources = read_sources(options.paths)
    verdict = diagnose(sources.ranks, sources.nodes)
    if options.json:
        print(json.dumps(verdict.to_json(), ensure_ascii=False, indent=2))
    else:
        print(screen(verdict, decision=""), end="")
    return 0
