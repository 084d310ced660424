"""`ftlaunch --config job.yaml`: the whole job. Ends with the exit code that the scheduler should act on."""

from __future__ import annotations

import argparse
import json
import os

from launcher.agent.run import run_job


def main(options: argparse.Namespace) -> int:
    result = run_job(options.config, options.set, os.environ)
    if options.json:
        try:
            print(json.dumps(result.to_json(), ensure_ascii=False), flush=True)
        except OSError:
            # The reader has gone; the exit code is what counts. A second flush at exit must not fail either.
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    return int(result.exit_code)
