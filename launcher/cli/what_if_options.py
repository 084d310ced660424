"""Options of `ftlaunch plan` for a plan without a job.yaml. Imports only the standard library, as `main` does."""

from __future__ import annotations

import argparse

OPTIONS = (
    *("gpus", "model", "method", "max_length", "global_batch", "tokens", "price", "utilisation"),
    "preemptions_per_day",
)


def add_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("before there is a job.yaml (no GPU, network or weights needed)")
    group.add_argument("--gpus", metavar="NxCARD", help="such as 8xA100-80G; 4x8xA100-80G for four nodes")
    group.add_argument("--model", metavar="NAME", help="such as Qwen/Qwen2.5-32B, or a folder with config.json")
    group.add_argument("--method", choices=("lora", "qlora", "full"), help="default lora")
    group.add_argument("--max-length", type=int, metavar="N", help="tokens of a sample (default 2048)")
    group.add_argument("--global-batch", type=int, metavar="N", help="samples of a step (default 8 for each card)")
    group.add_argument("--tokens", type=_number, metavar="N", help="of the whole training, for hours: 2e9")
    group.add_argument("--price", type=float, metavar="P", help="of one card for one hour, for the cost")
    group.add_argument("--utilisation", type=float, metavar="SHARE", help="of the card's TFLOP/s (default 0.4)")
    group.add_argument("--preemptions-per-day", type=float, metavar="X", help="of the whole job, for how often to save")


def is_asked(options: argparse.Namespace) -> bool:
    """Any of these options, so that one without --gpus is an error, not ignored."""
    return any(getattr(options, name, None) is not None for name in OPTIONS)


def _number(text: str) -> int:
    """`2000000000`, `2e9`, `2_000_000_000`."""
    return int(float(text))
