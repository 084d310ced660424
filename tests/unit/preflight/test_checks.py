"""Each check is silent on a healthy node and says one thing when its condition is met; no other check joins in."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from launcher.host.facts import Disk, Gpu, Memory, Mount, Shm, StorageKind, StorageProbe
from launcher.host.storage_probe import Failure
from launcher.i18n import Text
from launcher.preflight.checks import CHECKS, run_checks
from launcher.preflight.finding import Finding, Severity, worst
from launcher.preflight.inputs import PreflightInputs, Reader
from tests.unit.preflight.conftest import GIB, HEALTHY, NodeWith

MIB = 1 << 20
V100 = Gpu(7, "GPU-v", "Tesla V100-SXM2-16GB", 16 * GIB, 0, (7, 0))
CPU_NODE = {"gpus": (), "visible_gpus": (), "nvml": "NVML Shared Library Not Found", "gpu_device_files": ()}
STACK = HEALTHY.versions
OBJECTS = StorageProbe(StorageKind.OBJECT, "fuse.jindo-fuse", ("truncate: ENOTSUP",), (Failure("append", "ENOTSUP"),))


def without(*packages: str) -> dict[str, str]:
    return {name: version for name, version in STACK.items() if name not in packages}


@dataclass(frozen=True)
class Case:
    """A node with one thing wrong, and words that the finding must show in English."""

    id: str
    severity: Severity
    facts: dict[str, Any] = field(default_factory=dict)
    inputs: dict[str, Any] = field(default_factory=dict)
    words: tuple[str, ...] = ()


ERROR, WARNING = Severity.ERROR, Severity.WARNING
CASES = {
    "64 MiB of shm for 8 ranks": Case(
        "shm.size",
        ERROR,
        {"shm": Shm("/dev/shm", 64 * MIB, 64 * MIB)},
        {},
        ("64 MiB free of 64 MiB", ">= 4 GiB", "8 ranks", "--shared-memory 4Gi", "SIGBUS"),
    ),
    "64 MiB of shm for one rank with workers": Case(
        "shm.size", ERROR, {"shm": Shm("/dev/shm", 64 * MIB, 64 * MIB)}, {"num_ranks": 1}, (">= 1 GiB",)
    ),
    "64 MiB of shm for CPU ranks with workers": Case(
        "shm.size", ERROR, CPU_NODE | {"shm": Shm("/dev/shm", 64 * MIB, 64 * MIB)}, {"device": "cpu", "num_ranks": 2}
    ),
    "64 MiB of shm for CPU ranks without workers": Case(
        "shm.size",
        WARNING,
        CPU_NODE | {"shm": Shm("/dev/shm", 64 * MIB, 64 * MIB)},
        {"device": "cpu", "num_ranks": 2, "num_dataloader_workers": 0},
    ),
    "512 MiB of shm": Case("shm.size", WARNING, {"shm": Shm("/dev/shm", 512 * MIB, 512 * MIB)}),
    "shm full of leftovers": Case(
        "shm.size", ERROR, {"shm": Shm("/dev/shm", 64 * GIB, 5 * MIB)}, {}, ("ls -l /dev/shm",)
    ),
    "no /dev/shm": Case("shm.size", ERROR, {"shm": None}, {}, ("0 B free of 0 B",)),
    "lo for two nodes": Case(
        "net.interface", ERROR, {}, {"interface": "lo"}, ("lo", "only this machine", "eth0 (10.1.0.5)")
    ),
    "docker0 for two nodes": Case("net.interface", ERROR, {}, {"interface": "docker0"}, ("docker0", "eth0")),
    "link-local for two nodes": Case("net.interface", ERROR, {}, {"interface": "eth2"}, ("link-local",)),
    "interface missing": Case("net.interface", ERROR, {}, {"interface": "bond0"}, ("no interface bond0",)),
    "interface down": Case("net.interface", ERROR, {}, {"interface": "eth1"}, ("eth1 is down",)),
    "interface missing on one node": Case("net.interface", ERROR, {}, {"interface": "bond0", "num_nodes": 1}),
    "NCCL_SOCKET_IFNAME names nothing": Case(
        "net.ifname_env",
        ERROR,
        {},
        {"env": {"NCCL_SOCKET_IFNAME": "bond"}},
        ("NCCL_SOCKET_IFNAME=bond", "n0", "eth0 (10.1.0.5)"),
    ),
    "NCCL_SOCKET_IFNAME is a bridge": Case(
        "net.ifname_env", ERROR, {}, {"env": {"NCCL_SOCKET_IFNAME": "=docker0"}}, ("docker0", "cannot reach")
    ),
    "GLOO_SOCKET_IFNAME takes no prefix": Case(
        "net.ifname_env", WARNING, {}, {"env": {"GLOO_SOCKET_IFNAME": "eth"}}, ("GLOO_SOCKET_IFNAME=eth",)
    ),
    "GLOO_SOCKET_IFNAME on the CPU": Case(
        "net.ifname_env", ERROR, CPU_NODE, {"device": "cpu", "env": {"GLOO_SOCKET_IFNAME": "eth0,bond0"}}
    ),
    "port in use": Case("net.port", ERROR, {}, {"port_free": False}, ("29500 in use", "cluster.master_port", "ss -l")),
    "port of the platform in use": Case(
        "net.port", ERROR, {}, {"port_free": False, "env": {"MASTER_PORT": "29500"}}, ("MASTER_PORT",)
    ),
    "disk too small": Case(
        "disk.free", ERROR, {"disk": Disk("/mnt/data", 50 * GIB, 20 * GIB, 9, "ok")}, {}, ("20 GiB free", ">= 100 GiB")
    ),
    "disk low, need unknown": Case(
        "disk.free", WARNING, {"disk": Disk("/mnt/data", GIB, 9 * MIB, 9, "ok")}, {"disk_needed_bytes": None}
    ),
    "no inodes": Case("disk.free", ERROR, {"disk": Disk("/mnt/data", GIB, GIB, 0, "ok")}, {}, ("df -i",)),
    "disk read-only": Case(
        "disk.writable",
        ERROR,
        {"disk": Disk("/mnt/data", GIB, 900 * GIB, 9, "the file system of /mnt/data is mounted read-only")},
        {},
        ("read-only", "MountAccess: RW"),
    ),
    "disk silent": Case(
        "disk.writable", ERROR, {"disk": Disk("/mnt/data", None, None, None, "the file system gave no answer")}
    ),
    "output on the container's own disk": Case(
        "disk.durable",
        WARNING,
        {"mount": Mount("/", "overlay", "overlay", "rw")},
        {"num_nodes": 1},
        ("overlay at /", "NAS"),
    ),
    "a mount that renames nothing": Case(
        "disk.kind",
        ERROR,
        {"storage": StorageProbe(StorageKind.OBJECT, "fuse.ossfs2", ("x",), (Failure("rename file", "EPERM"),))},
        {"num_nodes": 1},
        ("rename file (EPERM)", "NAS or CPFS"),
    ),
    "a mount that does not answer the probe": Case(
        "disk.kind",
        WARNING,
        {"storage": StorageProbe(StorageKind.POSIX, "nfs4", not_tried="no answer within 30 s")},
        {},
        ("no answer within 30 s", "taken for posix"),
    ),
    "TensorBoard where nothing can be appended": Case(
        "disk.kind",
        ERROR,
        {"storage": OBJECTS},
        {"num_nodes": 1, "tensorboard": True},
        ("truncate: ENOTSUP", "TENSORBOARD_LOGGING_DIR", "EnableOssAppend"),
    ),
    "no room to make a checkpoint": Case(
        "disk.scratch",
        ERROR,
        {"storage": OBJECTS},
        {"num_nodes": 1, "scratch": Disk("/tmp", GIB, 20 * MIB, 9, "ok"), "scratch_needed_bytes": GIB},
        ("20 MiB free in /tmp", ">= 1 GiB", "TMPDIR"),
    ),
    "an object mount for two nodes": Case(
        "disk.shared",
        ERROR,
        {"storage": OBJECTS, "mount": Mount("/mnt/data", "fuse.jindo-fuse", "oss", "rw")},
        {},
        ("2 nodes cannot agree", "NAS or CPFS", "train on one node"),
    ),
    "a disk of one machine for two nodes": Case(
        "disk.shared",
        WARNING,
        {"mount": Mount("/data", "ext4", "/dev/sda1", "rw")},
        {},
        ("ext4 at /data", "2 nodes need one output_dir", "check.skip: [disk.shared]"),
    ),
    "FUSE whose locks nobody knows for two nodes": Case(
        "disk.shared",
        WARNING,
        {"mount": Mount("/mnt/data", "fuse.jindo-fuse", "oss", "rw")},
        {},
        ("fuse.jindo-fuse at /mnt/data", "locks", "earlier start"),
    ),
    "NFS without locks for two nodes": Case(
        "disk.shared", WARNING, {"mount": Mount("/mnt/data", "nfs", "nas:/", "rw,nolock,vers=3")}, {}, ("nolock",)
    ),
    "the agents' port in use": Case(
        "net.agent_port", ERROR, {}, {"agent_port_free": False}, ("29430 in use", "cluster.agent_port", "ss -ltnp")
    ),
    "memory too small": Case(
        "memory.host",
        ERROR,
        {"memory": Memory(512 * GIB, 400 * GIB, 64 * GIB, 16 * GIB)},
        {"memory_tier_bytes": None},
        ("48 GiB available (cgroup limit 64 GiB, 16 GiB used)", ">= 64 GiB", "-9 or 137"),
    ),
    "memory tight": Case(
        "memory.host", WARNING, {"memory": Memory(512 * GIB, 66 * GIB, None, None)}, {"memory_tier_bytes": None}
    ),
    "checkpoints in memory would not fit": Case(
        "memory.tier",
        WARNING,
        {},
        {"memory_tier_bytes": 200 * GIB},
        ("needs 200 GiB on this node, 176 GiB are free", "it is off", "checkpoint.peer: off", "DLC"),
    ),
    "checkpoints in memory leave nothing to spare": Case(
        "memory.tier", WARNING, {}, {"memory_tier_bytes": 160 * GIB, "num_nodes": 1}, ("it is off",)
    ),
    "checkpoints in memory that were asked for would not fit": Case(
        "memory.tier",
        ERROR,
        {},
        {"memory_tier_bytes": 200 * GIB, "memory_tier_required": True},
        ("176 GiB left by the ranks", ">= 200 GiB", "-9 or 137", "checkpoint.memory: off"),
    ),
    "checkpoints in memory that were asked for fit tightly": Case(
        "memory.tier", WARNING, {}, {"memory_tier_bytes": 160 * GIB, "memory_tier_required": True}
    ),
    "fewer GPUs than ranks": Case(
        "gpu.visible", ERROR, {"visible_gpus": (0, 1)}, {}, ("2 of 8 visible", ">= 8", "nproc_per_node: auto")
    ),
    "a GPU that is not there": Case(
        "gpu.visible",
        ERROR,
        {"visible_gpus": (0,), "missing_gpus": ("9",)},
        {"num_ranks": 1, "env": {"CUDA_VISIBLE_DEVICES": "0,9"}},
        ("CUDA_VISIBLE_DEVICES=0,9", "0,1,2,3,4,5,6,7"),
    ),
    "a GPU that is not there, so the CPU was chosen": Case(
        "gpu.visible",
        ERROR,
        {"visible_gpus": (), "missing_gpus": ("9",)},
        {"device": "cpu", "num_ranks": 1, "env": {"CUDA_VISIBLE_DEVICES": "9"}},
    ),
    "all GPUs hidden": Case(
        "gpu.visible", ERROR, {"visible_gpus": ()}, {"env": {"CUDA_VISIBLE_DEVICES": ""}}, ("hides them all",)
    ),
    "GPUs idle while the CPU trains": Case("gpu.visible", WARNING, {}, {"device": "cpu"}, ("will train on the CPU",)),
    "driver does not answer": Case(
        "gpu.visible",
        ERROR,
        {"gpus": (), "visible_gpus": (), "nvml": "Driver/library version mismatch"},
        {},
        ("/dev/nvidia0", "Driver/library version mismatch"),
    ),
    "driver does not answer, so the CPU was chosen": Case(
        "gpu.visible",
        ERROR,
        {"gpus": (), "visible_gpus": (), "nvml": "Driver Not Loaded"},
        {"device": "cpu"},
        ("CUDA_VISIBLE_DEVICES=-1",),
    ),
    "no GPU": Case("gpu.visible", ERROR, CPU_NODE, {}, ("no GPU", "EcsSpec")),
    "accelerators without NVML": Case(
        "gpu.visible", WARNING, CPU_NODE | {"gpu_device_files": ("/dev/alixpu0",)}, {}, ("ppu-smi",)
    ),
    "GPU lost, enough are left": Case(
        "gpu.lost", WARNING, {"lost_gpus": ("GPU 3: GPU is lost",)}, {}, ("GPU 3: GPU is lost",)
    ),
    "driver too old": Case(
        "gpu.driver",
        ERROR,
        {"versions": STACK | {"torch": "2.11.0", "torch_cuda": "13.0", "driver": "535.54.03", "cuda_driver": "12.2"}},
        {},
        ("535.54.03", "CUDA 13.0", "Settings.Driver", "+cu12x"),
    ),
    "GPU too old for this CUDA": Case(
        "gpu.capability",
        ERROR,
        {
            "gpus": (replace(V100, index=0),),
            "visible_gpus": (0,),
            "versions": STACK | {"torch_cuda": "13.0", "cuda_driver": "13.0"},
        },
        {"num_ranks": 1},
        ("Tesla V100", "7.0", ">= 7.5"),
    ),
    "GPU in use": Case(
        "gpu.memory_used",
        WARNING,
        {"gpus": (*HEALTHY.gpus[:7], replace(HEALTHY.gpus[7], memory_used_bytes=20 * GIB))},
        {},
        ("GPU 7: 20 GiB", "nvidia-smi"),
    ),
    "GPUs of two kinds": Case(
        "gpu.mixed",
        WARNING,
        {"gpus": (*HEALTHY.gpus[:7], V100)},
        {},
        ("7 x NVIDIA A100-SXM4-80GB + 1 x Tesla V100-SXM2-16GB", "no bf16", "CUDA_VISIBLE_DEVICES=0,1,2,3,4,5,6"),
    ),
    "a step that only shorter rows fit into": Case(
        "gpu.memory",
        WARNING,
        {},
        {"gpu_needed_bytes": 90 * GIB, "gpu_states_bytes": 40 * GIB},
        (
            "90 GiB at the peak of a step",
            "<= 80 GiB",
            "data.max_length",
            "gradient_accumulation_steps",
            "ftlaunch plan",
        ),
    ),
    "weights that no row length makes fit, on the smallest card": Case(
        "gpu.memory",
        ERROR,
        {"gpus": (replace(HEALTHY.gpus[0], memory_total_bytes=24 * GIB), *HEALTHY.gpus[1:])},
        {"gpu_needed_bytes": 40 * GIB, "gpu_states_bytes": 30 * GIB},
        ("weights, optimizer and CUDA alone take 30 GiB", "<= 24 GiB", "deepspeed.stage: 3", "method: qlora"),
    ),
    "few open files with workers": Case(
        "limits.nofile", WARNING, {"nofile_limit": 1024}, {}, ("1024", "ulimit -n 65536")
    ),
    "few open files and no way to raise them": Case(
        "limits.nofile", WARNING, {"nofile_limit": 1024, "nofile_hard_limit": 4096}, {}, ("LimitNOFILE",)
    ),
    "far too few open files": Case(
        "limits.nofile", ERROR, {"nofile_limit": 200}, {"num_dataloader_workers": 0}, ("ulimit -n 4096",)
    ),
    "no deepspeed": Case(
        "versions.stack", ERROR, {"versions": without("deepspeed")}, {}, ("deepspeed", 'pip install "ftlaunch[train]"')
    ),
    "no bitsandbytes for qlora": Case(
        "versions.stack",
        ERROR,
        {"versions": without("bitsandbytes")},
        {"method": "qlora"},
        ("bitsandbytes", 'pip install "ftlaunch[qlora]"'),
    ),
    "nothing installed": Case(
        "versions.stack", ERROR, {"versions": {}}, {"method": "qlora"}, ('pip install "ftlaunch[train,qlora]"',)
    ),
    "torch without CUDA": Case(
        "versions.stack", ERROR, {"versions": without("torch_cuda") | {"torch": "2.13.0+cpu"}}, {}, ("2.13.0+cpu",)
    ),
    "skip names no check": Case("check.skip", WARNING, {}, {"skip": ("shm.sise",)}, ("shm.size",)),
}


def complaints(inputs: PreflightInputs) -> list[Finding]:
    return [finding for finding in run_checks(inputs) if finding.severity is not Severity.OK]


def shown(finding: Finding) -> str:
    return " ".join((finding.measured, finding.bound, finding.message.en, finding.remedy.en))


@pytest.mark.parametrize("name", CASES)
def test_fires(name: str, node_with: NodeWith) -> None:
    case = CASES[name]
    (finding,) = complaints(node_with(case.facts, **case.inputs))
    assert (finding.id, finding.severity) == (case.id, case.severity)
    for word in case.words:
        assert word in shown(finding)
    for text in (finding.message, finding.remedy):
        assert text.en
        assert text.zh
        assert any("\u4e00" <= character <= "\u9fff" for character in text.zh)
    assert finding.measured
    assert finding.bound


def test_a_lost_card_that_is_needed_stops_the_start(node_with: NodeWith) -> None:
    findings = complaints(node_with({"lost_gpus": ("GPU 3: GPU is lost",)}, num_ranks=64))
    assert ("gpu.lost", ERROR) in [(finding.id, finding.severity) for finding in findings]


def test_every_check_has_a_case() -> None:
    assert {case.id for case in CASES.values()} == CHECKS.keys() | {"check.skip"}


def test_a_healthy_node_is_in_order_everywhere_it_is_looked_at(node_with: NodeWith) -> None:
    findings = run_checks(node_with())
    assert [finding for finding in findings if finding.severity is not Severity.OK] == []
    assert {finding.id for finding in findings} == CHECKS.keys() - {"gpu.lost", "disk.scratch"}


@pytest.mark.parametrize(
    ("facts", "inputs"),
    [
        pytest.param(CPU_NODE, {"device": "cpu", "num_ranks": 1}, id="a laptop"),
        pytest.param(
            {"shm": Shm("/dev/shm", 64 * MIB, 64 * MIB)},
            {"num_ranks": 1, "num_dataloader_workers": 0},
            id="one rank needs no shm",
        ),
        pytest.param({}, {"interface": "lo", "num_nodes": 1, "env": {}}, id="lo is enough for one node"),
        pytest.param({"mount": Mount("/", "xfs", "/dev/sda", "rw")}, {"num_nodes": 1}, id="a local disk for one node"),
        pytest.param(
            {"mount": Mount("/", "fuse.jindo-fuse", "oss", "rw"), "storage": OBJECTS},
            {"num_nodes": 1, "scratch": Disk("/tmp", GIB, GIB, 9, "ok"), "scratch_needed_bytes": GIB},
            id="an object mount for one node",
        ),
        pytest.param({"mount": Mount("/", "fuse.juicefs", "j", "rw")}, {}, id="FUSE with locks"),
        pytest.param({"mount": Mount("/", "lustre", "l", "rw")}, {}, id="Lustre"),
        pytest.param({}, {"agent_port_free": None}, id="no meeting"),
        pytest.param(
            {"memory": Memory(512 * GIB, 400 * GIB, 72 * GIB, 0)},
            {"memory_tier_bytes": None},
            id="checkpoints in memory are off",
        ),
        pytest.param({"memory": None}, {"memory_tier_required": True}, id="memory that cannot be read"),
        pytest.param({}, {"gpu_needed_bytes": None, "gpu_states_bytes": None}, id="a model of unknown shape"),
        pytest.param({}, {"interface": "auto", "port_free": None, "disk_needed_bytes": None}, id="nothing asked"),
        pytest.param({"versions": {}}, {"method": None}, id="a trainer of the user's own"),
        pytest.param({"disk": Disk("/oss", None, None, None, "ok")}, {}, id="an object store that tells no size"),
        pytest.param(
            {"gpus": (), "visible_gpus": (), "nvml": "Driver Not Loaded"},
            {"device": "cpu", "env": {"CUDA_VISIBLE_DEVICES": "-1"}},
            id="a broken driver where the CPU was asked for",
        ),
        pytest.param({}, {"env": {"NCCL_SOCKET_IFNAME": "^docker,lo"}}, id="NCCL_SOCKET_IFNAME excludes"),
    ],
)
def test_stays_silent(facts: dict[str, Any], inputs: dict[str, Any], node_with: NodeWith) -> None:
    assert complaints(node_with(facts, **inputs)) == []


def test_storage_that_is_lost_and_not_shared_either(node_with: NodeWith) -> None:
    found = complaints(node_with({"mount": Mount("/", "overlay", "overlay", "rw")}))
    assert [finding.id for finding in found] == ["disk.durable", "disk.shared"]


def test_a_skipped_check_says_nothing(node_with: NodeWith) -> None:
    spoiled = node_with({"shm": None}, skip=("shm.size",))
    assert "shm.size" not in {finding.id for finding in run_checks(spoiled)}


def test_worst_comes_first(node_with: NodeWith) -> None:
    findings = run_checks(node_with({"shm": None, "nofile_limit": 1024}))
    assert [finding.severity for finding in findings[:3]] == [Severity.ERROR, Severity.WARNING, Severity.OK]
    assert worst(findings) is Severity.ERROR


@pytest.mark.parametrize(
    ("inputs", "in_container", "reader", "words"),
    [
        ({"platform": "dlc"}, True, Reader.DLC, "ResourceConfig.SharedMemory"),
        ({"env": {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}}, True, Reader.KUBERNETES, "medium: Memory"),
        ({"platform": "slurm"}, False, Reader.SLURM, "remount"),
        ({}, True, Reader.CONTAINER, "--shm-size=4g"),
        ({}, False, Reader.BARE, "mount -o remount,size=4G"),
    ],
)
def test_the_remedy_is_for_the_platform(
    inputs: dict[str, Any], in_container: bool, reader: Reader, words: str, node_with: NodeWith
) -> None:
    node = node_with({"shm": None, "in_container": in_container}, **{"platform": "", "env": {}} | inputs)
    (finding,) = complaints(node)
    assert node.reader is reader
    assert words in finding.remedy.en
    assert words in finding.remedy.zh


def test_the_language_is_the_readers(node_with: NodeWith) -> None:
    (finding,) = complaints(node_with({"shm": None}))
    assert finding.to_json({"FTLAUNCH_LANG": "zh"})["message"] == finding.message.zh
    assert finding.to_json({"LANG": "C"})["message"] == finding.message.en
    assert isinstance(finding.message, Text)
