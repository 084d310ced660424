"""The environment of the ranks, each variable with its origin. What the user or the platform has set always wins."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

# Variables that decide how NCCL, gloo and DeepSpeed behave: kept as they are and shown with their origin.
_WATCHED_PREFIXES = (
    "NCCL_",
    "GLOO_",
    "DS_",
    "TORCH_NCCL_",
    "CUDA_VISIBLE_DEVICES",
    "OMP_NUM_THREADS",
    "HF_HUB_OFFLINE",
)

# Left by an outer launcher or an earlier run; a rank that reads them would join the wrong group.
NEVER_PASSED_ON = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "LOCAL_SIZE",
    "CROSS_RANK",
    "CROSS_SIZE",
    "GROUP_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_USE_AGENT_STORE",
    "ACCELERATE_USE_CPU",
    "ACCELERATE_USE_FSDP",
    "FTLAUNCH_NODE",
    "FTLAUNCH_TOKEN",
)

# What ftlaunch finds out on each node for that node alone.
OF_THE_NODE = frozenset({"GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "NCCL_IB_DISABLE", "DS_ACCELERATOR"})


@dataclass(frozen=True)
class Variable:
    """`origin`: "job.yaml", "environment" or "ftlaunch"; `reason` where ftlaunch chose it."""

    name: str
    value: str
    origin: str
    reason: str = ""


@dataclass(frozen=True)
class Network:
    """`interface` reaches the other nodes; `node_ip` is this node's address on it (one node: for the hostfile).

    `nodes`: the address of each host in node order, its name where that does not resolve; empty where the hosts are not
    known. `unresolved`: names that have no address yet. `master_addr` of several nodes is node 0's; whoever leads a
    generation hosts its store.
    """

    interface: str
    master_addr: str
    node_ip: str
    reason: str
    nodes: tuple[str, ...] = ()
    unresolved: tuple[str, ...] = ()


def proposals(device: str, num_ranks: int, num_usable_cpus: int, network: Network, has_rdma: bool) -> list[Variable]:
    """What ftlaunch would set where nobody else has."""

    def ours(name: str, value: str, reason: str) -> Variable:
        return Variable(name, value, "ftlaunch", reason)

    wanted = [
        ours("GLOO_SOCKET_IFNAME", network.interface, network.reason),
        ours(
            "TOKENIZERS_PARALLELISM", "false", "the tokenizer's threads do not survive the fork of DataLoader workers"
        ),
        ours("TQDM_DISABLE", "1", "the agent shows progress; bars of every library would fill the logs"),
        ours("PYTHONUNBUFFERED", "1", "a killed rank's last lines are in its log"),
        ours(
            "OMP_NUM_THREADS",
            str(max(1, num_usable_cpus // num_ranks)),
            f"{num_usable_cpus} CPUs for {num_ranks} rank(s)",
        ),
    ]
    if device == "cpu":
        return [*wanted, ours("DS_ACCELERATOR", "cpu", "no GPU")]
    wanted += [
        ours(
            "DS_ACCELERATOR", "cuda", "keeps DeepSpeed from probing, which would make a CUDA context in the fork server"
        ),
        ours("PYTORCH_NVML_BASED_CUDA_CHECK", "1", "torch asks NVML, not CUDA, in the fork server"),
        ours("NCCL_SOCKET_IFNAME", network.interface, network.reason),
        ours("NCCL_DEBUG", "WARN", "NCCL's own words for its failures"),
        ours("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1", "a failed collective ends the rank instead of hanging it"),
        ours("TORCH_NCCL_TRACE_BUFFER_SIZE", "2000", "NCCL's flight recorder: which rank did not enter a collective"),
        ours("TORCH_NCCL_DUMP_ON_TIMEOUT", "1", "the flight recorder is written when a collective times out"),
        ours("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True", "less fragmentation"),
    ]
    if not has_rdma:
        wanted.append(ours("NCCL_IB_DISABLE", "1", "no RDMA device on this node"))
    return wanted


def resolve_environment(
    wanted: list[Variable], job_env: Mapping[str, str], environ: Mapping[str, str]
) -> tuple[Variable, ...]:
    """job.yaml's `env` over the process's environment over ftlaunch's proposals; sorted by name.

    Only variables that matter are listed; the ranks get the whole environment (`base_environ`).
    """
    resolved = {variable.name: variable for variable in wanted}
    for name, value in environ.items():
        if name in resolved or name.startswith(_WATCHED_PREFIXES):
            resolved[name] = Variable(name, value, "environment")
    for name, value in job_env.items():
        resolved[name] = Variable(name, value, "job.yaml")
    return tuple(resolved[name] for name in sorted(resolved))


def base_environ(variables: tuple[Variable, ...], environ: Mapping[str, str]) -> dict[str, str]:
    """What all ranks and the fork server share: the process's environment, cleaned, with the resolved variables on
    top."""
    result = {name: value for name, value in environ.items() if name not in NEVER_PASSED_ON}
    result.update({variable.name: variable.value for variable in variables})
    return result
