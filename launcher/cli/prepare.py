"""`ftlaunch prepare`: encode and check all records once; later starts map the result. Exit code 2 where a record cannot
be used."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from launcher.config.inputs import check_inputs
from launcher.config.load import LoadedJob, load_job
from launcher.config.model_files import read_model_files
from launcher.data.facts import DataFacts
from launcher.errors import ExitCode, UserError
from launcher.host.compute import read_cpu
from launcher.host.facts import read_host_facts
from launcher.preflight.check_data import check_length, check_records, check_repeated, check_roles, check_tokens
from launcher.preflight.finding import Finding, Severity, worst
from launcher.preflight.inputs import PreflightInputs
from launcher.preflight.table import render_table

_LAST_WORDS_BYTES = 4000


def main(options: argparse.Namespace) -> int:
    job = load_job(options.config, options.set, os.environ)
    config = job.config
    if config.data is None or config.model is None:
        raise UserError(f"{job.path}: prepare needs model and data")
    check_inputs(job, write=True)
    answers = _encode(job, show_progress=not options.json and sys.stderr.isatty())
    facts = tuple(DataFacts.from_json(answer["facts"]) for answer in answers)
    findings = _judge(job, facts)
    refused = worst(findings) is Severity.ERROR
    if options.json:
        document = {
            "v": 1,
            "refused": refused,
            "findings": [finding.to_json(os.environ) for finding in findings],
            "sets": [{**answer["facts"], "folder": answer["folder"]} for answer in answers],
        }
        print(json.dumps(document, ensure_ascii=False, indent=2))
        return int(ExitCode.WRONG_INPUT if refused else ExitCode.FINISHED)
    print(render_table(findings, os.environ))
    for answer in answers:
        of, kept = answer["facts"], answer["folder"]
        what = f"{of['name']}: {of['num_records']} records, {of['num_tokens'] - of['num_tokens_cut']} tokens"
        print(f"{what}; kept in {kept}" if kept else f"{what}; nothing is kept until the records are corrected")
    return int(ExitCode.WRONG_INPUT if refused else ExitCode.FINISHED)


def _judge(job: LoadedJob, facts: tuple[DataFacts, ...]) -> tuple[Finding, ...]:
    model = job.config.model
    inputs = PreflightInputs(
        facts=read_host_facts(Path(job.config.output_dir), os.environ),
        num_ranks=1,
        num_dataloader_workers=0,
        device="cpu",
        env={**os.environ, **job.config.env},
        data=facts,
        model_files=read_model_files(model, {**os.environ, **job.config.env}) if model else None,
    )
    checks = (check_records, check_roles, check_repeated, check_length, check_tokens)
    found = [finding for check in checks for finding in check(inputs) if finding.id not in job.config.check.skip]
    return tuple(sorted(found, key=lambda finding: finding.severity.rank))


def _encode(job: LoadedJob, *, show_progress: bool) -> list[dict[str, Any]]:
    """By a process of its own, with the training stack. Raises UserError with its last words where it fails."""
    request = {"config": job.config.model_dump(mode="json", exclude_unset=True), "num_processes": read_cpu().num_usable}
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "launcher.train.prepare_data"],
            env={**os.environ, **job.config.env, "PYTHONUNBUFFERED": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        answer: dict[str, Any] = {}
        try:
            with process.stdin, process.stdout:
                process.stdin.write(json.dumps(request).encode())
                process.stdin.close()
                for line in process.stdout:
                    answer = _understood(line) or answer
                    if show_progress and "told" in answer:
                        print(f"\r{answer['of']}: {answer['told']} records", end="", file=sys.stderr, flush=True)
            process.wait()
        except BaseException:
            process.kill()
            process.wait()
            raise
        if show_progress:
            print("\r\033[K", end="", file=sys.stderr, flush=True)
        if "facts" in answer:
            sets: list[dict[str, Any]] = answer["facts"]
            return sets
        if "error" in answer:
            raise UserError(str(answer["error"]))
        errors.seek(max(0, errors.seek(0, os.SEEK_END) - _LAST_WORDS_BYTES))
        words = errors.read().decode("utf-8", "replace").strip()
        raise UserError(f"the data could not be encoded (exit status {process.returncode}):\n{words}")


def _understood(line: bytes) -> dict[str, Any] | None:
    """A library that prints to standard output disturbs nothing."""
    try:
        message = json.loads(line)
    except ValueError:
        return None
    return message if isinstance(message, dict) else None
