"""Platforms whose place is not simply in a variable each. Every reader refuses what it cannot tell with certainty."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence

from launcher.errors import UserError
from launcher.platforms.nodelist import expand_nodelist, read_hostfile
from launcher.platforms.place import Nodes, Place, Sight, show_environ
from launcher.platforms.row import Platform, first_in, nodes_in, number_in, rank_in, ranks_in

SAGEMAKER_FILE = "/opt/ml/input/config/resourceconfig.json"
MPI_HOSTFILE = "/etc/mpi/hostfile"


def shown(row: Platform, environ: Mapping[str, str]) -> str:
    return f"{row.name} ({show_environ(environ, *row.names)})"


# -- Kubeflow ----------------------------------------------------------------------------------------------------------


def read_kubeflow_v1(row: Platform, sight: Sight) -> Place:
    """An elastic job without a master gets no rank: the pod's name has the worker's index, and worker 0 hosts the
    rendezvous."""
    environ = sight.environ
    num_nodes = nodes_in(environ, row.num_nodes) or 1
    host, _, port = environ.get("PET_RDZV_ENDPOINT", "").rpartition(":")
    rank = number_in(environ, row.node_rank)
    if rank is None:
        worker = re.search(r"-worker-(\d+)$", environ.get("HOSTNAME", ""))
        rank = int(worker.group(1)) if worker else rank_in(environ, row, num_nodes)
    return Place(
        platform=row.name,
        num_nodes=num_nodes,
        node_rank=rank,
        num_ranks_per_node=ranks_in(environ, row.num_ranks),
        master_addr=first_in(environ, row.master_addr) or host or None,
        master_port=number_in(environ, row.master_port) or (int(port) if host and port.isdigit() else None),
        evidence=row.evidence(environ),
    )


# -- Kubernetes: JobSet and any Indexed Job ----------------------------------------------------------------------------


def read_indexed_job(row: Platform, sight: Sight) -> Place:
    """The index is there, the number of nodes is not; and an Indexed Job may as well be many jobs of their own."""
    environ = sight.environ
    index = number_in(environ, row.node_rank) or 0
    num_nodes = sight.asked.num_nodes
    if num_nodes is None:
        raise UserError(
            f"{shown(row, environ)}: this pod is number {index} of a JobSet or an Indexed Job. It may be one node of "
            f"several, or a job by itself; nothing says which. Write cluster.nodes into job.yaml: the number of pods "
            f"(with MASTER_ADDR in the pods' env, see docs/platforms.md), or 1 for a job by itself."
        )
    if num_nodes == 1:
        return Place(row.name, 1, 0, evidence=row.evidence(environ))
    rank = environ.get("RANK")
    if rank is not None and rank != str(index):
        raise UserError(
            f"{shown(row, environ)}: JOB_COMPLETION_INDEX says that this is node {index}, RANK says {rank}. "
            f"With several Jobs in a JobSet the index begins anew in each. Name the hosts in cluster.hosts, or set "
            f"RANK to the index."
        )
    if not environ.get("MASTER_ADDR"):
        raise UserError(
            f"{shown(row, environ)}: cluster.nodes asks for several nodes, but nothing says where node 0 is. Set "
            f"MASTER_ADDR in the pods' env; for a JobSet it is JOBSET-JOB-0-0.JOBSET"
        )
    return Place(
        platform=row.name,
        num_nodes=num_nodes,
        node_rank=index,
        master_addr=environ["MASTER_ADDR"],
        master_port=number_in(environ, row.master_port),
        evidence=row.evidence(environ),
    )


# -- Volcano -----------------------------------------------------------------------------------------------------------


def read_volcano(row: Platform, sight: Sight) -> Place:
    """The pytorch plugin gives nodes and rank. Without it: the hosts of all tasks, where `master` comes first; the
    pod's own name says which of them it is, and with one task its index does."""
    environ = sight.environ
    if "WORLD_SIZE" in environ and "MASTER_ADDR" in environ:
        num_nodes = nodes_in(environ, ("WORLD_SIZE",)) or 1
        return Place(
            platform=row.name,
            num_nodes=num_nodes,
            node_rank=rank_in(environ, row, num_nodes),
            master_addr=environ["MASTER_ADDR"],
            master_port=number_in(environ, row.master_port),
            evidence=row.evidence(environ),
        )
    lists = {name: value.split(",") for name, value in environ.items() if re.fullmatch(r"VC_\w+_HOSTS", name) and value}
    ordered = sorted(lists, key=lambda name: (name != "VC_MASTER_HOSTS", name))
    evidence = (*row.evidence(environ), *((name, environ[name]) for name in ordered))
    hosts = tuple(host.strip() for name in ordered for host in lists[name])
    if not hosts and sight.asked.num_nodes == 1:
        return Place(row.name, 1, 0, evidence=evidence)
    if not hosts:
        raise UserError(
            f"{shown(row, environ)}: the pods of the job are not named. Add `svc: []` to plugins of the Volcano job, "
            f"or name the hosts in cluster.hosts; or write cluster.nodes: 1 for a pod by itself."
        )
    if len(lists) > 1 and set(lists) != {"VC_MASTER_HOSTS", "VC_WORKER_HOSTS"}:
        raise UserError(
            f"{row.name} ({', '.join(ordered)}): the job has several tasks, and which of their pods are nodes of this "
            f"run is not known. Use one task, or tasks called master and worker, or name the hosts in cluster.hosts."
        )
    rank = index_of_this_machine(hosts, sight.names)
    if rank is None and len(lists) == 1:
        rank = number_in(environ, ("VC_TASK_INDEX", "VK_TASK_INDEX"))
    if rank is None:
        names = ", ".join(sorted(sight.names))
        raise UserError(f"{row.name}: this pod ({names}) is none of the job's hosts: {', '.join(hosts)}")
    return Place(row.name, len(hosts), rank, master_addr=hosts[0], hosts=hosts, evidence=evidence)


# -- MPI ---------------------------------------------------------------------------------------------------------------


def read_mpi(row: Platform, sight: Sight) -> Place:
    """The launcher pod has the hostfile. It is a node only where the hostfile names it; it often has no GPU."""
    environ = sight.environ
    path = first_in(environ, row.hosts) or MPI_HOSTFILE
    text = sight.outside.read_text(path)
    if text is None:
        worker = environ.get("K_MPI_JOB_ROLE") == "worker"
        what = " in this worker pod, which only waits for the launcher" if worker else ""
        raise UserError(
            f"{shown(row, environ)}: {path} cannot be read{what}. Run ftlaunch as the command of the "
            f"launcher pod, or name the hosts in cluster.hosts."
        )
    lines = read_hostfile(text, path)
    hosts = tuple(host for host, _ in lines)
    slots = {number for _, number in lines}
    common = slots.pop() if len(slots) == 1 else None
    rank = index_of_this_machine(hosts, sight.names)
    if rank is None and environ.get("K_MPI_JOB_ROLE") == "worker":
        raise UserError(f"{shown(row, environ)}: this worker pod is not in {path}, which names {', '.join(hosts)}")
    return Place(
        platform=row.name,
        num_nodes=len(hosts),
        node_rank=rank,
        # `slots=1` is what the operators write where the job says nothing: it does not count the GPUs.
        num_ranks_per_node=common if common and common > 1 else None,
        master_addr=hosts[0],
        hosts=hosts,
        evidence=(*row.evidence(environ), (path, f"{len(hosts)} hosts")),
    )


# -- Slurm -------------------------------------------------------------------------------------------------------------


def read_slurm(row: Platform, sight: Sight) -> Place:
    environ = sight.environ
    num_nodes = nodes_in(environ, row.num_nodes) or 1
    in_step = any(name in environ for name in ("SLURM_STEP_ID", "SLURM_STEPID", "SLURM_STEP_NODELIST"))
    rank = number_in(environ, row.node_rank)
    if num_nodes != 1 and not in_step and not rank:
        if sight.asked.num_nodes == 1:
            return Place(row.name, 1, 0, ranks_in(environ, row.num_ranks), evidence=row.evidence(environ))
        raise UserError(
            f"{shown(row, environ)}: the job has {environ[_first_name(environ, row.num_nodes)]} nodes, but this is no "
            f"step of srun (no SLURM_STEP_ID): a batch script and a shell of salloc run on one node only. Start one "
            f"ftlaunch on each node: srun --ntasks-per-node=1 ftlaunch --config ...; or write cluster.nodes: 1 to use "
            f"this node alone."
        )
    _refuse_several_tasks(row, environ)
    hosts = _slurm_hosts(row, sight)
    if hosts and len(hosts) != num_nodes:
        raise UserError(
            f"{shown(row, environ)}: {_first_name(environ, row.num_nodes)} says {num_nodes} nodes, the node list names "
            f"{len(hosts)}: {', '.join(hosts)}. Name the hosts in cluster.hosts."
        )
    return Place(
        platform=row.name,
        num_nodes=num_nodes,
        node_rank=rank_in(environ, row, num_nodes),
        num_ranks_per_node=ranks_in(environ, row.num_ranks),
        master_addr=hosts[0] if hosts else None,
        hosts=hosts,
        evidence=row.evidence(environ),
    )


def _refuse_several_tasks(row: Platform, environ: Mapping[str, str]) -> None:
    """One agent a node: with eight tasks on each, seven more would start a run of their own."""
    tasks = {item.split("(")[0] for item in environ.get("SLURM_STEP_TASKS_PER_NODE", "1").split(",")}
    if tasks - {"1"} or environ.get("SLURM_LOCALID", "0") != "0":
        raise UserError(
            f"{shown(row, environ)}: srun has started several tasks on a node; ftlaunch starts the ranks itself and is "
            f"needed once on each: srun --ntasks-per-node=1 ftlaunch --config ..."
        )
    if environ.get("SLURM_HET_SIZE", "1") not in ("0", "1"):
        raise UserError(
            f"{shown(row, environ)}: a heterogeneous job numbers the nodes of each component by itself. Use one "
            f"component, or name the hosts in cluster.hosts."
        )


def _slurm_hosts(row: Platform, sight: Sight) -> tuple[str, ...]:
    text = first_in(sight.environ, row.hosts)
    if text is None:
        return ()
    try:
        return expand_nodelist(text)
    except ValueError as error:
        expanded = sight.outside.scontrol(text)
        if expanded and expanded.split():
            return tuple(expanded.split())
        raise UserError(
            f"{shown(row, sight.environ)}: the node list {text!r} is not understood ({error}), and "
            f"`scontrol show hostnames` does not expand it here. Name the hosts in cluster.hosts."
        ) from None


def _first_name(environ: Mapping[str, str], names: Sequence[str]) -> str:
    return next(name for name in names if name in environ)


# -- clouds ------------------------------------------------------------------------------------------------------------


def read_sagemaker(row: Platform, sight: Sight) -> Place:
    """`SM_HOSTS` is set by SageMaker's toolkit; images without it have the same in a file."""
    environ = sight.environ
    evidence = row.evidence(environ)
    try:
        if "SM_HOSTS" in environ:
            hosts, current = json.loads(environ["SM_HOSTS"]), environ.get("SM_CURRENT_HOST")
        else:
            text = sight.outside.read_text(SAGEMAKER_FILE)
            document = json.loads(text) if text is not None else {}
            hosts, current = document["hosts"], document["current_host"]
            evidence = (*evidence, (SAGEMAKER_FILE, f"{current} of {hosts}"))
    except (ValueError, KeyError, TypeError):
        raise UserError(f"{shown(row, environ)}: neither SM_HOSTS nor {SAGEMAKER_FILE} names the hosts") from None
    if not isinstance(hosts, list) or not hosts or not all(isinstance(host, str) for host in hosts):
        raise UserError(f"{shown(row, environ)}: a list of host names is expected, not {hosts!r}")
    if current not in hosts:
        raise UserError(f"{shown(row, environ)}: SM_CURRENT_HOST is {current!r}, which is none of {', '.join(hosts)}")
    return Place(
        platform=row.name,
        num_nodes=len(hosts),
        node_rank=hosts.index(current),
        num_ranks_per_node=ranks_in(environ, row.num_ranks),
        master_addr=hosts[0],
        hosts=tuple(hosts),
        evidence=evidence,
    )


def read_azure(row: Platform, sight: Sight) -> Place:
    """WORLD_SIZE counts processes: it is the number of nodes only with one process on each."""
    environ = sight.environ
    counted = nodes_in(environ, row.num_nodes)
    world = number_in(environ, ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE")) or 1
    local = number_in(environ, ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK")) or 0
    one_per_node = environ.get("OMPI_COMM_WORLD_LOCAL_SIZE", "1") == "1"
    if local or not one_per_node or (isinstance(counted, int) and world > counted):
        raise UserError(
            f"{shown(row, environ)}: Azure ML has started several processes on a node; ftlaunch starts the ranks "
            f"itself and is needed once on each: set process_count_per_instance: 1 in the job's distribution"
        )
    if counted is None and world > 1 and "OMPI_COMM_WORLD_LOCAL_SIZE" not in environ:
        raise UserError(
            f"{shown(row, environ)}: WORLD_SIZE={world} may count nodes, or the processes of fewer nodes; "
            f"AZUREML_NODE_COUNT, which would tell, is not set. Name the hosts in cluster.hosts."
        )
    num_nodes: Nodes = counted or world
    rank = rank_in(environ, row, num_nodes)
    host, _, port = environ.get("AZ_BATCH_MASTER_NODE", "").partition(":")
    return Place(
        platform=row.name,
        num_nodes=num_nodes,
        node_rank=rank,
        master_addr=environ.get("MASTER_ADDR") or host or environ.get("AZ_BATCHAI_MPI_MASTER_NODE") or None,
        master_port=number_in(environ, ("MASTER_PORT",)) or (int(port) if port.isdigit() else None),
        evidence=row.evidence(environ),
    )


def read_volcengine(row: Platform, sight: Sight) -> Place:
    environ = sight.environ
    role = environ.get("MLP_ROLE", "WORKER").upper()
    if role != "WORKER":
        raise UserError(
            f"{shown(row, environ)}: this is a {role}; ftlaunch runs on workers only. Give the job no other roles."
        )
    num_nodes = nodes_in(environ, row.num_nodes) or 1
    hosts = tuple(host.strip() for host in environ.get("MLP_WORKER_ALL_HOSTS", "").split(",") if host.strip())
    return Place(
        platform=row.name,
        num_nodes=num_nodes,
        node_rank=rank_in(environ, row, num_nodes),
        num_ranks_per_node=ranks_in(environ, row.num_ranks),
        master_addr=first_in(environ, row.master_addr),
        master_port=number_in(environ, row.master_port),
        hosts=hosts if len(hosts) == num_nodes else (),
        evidence=row.evidence(environ),
    )


def refuse_ray(row: Platform, sight: Sight) -> Place:
    """Inside a Ray task the world is Ray's: it places, counts and kills processes by itself."""
    environ = sight.environ
    if sight.asked.num_nodes == 1:
        return Place(row.name, 1, 0, evidence=row.evidence(environ))
    raise UserError(
        f"{shown(row, environ)}: Ray starts, places and restarts processes by itself, and does not say which nodes are "
        f"meant for this run. Start ftlaunch as the machines' own command instead of through Ray, for example with "
        f"cluster.hosts; or write cluster.nodes: 1 to train on this machine alone."
    )


# -- told by hand ------------------------------------------------------------------------------------------------------


def read_by_hand(row: Platform, sight: Sight) -> Place:
    """RANK and MASTER_ADDR of an unknown platform, which job.yaml makes clear with cluster.nodes."""
    environ = sight.environ
    num_nodes = sight.asked.num_nodes or 1
    world = environ.get("WORLD_SIZE")
    most = num_nodes[1] if isinstance(num_nodes, tuple) else num_nodes
    if world is not None and world != str(most) and "NODE_RANK" not in environ:
        raise UserError(
            f"{shown(row, environ)}: cluster.nodes asks for {most} nodes, WORLD_SIZE says {world}: it may count nodes, "
            f"or processes, and then RANK may be that of a process. Set NODE_RANK to the node's index, or unset "
            f"WORLD_SIZE."
        )
    return Place(
        platform=row.name,
        num_nodes=num_nodes,
        node_rank=rank_in(environ, row, num_nodes),
        master_addr=environ["MASTER_ADDR"],
        master_port=number_in(environ, row.master_port),
        evidence=row.evidence(environ),
    )


def index_of_this_machine(hosts: Sequence[str], names: frozenset[str]) -> int | None:
    """Which of `hosts` this machine is, by full name, or by the name before the first dot (`pod.service`)."""
    short = {name.split(".")[0] for name in names if not _is_address(name)}
    full = [index for index, host in enumerate(hosts) if host in names]
    by_short = [index for index, host in enumerate(hosts) if not _is_address(host) and host.split(".")[0] in short]
    found = full or by_short
    return found[0] if len(found) == 1 else None


def _is_address(name: str) -> bool:
    return ":" in name or re.fullmatch(r"[\d.]+", name) is not None
