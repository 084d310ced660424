"""`ftlaunch schema`: the JSON Schema of job.yaml on standard output."""

from __future__ import annotations

import argparse
import json

from launcher.config.schema import job_schema


def main(options: argparse.Namespace) -> int:
    print(json.dumps(job_schema(), indent=2, ensure_ascii=False))
    return 0
