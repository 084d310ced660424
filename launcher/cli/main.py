"""Parses the command line and hands over to one module. Imports only the standard library: `--help` must answer at
once."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

from launcher import __version__
from launcher.cli import what_if_options
from launcher.errors import UserError

LATER = "launcher.cli.later"

# command -> (module, line for --help); a module is imported only when its command is used.
COMMANDS: dict[str, tuple[str, str]] = {
    "run": ("launcher.cli.run", "the whole job (the same as `ftlaunch --config job.yaml`)"),
    "check": ("launcher.cli.check", "preflight only: a table of findings, each with the remedy"),
    "plan": (
        "launcher.cli.plan",
        "what would be done, changing nothing: settings with origin, environment, files, memory",
    ),
    "schema": ("launcher.cli.schema", "JSON Schema of job.yaml, for editors"),
    "prepare": ("launcher.cli.prepare", "tokenise and check all data once; later starts load the result"),
    "diagnose": ("launcher.cli.diagnose", "cause, proof and remedy from logs, a run folder or an incident bundle"),
    "status": ("launcher.cli.status", "where a run stands, live or afterwards"),
    "checkpoints": ("launcher.cli.checkpoints", "the checkpoints, which are whole, which one a start resumes from"),
    "report": (LATER, "one page: where every second of the run went (not in this version)"),
    "submit": (LATER, "submit to DLC, Kubernetes or Slurm (not in this version)"),
}
_WITH_JOB = ("run", "check", "plan", "prepare", "submit")
_WITH_JSON = ("run", "check", "plan", "schema", "prepare", "diagnose", "status", "checkpoints")

EPILOG = """\
exit codes:
  0    training reached its planned end and its last checkpoint is durable
  1    training failed for a reason that a rerun would meet again
  2    the command line, job.yaml or an input is wrong
  3    preflight refused the node
  138  stopped from outside, progress is saved: run the same command again (143 with spot.exit_code: 143)

The same job.yaml and output_dir continue the same run. Languages: FTLAUNCH_LANG=en|zh.
"""


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ftlaunch",
        usage="ftlaunch --config JOB.YAML [--set KEY=VALUE ...] [--json]\n       ftlaunch COMMAND ...",
        description="Fine-tune language models on machines that come and go.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"ftlaunch {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True, prog="ftlaunch")
    for name, (_, line) in COMMANDS.items():
        command = commands.add_parser(name, help=line, description=line, allow_abbrev=False)
        if name in _WITH_JOB:
            command.add_argument("--config", type=Path, metavar="JOB.YAML", help="the job")
            command.add_argument(
                "--set",
                action="append",
                default=[],
                metavar="KEY=VALUE",
                help="override one key: --set training.max_steps=100",
            )
        elif name != "schema":
            command.add_argument("paths", nargs="*", type=Path, metavar="PATH")
        if name == "plan":
            what_if_options.add_options(command)
        if name == "run":  # by a head, not by people: the order comes on standard input or is in a file
            command.add_argument("--as-node", nargs="?", const="-", help=argparse.SUPPRESS)
        if name == "checkpoints":
            command.add_argument(
                "--verify", action="store_true", help="compare contents, not only sizes (reads every byte)"
            )
        if name in _WITH_JSON:
            command.add_argument("--json", action="store_true", help="one JSON document on standard output")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    # `ftlaunch --config job.yaml` is the form for a job's command line: a container's entrypoint has no sub-command.
    if arguments and arguments[0].split("=")[0] in ("--config", "--set", "--json"):
        arguments.insert(0, "run")
    parser = build_parser()
    if not arguments:
        parser.print_help(sys.stderr)
        return 2
    if arguments[0].endswith((".yaml", ".yml")):
        parser.error(f"a job is given with --config: ftlaunch --config {arguments[0]}")
    misplaced = [argument for argument in arguments[1:] if argument in COMMANDS]
    if arguments[0] == "run" and misplaced and (argv is None or "run" not in argv):
        parser.error(f"the command comes first: ftlaunch {misplaced[0]} --config ...")
    options, unknown = parser.parse_known_args(arguments)
    # Commands of later versions take options that are not built yet; they answer before anyone looks at those.
    if unknown and COMMANDS[options.command][0] != LATER:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    module = importlib.import_module(COMMANDS[options.command][0])
    try:
        return int(module.main(options))
    except UserError as error:
        with contextlib.suppress(OSError):  # a reader that has gone must not change the exit code
            print(f"ftlaunch: error: {error}", file=sys.stderr, flush=True)
        return int(error.exit_code)
    except BrokenPipeError:
        if options.command == "run":
            raise  # never 0 without the planned end
        # `ftlaunch plan | head`: the reader has gone, which is no error of ours.
        sys.stdout = None  # keeps the interpreter from flushing into the closed pipe
        return 0
