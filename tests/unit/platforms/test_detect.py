"""Every platform from a realistic environment; near misses; two readings are refused and both are named."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from launcher.errors import UserError
from launcher.platforms.detect import PLATFORMS, Asked, Outside, Place, detect_place
from launcher.platforms.outside import real_outside
from tests.unit.platforms import environments as envs

Environ = Mapping[str, str]


def outside(*names: str, files: Mapping[str, str] | None = None, dns: Mapping[str, str] | None = None) -> Outside:
    known = {name: frozenset({address}) for name, address in (dns or {}).items()}
    return Outside(frozenset(names), (files or {}).get, lambda wanted: {n: known[n] for n in wanted if n in known})


def without(environ: Environ, *names: str) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name not in names}


@dataclass(frozen=True)
class Case:
    environ: Environ
    place: tuple[object, ...]  # platform, nodes, node rank, ranks per node, master address, master port, hosts
    asked: Asked = field(default_factory=Asked)
    outside: Outside = field(default_factory=Outside)


ALGO = ("algo-1", "algo-2")
VC_HOSTS = ("tune-master-0.tune", "tune-worker-0.tune", "tune-worker-1.tune")
MPI_HOSTS = ("tune-worker-0.tune.default.svc", "tune-worker-1.tune.default.svc")
MPI = {"/etc/mpi/hostfile": envs.MPI_OPERATOR_FILE}
KDL_MPI = {"/etc/mpi/hostfile": envs.KUBEDL_MPI_FILE}
SLURM_HOSTS = ("gpu01", "gpu02", "gpu03", "gpu07")
DLC, KF1, KF2 = "PAI-DLC PyTorchJob", "Kubeflow PyTorchJob v1", "Kubeflow Trainer v2"
DLC_MASTER = "dlc18isgeayd1234-master-0"
SM_FILE = {"/opt/ml/input/config/resourceconfig.json": '{"current_host": "algo-2", "hosts": ["algo-1", "algo-2"]}'}

CASES = {
    "DLC": Case(envs.DLC, (DLC, 2, 1, 8, DLC_MASTER, 23456, ())),
    "DLC, the master": Case({**envs.DLC, "HOSTNAME": DLC_MASTER, "RANK": "0"}, (DLC, 2, 0, 8, DLC_MASTER, 23456, ())),
    "DLC, workers only": Case(
        {**envs.DLC, "HOSTNAME": "dlc1a-worker-0", "RANK": "0", "MASTER_ADDR": "dlc1a-worker-0"},
        (DLC, 2, 0, 8, "dlc1a-worker-0", 23456, ()),
    ),
    "DLC, submitted as a PAI TrainingJob": Case(
        {**envs.DLC, "HOSTNAME": "train9x-worker-0"}, (DLC, 2, 1, 8, DLC_MASTER, 23456, ())
    ),
    "DLC without GPUs": Case(
        {**envs.DLC, "NPROC_PER_NODE": "0", "KUBERNETES_CONTAINER_RESOURCE_GPU": "0"},
        (DLC, 2, 1, None, DLC_MASTER, 23456, ()),
    ),
    "DLC, one of the two names of the GPU count": Case(
        without(envs.DLC, "NPROC_PER_NODE"), (DLC, 2, 1, 8, DLC_MASTER, 23456, ())
    ),
    "DLC, one node, no rank": Case(
        {**without(envs.DLC, "RANK"), "WORLD_SIZE": "1"}, (DLC, 1, 0, 8, DLC_MASTER, 23456, ())
    ),
    "DLC, elastic by job.yaml": Case(
        envs.DLC, (DLC, (1, 2), 1, 4, DLC_MASTER, 23456, ()), Asked((1, 2), num_ranks_per_node=4)
    ),
    "KubeDL": Case(envs.KUBEDL, ("KubeDL PyTorchJob", 4, 3, None, "tune-master-0", 23456, ())),
    "KubeDL, the master sees itself": Case(
        {**envs.KUBEDL, "RANK": "0", "MASTER_ADDR": "localhost"},
        ("KubeDL PyTorchJob", 4, 0, None, "localhost", 23456, ()),
    ),
    "Kubeflow v1: WORLD_SIZE counts processes": Case(envs.KUBEFLOW_V1, (KF1, 2, 1, 8, "tune-master-0", 23456, ())),
    "Kubeflow v1, elastic": Case(envs.KUBEFLOW_V1_ELASTIC, (KF1, (1, 4), 2, None, "tune-worker-0", 23456, ())),
    "Kubeflow v1, elastic and job.yaml too": Case(
        envs.KUBEFLOW_V1_ELASTIC, (KF1, (2, 4), 2, None, "tune-worker-0", 23456, ()), Asked((2, 4))
    ),
    "Trainer v2": Case(envs.TRAINER_V2, (KF2, 3, 1, None, "tune-node-0-0.tune", 29400, ())),
    "Trainer v2 with a number of ranks": Case(
        {**envs.TRAINER_V2, "PET_NPROC_PER_NODE": "4"}, (KF2, 3, 1, 4, "tune-node-0-0.tune", 29400, ())
    ),
    "JobSet": Case(
        envs.JOBSET, ("JobSet or Indexed Job", 4, 2, None, "tune-workers-0-0.tune", 3389, ()), Asked(num_nodes=4)
    ),
    "Indexed Job, a job by itself": Case(
        envs.JOBSET, ("JobSet or Indexed Job", 1, 0, None, None, None, ()), Asked(num_nodes=1)
    ),
    "Volcano, pytorch plugin": Case(envs.VOLCANO_PYTORCH, ("Volcano job", 3, 2, None, "tune-master-0.tune", 23456, ())),
    "Volcano, svc plugin": Case(envs.VOLCANO_PLAIN, ("Volcano job", 3, 2, None, "tune-master-0.tune", None, VC_HOSTS)),
    "Volcano, the master": Case(
        {**envs.VOLCANO_PLAIN, "HOSTNAME": "tune-master-0", "VC_TASK_INDEX": "0"},
        ("Volcano job", 3, 0, None, "tune-master-0.tune", None, VC_HOSTS),
    ),
    "Volcano, one task whose pods have names of their own": Case(
        without(envs.VOLCANO_ONE_TASK, "HOSTNAME"),
        ("Volcano job", 2, 1, None, "tune-trainer-0.tune", None, ("tune-trainer-0.tune", "tune-trainer-1.tune")),
    ),
    "MPI operator, launcher": Case(
        envs.MPI_OPERATOR, ("MPIJob", 2, None, 8, MPI_HOSTS[0], None, MPI_HOSTS), outside=outside(files=MPI)
    ),
    "MPI operator, a worker that has the hostfile": Case(
        {**envs.MPI_OPERATOR, "K_MPI_JOB_ROLE": "worker", "HOSTNAME": "tune-worker-1"},
        ("MPIJob", 2, 1, 8, MPI_HOSTS[0], None, MPI_HOSTS),
        outside=outside(files=MPI),
    ),
    "KubeDL MPIJob: slots=1 counts nothing": Case(
        envs.KUBEDL_MPI,
        ("MPIJob", 3, None, None, "tune-worker-0", None, ("tune-worker-0", "tune-worker-1", "tune-worker-2")),
        outside=outside(files=KDL_MPI),
    ),
    "Slurm": Case(envs.SLURM, ("Slurm", 4, 2, 8, "gpu01", None, SLURM_HOSTS)),
    "Slurm, a step on some of the nodes": Case(
        {**envs.SLURM, "SLURM_STEP_NODELIST": "gpu[02-03]", "SLURM_STEP_NUM_NODES": "2", "SLURM_NODEID": "1"},
        ("Slurm", 2, 1, 8, "gpu02", None, ("gpu02", "gpu03")),
    ),
    "Slurm, batch script on one node": Case(
        {**envs.SLURM_BATCH_SCRIPT, "SLURM_NNODES": "1", "SLURM_JOB_NODELIST": "gpu01"},
        ("Slurm", 1, 0, 8, "gpu01", None, ("gpu01",)),
    ),
    "Slurm, batch script, this node alone": Case(
        envs.SLURM_BATCH_SCRIPT, ("Slurm", 1, 0, 8, None, None, ()), Asked(num_nodes=1)
    ),
    "Slurm, a list that only scontrol understands": Case(
        {**envs.SLURM, "SLURM_STEP_NODELIST": "odd{1..4}"},
        ("Slurm", 4, 2, 8, "a", None, ("a", "b", "c", "d")),
        outside=Outside(scontrol={"odd{1..4}": "a\nb\nc\nd\n"}.get),
    ),
    "SageMaker": Case(envs.SAGEMAKER, ("SageMaker", 2, 1, 8, "algo-1", None, ALGO)),
    "SageMaker without its toolkit": Case(
        without(envs.SAGEMAKER, "SM_HOSTS", "SM_CURRENT_HOST", "SM_NUM_GPUS"),
        ("SageMaker", 2, 1, None, "algo-1", None, ALGO),
        outside=outside(files=SM_FILE),
    ),
    "Azure ML, PyTorch": Case(envs.AZURE, ("Azure ML", 2, 1, None, "10.0.0.4", 6105, ())),
    "Azure ML, MPI": Case(envs.AZURE_MPI, ("Azure ML", 4, 3, None, "10.0.0.4", 6000, ())),
    "Azure ML, one instance": Case({"AZUREML_RUN_ID": "a"}, ("Azure ML", 1, 0, None, None, None, ())),
    "Volcengine": Case(
        envs.VOLCENGINE,
        ("Volcengine ML Platform", 2, 1, 8, "10.128.97.74", 2222, ("10.128.97.74", "10.128.96.17")),
    ),
    "Ray, this machine alone": Case(envs.RAY, ("Ray", 1, 0, None, None, None, ()), Asked(num_nodes=1)),
    "by hand": Case(envs.BY_HAND, ("MASTER_ADDR and RANK", 2, 1, None, "10.0.0.1", 29500, ()), Asked(num_nodes=2)),
    "by hand, WORLD_SIZE counts nodes": Case(
        {"MASTER_ADDR": "h0", "RANK": "2", "WORLD_SIZE": "4"},
        ("MASTER_ADDR and RANK", (2, 4), 2, None, "h0", None, ()),
        Asked(num_nodes=(2, 4)),
    ),
    "one machine": Case({"HOSTNAME": "laptop", "PATH": "/bin"}, ("one machine", 1, 0, None, None, None, ())),
}
# Not quite a platform: nothing is read into it.
NEAR_MISSES = {
    "a pod": envs.POD,
    "a pod that happens to be called like DLC's": {**envs.POD, "HOSTNAME": "dlc1-master-0"},
    "a pod of DSW": {**envs.POD, "HOSTNAME": "dsw-77-worker-0", "KUBERNETES_CONTAINER_RESOURCE_GPU": "1"},
    "an image with PYTHONUNBUFFERED": {**envs.POD, "PYTHONUNBUFFERED": "1", "MASTER_ADDR": "a", "RANK": "0"},
    "a world of one": {"WORLD_SIZE": "1", "RANK": "0", "MASTER_ADDR": "localhost"},
    "a shell of Slurm without an allocation": {"SLURM_JOB_ID": "42", "SLURM_CONF": "/etc/slurm.conf"},
    "Open MPI settings of the site": {"OMPI_MCA_btl": "tcp,self", "OMPI_MCA_orte_default_hostfile": "/home/me/hosts"},
    "a Ray cluster elsewhere": {"RAY_ADDRESS": "ray://head:10001"},
    "an AWS machine": {"AWS_REGION": "us-west-2", "SM_MODEL_DIR": "/opt/ml/model"},
    "an Azure batch node": {"AZ_BATCH_NODE_ID": "tvm-1", "AZ_BATCH_MASTER_NODE": "10.0.0.4:6000"},
    "some of Volcengine's": {"MLP_TASK_ID": "t-1", "MLP_ROLE": "WORKER"},
    "a single index word": {"VC_WORKER_NUM": "2", "JOB_INDEX": "0"},
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_place(case: Case) -> None:
    place = detect_place(case.environ, case.asked, case.outside)
    found = (place.platform, place.num_nodes, place.node_rank, place.num_ranks_per_node, place.master_addr)
    assert (*found, place.master_port, place.hosts) == case.place


def test_every_platform_has_an_environment_here() -> None:
    assert {row.name for row in PLATFORMS} <= {case.place[0] for case in CASES.values()}


@pytest.mark.parametrize("environ", NEAR_MISSES.values(), ids=NEAR_MISSES)
def test_near_misses_are_one_machine(environ: Environ) -> None:
    assert detect_place(environ) == Place("one machine", 1, 0)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_evidence_is_what_was_seen(case: Case) -> None:
    evidence = dict(detect_place(case.environ, case.asked, case.outside).evidence)
    assert bool(evidence) is (case.place[0] != "one machine")
    said = {name: value for name, value in evidence.items() if "/" not in name and "." not in name}
    assert said.items() <= dict(case.environ).items()


def test_job_yaml_is_evidence_where_it_gives_the_number() -> None:
    evidence = dict(detect_place(envs.JOBSET, Asked(num_nodes=4)).evidence)
    assert evidence["JOB_COMPLETION_INDEX"] == "2"
    assert evidence["cluster.nodes"] == "4"


REFUSED = {
    "a world that no platform explains": ({"WORLD_SIZE": "8", "RANK": "3"}, Asked(), "nodes .*or processes"),
    "the same in a pod": ({**envs.POD, "WORLD_SIZE": "8", "RANK": "3"}, Asked(), "WORLD_SIZE=8 is set.*unset"),
    "two platforms that disagree": (
        {**envs.SLURM, **envs.KUBEDL},
        Asked(),
        "KubeDL PyTorchJob says node 3 of 4 .*Slurm says node 2 of 4",
    ),
    "DLC without a rank": (without(envs.DLC, "RANK"), Asked(), "RANK, which says which of them this is, is not set"),
    "a rank outside": ({**envs.DLC, "RANK": "2"}, Asked(), "node 2, counted from 0, of 2: one of the two is wrong"),
    "fewer nodes in job.yaml": (envs.SLURM, Asked(num_nodes=2), "Slurm has started 4 nodes .*cluster.nodes asks for 2"),
    "more nodes in job.yaml": (envs.DLC, Asked(num_nodes=4), "has started 2 nodes .*cluster.nodes asks for 4"),
    "a minimum that cannot be reached": (envs.DLC, Asked(num_nodes=(3, 4)), "2 nodes .*cluster.nodes asks for 3:4"),
    "a maximum that leaves nodes out": (envs.SLURM, Asked(num_nodes=(1, 3)), "4 nodes .*cluster.nodes asks for 1:3"),
    "one node of several": (envs.DLC, Asked(num_nodes=1), "has started 2 nodes .*cluster.nodes asks for 1"),
    "elastic Kubeflow, a pod without index": (
        {**envs.KUBEFLOW_V1_ELASTIC, "HOSTNAME": "x"},
        Asked(),
        "PET_NODE_RANK or RANK",
    ),
    "PET_NNODES backwards": ({**envs.TRAINER_V2, "PET_NNODES": "4:2"}, Asked(), "PET_NNODES is '4:2'; MIN:MAX"),
    "JobSet without cluster.nodes": (envs.JOBSET, Asked(), "one node of several, or a job by itself.*cluster.nodes"),
    "JobSet without a master": (without(envs.JOBSET, "MASTER_ADDR"), Asked(num_nodes=4), "Set MASTER_ADDR"),
    "JobSet of several Jobs": (
        {**envs.JOBSET, "RANK": "6"},
        Asked(num_nodes=8),
        "JOB_COMPLETION_INDEX says that this is node 2, RANK says 6",
    ),
    "JobSet with more pods than nodes": (envs.JOBSET, Asked(num_nodes=2), "node 2, counted from 0, of 2"),
    "Volcano without svc": ({"VC_TASK_INDEX": "0"}, Asked(), "Add `svc: \\[\\]` to plugins"),
    "Volcano, several tasks": ({**envs.VOLCANO_ONE_TASK, "VC_PS_HOSTS": "a"}, Asked(), "several tasks"),
    "Volcano, a pod of another name": (
        {**envs.VOLCANO_PLAIN, "HOSTNAME": "x"},
        Asked(),
        "this pod \\(x\\) is none of the job's hosts",
    ),
    "MPI worker": (
        {**envs.POD, "K_MPI_JOB_ROLE": "worker"},
        Asked(),
        "worker pod, which only waits.*command of the launcher pod",
    ),
    "Slurm, batch script": (envs.SLURM_BATCH_SCRIPT, Asked(), "one node only.*srun --ntasks-per-node=1"),
    "Slurm, shell of salloc": (
        without(envs.SLURM_BATCH_SCRIPT, "SLURM_NODEID"),
        Asked(),
        "shell of salloc.*srun --ntasks-per-node=1",
    ),
    "Slurm, a task for each GPU": (
        {**envs.SLURM, "SLURM_STEP_TASKS_PER_NODE": "8(x4)"},
        Asked(),
        "several tasks on a node.*--ntasks-per-node=1",
    ),
    "Slurm, lists that disagree": (
        {**envs.SLURM, "SLURM_STEP_NODELIST": "gpu[01-03]"},
        Asked(),
        "says 4 nodes, the node list names 3",
    ),
    "Slurm, a list that nobody understands": (
        {**envs.SLURM, "SLURM_STEP_NODELIST": "gpu[a-b]"},
        Asked(),
        "no number and no range.*scontrol",
    ),
    "Slurm, heterogeneous": ({**envs.SLURM, "SLURM_HET_SIZE": "2"}, Asked(), "heterogeneous"),
    "SageMaker, another host": ({**envs.SAGEMAKER, "SM_CURRENT_HOST": "algo-9"}, Asked(), "none of algo-1, algo-2"),
    "SageMaker, no list": ({**envs.SAGEMAKER, "SM_HOSTS": "algo-1"}, Asked(), "names the hosts"),
    "Azure ML, a process for each GPU": (
        {**envs.AZURE, "WORLD_SIZE": "16", "LOCAL_RANK": "3"},
        Asked(),
        "process_count_per_instance: 1",
    ),
    "Azure ML, number of nodes unknown": (
        without(envs.AZURE, "AZUREML_NODE_COUNT"),
        Asked(),
        "WORLD_SIZE=2 may count nodes, or the processes",
    ),
    "Volcengine, another role": ({**envs.VOLCENGINE, "MLP_ROLE": "PS"}, Asked(), "this is a PS"),
    "Ray": (envs.RAY, Asked(), "Ray starts, places and restarts processes by itself"),
    "nodes out of nowhere": ({}, Asked(num_nodes=2), "asks for 2 nodes, but no platform.*cluster.hosts"),
    "by hand, processes": (
        {"MASTER_ADDR": "a", "RANK": "1", "WORLD_SIZE": "16"},
        Asked(num_nodes=2),
        "asks for 2 nodes, WORLD_SIZE says 16",
    ),
}


@pytest.mark.parametrize(("environ", "asked", "said"), REFUSED.values(), ids=REFUSED)
def test_what_is_not_certain_is_refused(environ: Environ, asked: Asked, said: str) -> None:
    with pytest.raises(UserError, match=said) as caught:
        detect_place(environ, asked)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("value", ["", "two", "-1", "1.5", "²", "0", "1:", ":2"])
def test_a_number_that_is_none_is_told_with_its_variable(value: str) -> None:
    with pytest.raises(UserError, match=r"WORLD_SIZE is .* expected"):
        detect_place({**envs.DLC, "WORLD_SIZE": value})


# -- hosts that job.yaml names -----------------------------------------------------------------------------------------

HOSTS = ("10.0.0.1", "node-b.example.org", "me@node-c")


@pytest.mark.parametrize(
    ("names", "rank"),
    [
        (("here", "10.0.0.1"), 0),
        (("node-b",), 1),
        (("node-b.example.org",), 1),
        (("node-c.example.org", "10.0.0.3"), 2),
        (("login", "10.0.0.9"), None),  # a head outside the list
        (("renamed", "10.0.0.2"), 1),  # by DNS
    ],
)
def test_which_of_the_hosts_this_is(names: tuple[str, ...], rank: int | None) -> None:
    place = detect_place({}, Asked(hosts=HOSTS), outside(*names, dns={"node-b.example.org": "10.0.0.2"}))
    assert place == Place(
        "cluster.hosts", 3, rank, None, "10.0.0.1", None, HOSTS, (("cluster.hosts", ", ".join(HOSTS)),)
    )


def test_a_hostfile_is_a_list_of_hosts() -> None:
    files = {"/jobs/hostfile": "# ours\na slots=4\nb slots=4\n"}
    place = detect_place({}, Asked(hostfile="/jobs/hostfile", num_nodes=(1, 2)), outside("b", files=files))
    assert place == Place("hostfile", (1, 2), 1, 4, "a", None, ("a", "b"), (("hostfile", "/jobs/hostfile"),))


def test_hosts_of_job_yaml_win_over_the_platform() -> None:
    place = detect_place(envs.SLURM, Asked(hosts=("gpu02", "gpu03")), outside("gpu03"))
    assert (place.platform, place.num_nodes, place.node_rank) == ("cluster.hosts", 2, 1)


def test_one_host_may_be_called_localhost() -> None:
    assert detect_place({}, Asked(hosts=("localhost",))).node_rank == 0


@pytest.mark.parametrize(
    ("environ", "asked", "names", "said"),
    [
        ({}, Asked(hosts=("localhost", "b")), ("b",), "localhost, which is another machine on each"),
        ({}, Asked(hosts=("alias", "10.0.0.5")), ("x", "10.0.0.5x"), "alias and 10.0.0.5 are both this machine"),
        (envs.SLURM, Asked(hosts=("a", "b")), ("gpu03",), r"gpu03\) is none of cluster.hosts \(a, b\), but Slurm"),
        ({}, Asked(hostfile="/none"), ("a",), "cluster.hostfile: /none: it cannot be read"),
        ({}, Asked(hosts=("a", "b"), num_nodes=1), ("a",), "asks for 1 node, but cluster.hosts names 2: a, b"),
        ({}, Asked(hosts=("a", "b"), num_nodes=(1, 3)), ("a",), r"names 2: a, b. .*write cluster.nodes: 1:2\."),
        ({}, Asked(hosts=("a", "b"), num_nodes=(2, 3)), ("a",), r"write cluster.nodes: 2\."),
    ],
)
def test_hosts_that_cannot_be_right(environ: Environ, asked: Asked, names: tuple[str, ...], said: str) -> None:
    dns = {"alias": "10.0.0.5x", "10.0.0.5": "10.0.0.5x"}
    with pytest.raises(UserError, match=said):
        detect_place(environ, asked, outside(*names, dns=dns))


def test_different_slots_are_refused_unless_job_yaml_gives_the_number() -> None:
    files = {"/f": "a slots=4\nb slots=8\n"}
    with pytest.raises(UserError, match=r"different numbers of slots \(a slots=4, b slots=8\)"):
        detect_place({}, Asked(hostfile="/f"), outside("a", files=files))
    assert detect_place({}, Asked(hostfile="/f", num_ranks_per_node=4), outside("a", files=files)).num_nodes == 2


def test_more_hosts_than_nodes_are_a_reserve() -> None:
    place = detect_place({}, Asked(hosts=("a", "b", "c"), num_nodes=2), outside("c"))
    assert (place.num_nodes, place.node_rank) == (2, 2)


def test_a_hostfile_that_cannot_be_read_says_why(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    for name, why in (("none", "no such file or directory"), (".", "is a directory"), ("binary", "no text in UTF-8")):
        with pytest.raises(UserError, match=why):
            detect_place({}, Asked(hostfile=str(tmp_path / name)), real_outside())
