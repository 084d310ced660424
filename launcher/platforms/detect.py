"""Which platform started this process, how many nodes it counts, and which variables say so.

A new platform is one row of `PLATFORMS`. Names and meanings are from the platforms' own documents and operators, see
docs/platforms.md; the traps: DLC and KubeDL count *nodes* in WORLD_SIZE, Kubeflow's PyTorchJob v1 counts *processes*
there.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from launcher.errors import UserError


@dataclass(frozen=True)
class Platform:
    """`nodes_from`, `rank_from` name the variables that hold node count and node index."""

    name: str
    matches: Callable[[Mapping[str, str]], bool]
    signs: tuple[str, ...]
    nodes_from: str | None = None
    rank_from: str | None = None


@dataclass(frozen=True)
class Place:
    """What was found: `platform`, and the variables (name, value) that say so."""

    platform: str
    num_nodes: int
    node_rank: int
    evidence: tuple[tuple[str, str], ...]


def _is_dlc(env: Mapping[str, str]) -> bool:
    hostname = env.get("HOSTNAME", "")
    named = re.match(r"^(dlc|train)[0-9a-z]+-(master|worker)-\d+$", hostname) is not None
    return named and "WORLD_SIZE" in env and ("KUBERNETES_CONTAINER_RESOURCE_GPU" in env or "NPROC_PER_NODE" in env)


PLATFORMS: tuple[Platform, ...] = (
    Platform(
        "PAI-DLC",
        _is_dlc,
        ("HOSTNAME", "KUBERNETES_CONTAINER_RESOURCE_GPU", "NPROC_PER_NODE", "WORLD_SIZE", "RANK"),
        nodes_from="WORLD_SIZE",
        rank_from="RANK",
    ),
    Platform(
        "Kubeflow (PET_*)",
        lambda env: "PET_NNODES" in env,
        ("PET_NNODES", "PET_NODE_RANK", "PET_NPROC_PER_NODE"),
        nodes_from="PET_NNODES",
        rank_from="PET_NODE_RANK",
    ),
    Platform(
        "KubeDL PyTorchJob",
        lambda env: "KUBERNETES_SERVICE_HOST" in env and env.get("PYTHONUNBUFFERED") == "0" and "WORLD_SIZE" in env,
        ("KUBERNETES_SERVICE_HOST", "PYTHONUNBUFFERED", "WORLD_SIZE", "RANK"),
        nodes_from="WORLD_SIZE",
        rank_from="RANK",
    ),
    Platform(
        "Slurm",
        lambda env: "SLURM_JOB_ID" in env and "SLURM_NODEID" in env,
        ("SLURM_JOB_ID", "SLURM_NNODES", "SLURM_NODEID"),
        nodes_from="SLURM_NNODES",
        rank_from="SLURM_NODEID",
    ),
)


def refuse_nesting(environ: Mapping[str, str]) -> None:
    """ftlaunch starts ranks itself; inside a rank of another launcher every rank would start ranks of its own."""
    launcher = "torchrun" if "TORCHELASTIC_RUN_ID" in environ else None
    if launcher is None and "LOCAL_RANK" in environ and "CROSS_SIZE" in environ:
        launcher = "deepspeed"
    if launcher:
        raise UserError(
            f"this process is a rank of {launcher} (LOCAL_RANK={environ.get('LOCAL_RANK', '?')}): ftlaunch "
            f"would start ranks inside "
            f"a rank. Run `ftlaunch --config ...` itself as the job's command, once per node, instead of "
            f"`{launcher} ... ftlaunch`."
        )


def detect_place(environ: Mapping[str, str]) -> Place:
    """The first platform whose signs are all there; one plain machine otherwise."""
    for platform in PLATFORMS:
        if platform.matches(environ):
            evidence = tuple((name, environ[name]) for name in platform.signs if name in environ)
            return Place(
                platform.name,
                num_nodes=_number(environ, platform.nodes_from, 1),
                node_rank=_number(environ, platform.rank_from, 0),
                evidence=evidence,
            )
    _refuse_the_unknown(environ)
    return Place("one machine", 1, 0, ())


def _refuse_the_unknown(environ: Mapping[str, str]) -> None:
    """A world that no known platform explains: every node would start a run of its own in the same folder."""
    world_size = environ.get("WORLD_SIZE", "")
    if world_size.isdigit() and int(world_size) > 1:
        raise UserError(
            f"WORLD_SIZE={world_size} is set, but no platform that ftlaunch knows is recognised: it may count "
            f"nodes (DLC, KubeDL) "
            "or processes (Kubeflow PyTorchJob). If this is one machine by itself, unset WORLD_SIZE and RANK; "
            "docs/platforms.md lists the variables that are looked for."
        )


def _number(environ: Mapping[str, str], name: str | None, default: int) -> int:
    if name is None or name not in environ:
        return default
    text = environ[name].split(":")[-1]
    if not text.isdigit():
        raise UserError(f"the platform's variable {name} is {environ[name]!r}; a number is expected")
    return int(text)
