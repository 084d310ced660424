"""`ftlaunch --config job.yaml`: the whole job. Ends with the exit code that the scheduler should act on."""

from __future__ import annotations

import argparse
import json
import os
import sys

from launcher.agent.run import run_job
from launcher.errors import RunsHereAlready
from launcher.fanout.frames import RUNS_ALREADY
from launcher.fanout.order import read_order
from launcher.fanout.packed_job import unpack_job


def main(options: argparse.Namespace) -> int:
    if options.as_node is not None:
        return _run_as_node(options.as_node)
    result = run_job(options.config, options.set, os.environ)
    if options.json:
        try:
            print(json.dumps(result.to_json(), ensure_ascii=False), flush=True)
        except OSError:
            # The reader has gone; the exit code is what counts. A second flush at exit must not fail either.
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    return int(result.exit_code)


def _run_as_node(source: str) -> int:
    """The agent of a node that a head has started: its configuration, place and environment are in the order."""
    order = read_order(source)
    order.enter(os.environ)
    try:
        return int(run_job(None, (), os.environ, job=unpack_job(order.job)).exit_code)
    except RunsHereAlready as error:
        print(f"ftlaunch: {error}", file=sys.stderr, flush=True)
        return RUNS_ALREADY
