"""ftlaunch starts the ranks itself: inside a rank of another launcher each rank would start ranks of its own.

Invariant: a process that a platform starts once per node is never taken for such a rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from launcher.errors import UserError


@dataclass(frozen=True)
class OuterLauncher:
    """`all_of`: variables that its ranks have, and that nobody else sets together; `unless`: see the comments."""

    name: str
    all_of: tuple[str, ...]
    unless: tuple[str, ...] = ()

    def is_around(self, environ: Mapping[str, str]) -> bool:
        return all(name in environ for name in self.all_of) and not any(name in environ for name in self.unless)


# `accelerate launch` for several GPUs is torchrun inside. ACCELERATE_MIXED_PRECISION alone is set by users too.
_ACCELERATE = ("ACCELERATE_MIXED_PRECISION", "ACCELERATE_DYNAMO_BACKEND", "ACCELERATE_DYNAMO_MODE")

OUTER_LAUNCHERS: tuple[OuterLauncher, ...] = (
    OuterLauncher("accelerate launch", (*_ACCELERATE, "TORCHELASTIC_RUN_ID")),
    OuterLauncher("torchrun", ("TORCHELASTIC_RUN_ID",)),
    OuterLauncher("deepspeed", ("LOCAL_RANK", "CROSS_SIZE")),
    OuterLauncher("accelerate launch", _ACCELERATE),
    OuterLauncher("mpirun", ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")),
    OuterLauncher("mpirun", ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE")),
    # srun sets the PMI variables as well (--mpi=pmi2); how many tasks it has started is looked at with Slurm's own.
    OuterLauncher("mpirun", ("PMI_RANK", "PMI_SIZE"), unless=("SLURM_STEP_ID", "SLURM_STEPID", "SLURM_PROCID")),
)
# Azure ML starts MPI jobs through mpirun whatever the user does: one process a node is its way to start a command.
_AZURE = ("AZUREML_RUN_ID", "AZUREML_EXPERIMENT_ID")
# Shown in the message, where set.
_RANKS = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "RANK")


def refuse_nesting(environ: Mapping[str, str]) -> None:
    """Raises UserError inside a rank of torchrun, deepspeed, accelerate or mpirun."""
    outer = next((launcher for launcher in OUTER_LAUNCHERS if launcher.is_around(environ)), None)
    if outer is None or (outer.name == "mpirun" and _is_azures_one_per_node(environ)):
        return
    seen = ", ".join(f"{name}={environ[name]}" for name in dict.fromkeys((*_RANKS, *outer.all_of)) if name in environ)
    raise UserError(
        f"this process is a rank of {outer.name} ({seen}): ftlaunch would start ranks inside a rank. "
        f"Run `ftlaunch --config ...` itself as the job's command, once per node, instead of "
        f"`{outer.name} ... ftlaunch`. If the variables are left over from an earlier shell, unset them."
    )


def _is_azures_one_per_node(environ: Mapping[str, str]) -> bool:
    return any(name in environ for name in _AZURE) and environ.get("OMPI_COMM_WORLD_LOCAL_SIZE") == "1"
