"""`ftlaunch --config job.yaml`: the whole job. Ends with the exit code that the scheduler should act on."""

from __future__ import annotations

import argparse
import json
import os

from launcher.agent.run import run_job


def main(options: argparse.Namespace) -> int:
    result = run_job(options.config, options.set, os.environ)
    if options.json:
        print(json.dumps(result.to_json(), ensure_ascii=False))
    return int(result.exit_code)
