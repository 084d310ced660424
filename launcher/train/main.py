"""The life of one rank: connect, build, train, finish. Started by the fork server with DeepSpeed's environment
contract.

Exit status 0 means that this rank did what was asked of it (reached the planned end, or stopped at an agreed save);
the agent proves which of the two from the messages and the files, never from the status alone.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from launcher.config.models import JobConfig
from launcher.errors import UserError
from launcher.link import Link
from launcher.plan.spec import RankSpec
from launcher.progress_record import Phase, ProgressRecord
from launcher.train.model import prepare_model_files

if TYPE_CHECKING:
    from launcher.train.inputs import Inputs

log = logging.getLogger("ftlaunch.rank")

LAST_WORDS_CHARS = 12_000  # in a message of the link, whatever the characters


@dataclass(frozen=True)
class RankPlace:
    """Where this process stands, from DeepSpeed's environment contract."""

    rank: int
    local_rank: int
    world_size: int

    @staticmethod
    def from_environ() -> RankPlace:
        env = os.environ
        return RankPlace(int(env["RANK"]), int(env["LOCAL_RANK"]), int(env["WORLD_SIZE"]))


def run_rank(spec: RankSpec, link: Link, memory: Sequence[int] = (), inputs: Inputs | None = None) -> int:
    """Train as `spec` says; the process's exit status. A user's mistake prints one line, not a traceback.

    `memory`: descriptors of the agent's memory for this rank: its progress record, then slots for its snapshots.
    `inputs`: of the template that this process was forked from.
    """
    place = RankPlace.from_environ()
    _configure_logging(place.rank)
    config = JobConfig.model_validate(spec.config)
    try:
        _train(spec, config, place, link, memory, inputs)
    except UserError as error:
        link.send("user_error", message=str(error))
        log.info("error: %s", error)  # in this rank's log; the agent shows it once for all
        return int(error.exit_code)
    except Exception as error:  # raised again: the log gets it too, unless it lies on the disk that failed
        link.send("last_words", text=_traceback_of(error)[-LAST_WORDS_CHARS:])
        raise
    return 0


def _train(
    spec: RankSpec, config: JobConfig, place: RankPlace, link: Link, memory: Sequence[int], inputs: Inputs | None
) -> None:
    from launcher.train.arguments import training_arguments
    from launcher.train.collective_record import record_collectives
    from launcher.train.program import FineTuning

    record = ProgressRecord(memory[0] if memory else None)
    phases = Phases(link, record)
    if inputs is None or not inputs.suit(spec):
        inputs = None
        phases.enter("preparing model files")
        # Before the process group exists: then `save_pretrained` writes only part of the files on ranks other than 0.
        prepare_model_files(config)

    phases.enter("connecting")
    record_collectives(record)  # before DeepSpeed looks for the functions that it will call
    connect(spec, place, ddp_timeout_s=int(config.training.get("ddp_timeout", 1800)))
    # Before the model: ZeRO-3 partitions the weights while they are loaded, which it knows from these arguments.
    arguments = training_arguments(spec, config, place.world_size)
    FineTuning(spec, config, place, link, phases, arguments, inputs, memory[1:]).run()
    disconnect()


class Phases:
    """Tells the agent what this rank is doing."""

    def __init__(self, link: Link, record: ProgressRecord) -> None:
        self._link = link
        self.record = record

    def enter(self, name: str, phase: Phase = Phase.STARTING) -> None:
        self.record.enter(phase)
        self._link.send("phase", name=name)


def connect(spec: RankSpec, place: RankPlace, *, ddp_timeout_s: int) -> None:
    """Join the generation's process group. Its port and store are this generation's own, so nothing stale can be
    read."""
    import deepspeed
    import torch

    if spec.device == "cuda":
        torch.cuda.set_device(place.local_rank)
    else:
        from launcher.train.cpu import without_shm_operator

        without_shm_operator()
    deepspeed.init_distributed(
        dist_backend="nccl" if spec.device == "cuda" else "gloo",
        auto_mpi_discovery=False,
        timeout=timedelta(seconds=ddp_timeout_s),
        verbose=False,
    )


def disconnect() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


def _configure_logging(rank: int) -> None:
    level = logging.INFO if rank == 0 else logging.WARNING
    logging.basicConfig(level=level, format="%(asctime)s %(name)s %(levelname)s %(message)s", force=True)
    # Deprecations between DeepSpeed, Transformers and torch: nothing a user of ftlaunch can act on.
    warnings.filterwarnings("ignore", category=FutureWarning)
    for noisy in ("deepspeed", "DeepSpeed", "accelerate", "transformers", "filelock", "httpx"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    # The engine's micro-batches a step are ours to choose, and its number is the one that counts.
    logging.getLogger("accelerate.accelerator").addFilter(_is_no_mismatch_of_accumulation)


def _is_no_mismatch_of_accumulation(record: logging.LogRecord) -> bool:
    return "Gradient accumulation steps mismatch" not in record.getMessage()


def write_traceback(error: BaseException) -> None:
    """The rank's last words: a plain traceback on standard error, whatever hooks a library has installed."""
    sys.stderr.write(_traceback_of(error))
    sys.stderr.flush()


def _traceback_of(error: BaseException) -> str:
    import traceback

    return "".join(traceback.format_exception(type(error), error, error.__traceback__))
