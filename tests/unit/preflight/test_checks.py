"""Each check is silent on a healthy node and says one thing when its condition is met; no other check joins in."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from launcher.config.model_files import ModelFiles
from launcher.data.scan import RECORD, ROLE, Fault
from launcher.host.disk_speed import DiskSpeed
from launcher.host.facts import Disk, Gpu, Memory, Mount, Shm, StorageKind, StorageProbe
from launcher.host.net_speed import PairSpeed
from launcher.host.shm_segments import Segment
from launcher.host.software import Copies
from launcher.host.storage_probe import Failure
from launcher.i18n import Text
from launcher.preflight.check_cluster import bandwidth_for, best_of_each, forecast_gain, pairings
from launcher.preflight.check_gpus import kernels_of
from launcher.preflight.check_versions import TESTED
from launcher.preflight.checks import CHECKS, run_checks
from launcher.preflight.cluster_facts import ClusterFacts, NodeReport, StepNeeds
from launcher.preflight.finding import Finding, Severity, worst
from launcher.preflight.inputs import PreflightInputs, Reader
from launcher.preflight.registry import GROUPS
from tests.unit.preflight.conftest import DATA, GIB, HEALTHY, MODEL_FILES, ROCE, WELL, NodeWith, rdma

MIB = 1 << 20
V100 = Gpu(7, "GPU-v", "Tesla V100-SXM2-16GB", 16 * GIB, 0, (7, 0))
CPU_NODE = {"gpus": (), "visible_gpus": (), "nvml": "NVML Shared Library Not Found", "gpu_device_files": ()}
STACK = HEALTHY.versions
OBJECTS = StorageProbe(StorageKind.OBJECT, "fuse.jindo-fuse", ("truncate: ENOTSUP",), (Failure("append", "ENOTSUP"),))


def without(*packages: str) -> dict[str, str]:
    return {name: version for name, version in STACK.items() if name not in packages}


def sick(**health: Any) -> dict[str, Any]:
    """The last card has something."""
    return {"gpus": (*HEALTHY.gpus[:7], replace(HEALTHY.gpus[7], health=replace(WELL, **health)))}


def way(one: str, other: str, mb_per_s: float, latency_s: float = 1e-4) -> tuple[PairSpeed, ...]:
    """Both directions."""
    speed = mb_per_s * 1e6
    return (PairSpeed(one, other, speed, latency_s), PairSpeed(other, one, speed, latency_s))


def cluster(traits: dict[str, str] | None = None, clock_offset_s: float = 0.0, **facts: Any) -> ClusterFacts:
    """Two nodes; the second differs."""
    same = {"torch": "2.13.0", "MTU": "1500"}
    nodes = (NodeReport("n0", "h0", same), NodeReport("n1", "h1", same | (traits or {}), (), clock_offset_s, 0.01))
    return ClusterFacts(**{"num_wanted": 2, "nodes": nodes, "seen_after_s": {"n1": 0.01}} | facts)


IN_ORDER = cluster(speeds=(*way("n0", "n1", 1000), *way("n1", "n0", 1000)))


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
        {"gpus": (*HEALTHY.gpus[:7], V100), "versions": STACK | {"torch_cuda": "12.6"}},
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
    "a record that is no JSON": Case(
        "data.records",
        ERROR,
        {},
        {"data": (replace(DATA, num_unusable=12, unusable=(Fault(RECORD, "t.jsonl", 7, "t.jsonl:7: not JSON"),)),)},
        ("train: 12 unusable, all 1000 records", "t.jsonl:7: not JSON", "and 2 more", "ftlaunch prepare"),
    ),
    "a role that templates do not know": Case(
        "data.roles",
        WARNING,
        {},
        {"data": (replace(DATA, num_roles=1, roles=(Fault(ROLE, "t.jsonl", 9, "t.jsonl:9: 'human'"),)),)},
        ("t.jsonl:9: 'human'", "system, user, assistant"),
    ),
    "records that are there twice": Case(
        "data.repeated", WARNING, {}, {"data": (replace(DATA, num_repeated=50),)}, ("50 (5.0%)", "<= 1%")
    ),
    "answers that are cut off": Case(
        "data.length",
        WARNING,
        {},
        {"data": (replace(DATA, num_cut=30, num_tokens_cut=30_000),)},
        ("about 30.0% cut", "about 33% of all tokens", "data.max_length (now 2048"),
    ),
    "records of which nothing is learned": Case(
        "data.length", WARNING, {}, {"data": (replace(DATA, num_nothing_left=1),)}, ("nothing is learned",)
    ),
    "longer than the model was trained for": Case(
        "data.length",
        WARNING,
        {},
        {"model_files": replace(MODEL_FILES, max_positions=1024)},
        ("<= 1024 positions", "data.max_length: 1024"),
    ),
    "longer than the table of positions": Case(
        "data.length",
        ERROR,
        {},
        {"model_files": replace(MODEL_FILES, max_positions=1024, learned_positions=True)},
        ("device-side assert",),
    ),
    "a token beyond the vocabulary": Case(
        "data.tokens",
        ERROR,
        {},
        {"data": (replace(DATA, largest_id=151_936),)},
        ("largest id 151936", "< 151936", "device-side assert", "resize"),
    ),
    "a tokenizer that is larger than the model": Case(
        "data.tokens", WARNING, {}, {"model_files": replace(MODEL_FILES, tokenizer_size=152_000)}, ("of 152000",)
    ),
    "no chat template": Case(
        "data.template", WARNING, {}, {"model_files": replace(MODEL_FILES, has_chat_template=False)}, ("role: content",)
    ),
    "a shard that is missing": Case(
        "model.files",
        ERROR,
        {},
        {"model_files": replace(MODEL_FILES, problems=("1 of 4 files of the index are missing: model-2.safetensors",))},
        ("model-2.safetensors", "/models/qwen", "git lfs pull"),
    ),
    "a hub that is out of reach": Case(
        "model.files",
        ERROR,
        {},
        {"model_files": ModelFiles("Qwen/Qwen3", None, "HF_HUB_OFFLINE is set and the model is not there", True)},
        ("Qwen/Qwen3", "HF_HUB_OFFLINE", "DataSources", "HF_ENDPOINT"),
    ),
    "deepspeed older than ftlaunch needs": Case(
        "versions.combination", ERROR, {"versions": STACK | {"deepspeed": "0.18.2"}}, {}, ("deepspeed 0.18.2", "0.19.8")
    ),
    "transformers of a later major version": Case(
        "versions.combination", WARNING, {"versions": STACK | {"transformers": "6.0.1"}}, {}, ("below 6", "pip check")
    ),
    "packages that contradict each other": Case(
        "versions.combination",
        WARNING,
        {"conflicts": ("peft 0.21 wants accelerate>=2, installed is 1.15",)},
        {},
        ("peft 0.21 wants",),
    ),
    "two copies of deepspeed": Case(
        "versions.copies",
        WARNING,
        {"copies": (Copies("deepspeed", ("0.19.8 in /a", "0.16.0 in /b")),)},
        {},
        ("deepspeed x 2", "0.16.0 in /b", "pip uninstall -y deepspeed"),
    ),
    "another NCCL than torch was built with": Case(
        "versions.nccl", WARNING, {"versions": STACK | {"nccl": "2.30.7"}}, {}, ("2.30.7", "nvidia-nccl-cu12==2.28.9")
    ),
    "another NCCL in LD_LIBRARY_PATH": Case(
        "versions.nccl", WARNING, {"nccl_libraries": ("/opt/nccl/libnccl.so.2.18",)}, {}, ("/opt/nccl", "hang")
    ),
    "an old glibc": Case("versions.system", WARNING, {"versions": STACK | {"glibc": "2.17"}}, {}, ("2.17", ">= 2.28")),
    "a card that is newer than torch": Case(
        "gpu.capability",
        ERROR,
        {
            "gpus": (replace(HEALTHY.gpus[0], name="NVIDIA B200", capability=(10, 0)),),
            "visible_gpus": (0,),
            "versions": STACK | {"torch_cuda": "12.6"},
        },
        {"num_ranks": 1},
        ("NVIDIA B200: 10.0", "< 10.0", "+cu128"),
    ),
    "memory errors of a card": Case(
        "gpu.ecc", WARNING, sick(uncorrected_errors=2, rows_pending=True), {}, ("GPU 7: 2 uncorrected", "gpu-reset")
    ),
    "memory that cannot be mapped away": Case("gpu.ecc", ERROR, sick(rows_failed=True), {}, ("AntiAffinityNodeNames",)),
    "a card that has fallen off the bus": Case(
        "gpu.xid", WARNING, {}, {"xids": (("0000:3b:00", 79), ("0000:3b:00", 13))}, ("Xid 79 (0000:3b:00)",)
    ),
    "a hot card": Case("gpu.throttled", WARNING, sick(throttled=("temperature (hardware)",)), {}, ("GPU 7: temp",)),
    "a card that nobody may use": Case("gpu.compute_mode", ERROR, sick(compute_mode="prohibited"), {}, ("-c DEFAULT",)),
    "a link that is down": Case(
        "gpu.nvlink", WARNING, sick(links=(10, 12)), {}, ("10 of 12, 12 of 12", "fabricmanager")
    ),
    "leftovers in shm": Case(
        "shm.stale",
        WARNING,
        {"shm_stale": (Segment("nccl-AbCdEf", 10 * MIB), Segment("torch_7_1_0", 9 * MIB))},
        {},
        ("2 segment(s), 19 MiB", "rm /dev/shm/nccl-AbCdEf /dev/shm/torch_7_1_0"),
    ),
    "little memory may be locked for RDMA": Case(
        "limits.memlock", ERROR, {"memlock_limit": 8 * MIB}, {}, ("8 MiB", "ibv_reg_mr", "EnableRDMA")
    ),
    "more workers than processors": Case(
        "limits.cpus", WARNING, {"cpu": replace(HEALTHY.cpu, num_usable=16)}, {}, ("40 processes on 16", "workers: 3")
    ),
    "RDMA ports that are down": Case("net.rdma", ERROR, {"rdma_ports": rdma(*ROCE, active=False)}, {}, ("ibstat",)),
    "RDMA devices that the container was not given": Case(
        "net.rdma", WARNING, {"rdma_ports": rdma(*ROCE, verbs=())}, {}, ("uverbs", "Settings.EnableRDMA")
    ),
    "NCCL_IB_HCA names nothing": Case(
        "net.rdma", ERROR, {}, {"env": {"NCCL_IB_HCA": "=mlx5_9"}}, ("NCCL_IB_HCA=", "mlx5_0")
    ),
    "NCCL_IB_GID_INDEX names an empty row": Case(
        "net.rdma", ERROR, {}, {"env": {"NCCL_IB_GID_INDEX": "7"}}, ("empty row", "{NCCL_IB_GID_INDEX: 3}")
    ),
    "NCCL_IB_GID_INDEX is RoCE v1": Case(
        "net.rdma", WARNING, {}, {"env": {"NCCL_IB_GID_INDEX": "2"}}, ("RoCE v1", "{NCCL_IB_GID_INDEX: 3}")
    ),
    "RDMA switched off": Case("net.rdma", WARNING, {}, {"env": {"NCCL_IB_DISABLE": "1"}}, ("a tenth",)),
    "a node that did not come": Case(
        "cluster.nodes", WARNING, {}, {"cluster": cluster(num_wanted=3)}, ("2 of 3 nodes",)
    ),
    "a node with another torch": Case(
        "cluster.same", WARNING, {}, {"cluster": cluster({"torch": "2.12.0"})}, ("torch: 2.13.0 (n0), 2.12.0 (n1)",)
    ),
    "packets of different sizes": Case("net.mtu", WARNING, {}, {"cluster": cluster({"MTU": "9000"})}, ("9000 (n1)",)),
    "a clock that is off": Case(
        "cluster.clock", WARNING, {}, {"cluster": cluster(clock_offset_s=-7.5)}, ("n1: -7.500 s", "chrony")
    ),
    "a way that is closed": Case(
        "net.reach",
        ERROR,
        {},
        {"cluster": cluster(unreachable=(("n1", "n0", "timed out"),))},
        ("1 of 2 ways", "n1 -> n0: timed out", "security group"),
    ),
    "a folder that one node does not see": Case(
        "disk.visible", ERROR, {}, {"cluster": cluster(unseen={"n1": "not there"})}, ("n1: not there", "DataSources")
    ),
    "a folder that is seen late": Case(
        "disk.visible", WARNING, {}, {"cluster": cluster(seen_after_s={"n1": 3.0})}, ("after 3.00 s by n1", "acdirmax")
    ),
    "a node that is slow with everyone": Case(
        "net.speed",
        WARNING,
        {},
        {"cluster": cluster(speeds=(*way("n0", "n1", 10), *way("n0", "n2", 100), *way("n2", "n3", 100)))},
        ("n1 (80 Mb/s)", "others 800 Mb/s", "AntiAffinityNodeNames"),
    ),
    "nodes that are far apart": Case(
        "net.speed", WARNING, {}, {"cluster": cluster(speeds=way("n0", "n1", 100, latency_s=0.03))}, ("30.00 ms",)
    ),
    "a network that makes two nodes slower than one": Case(
        "net.scaling",
        WARNING,
        {"rdma_ports": None},
        {
            "cluster": cluster(speeds=way("n0", "n1", 8)),
            "step_needs": StepNeeds(16_000_000, 0.5, 2, "measured by an earlier start"),
        },
        ("64 Mb/s: 2 nodes at 0.4 x one node", "2.3 Gb/s for 1.8 x", "train on one node", "EnableRDMA"),
    ),
    "storage that is slower than the notice is long": Case(
        "disk.speed",
        WARNING,
        {},
        {"disk_speed": DiskSpeed(1 << 20, 100e6, None)},
        ("write 95.4 MiB/s", "10 GiB within 25 s", "about 107 s", "TerminationGracePeriodSeconds"),
    ),
    "skip names no check": Case("check.skip", WARNING, {}, {"skip": ("shm.sise",)}, ("shm.size",)),
}


OF_SEVERAL = {check.id for title, checks in GROUPS if title == "Several nodes" for check in checks}
SILENT_WHEN_IN_ORDER = {"gpu.lost", "disk.scratch", "versions.copies", "shm.stale"}


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
    assert {finding.id for finding in findings} == CHECKS.keys() - SILENT_WHEN_IN_ORDER - OF_SEVERAL


def test_several_nodes_in_order(node_with: NodeWith) -> None:
    needs = StepNeeds(16_000_000, 0.5, 2, "measured")
    findings = run_checks(node_with({"rdma_ports": None}, cluster=IN_ORDER, step_needs=needs))
    assert [finding for finding in findings if finding.severity is not Severity.OK] == []
    assert {finding.id for finding in findings} >= OF_SEVERAL
    summed = replace(IN_ORDER, summed_bytes_per_s=8e6)
    (slow,) = [
        finding
        for finding in run_checks(node_with(cluster=summed, step_needs=needs))
        if finding.severity is not Severity.OK
    ]
    assert slow.measured == "64 Mb/s: 2 nodes at 0.4 x one node"
    with_rdma = run_checks(node_with(cluster=IN_ORDER, step_needs=needs))
    assert "net.scaling" not in {finding.id for finding in with_rdma}


@pytest.mark.parametrize("count", [2, 3, 4, 5])
def test_two_rounds_of_pairs_clear_the_partner_of_a_slow_node(count: int) -> None:
    names = [f"n{rank}" for rank in range(count)]

    def speed(pair: tuple[str, str]) -> tuple[PairSpeed, ...]:
        return way(*pair, 1 if "n1" in pair else 100)

    first = [one for pair in pairings(names) for one in speed(pair)]
    assert {name for one in first for name in (one.source, one.target)} == set(names)
    second = [one for pair in pairings(names, best_of_each(first)) for one in speed(pair)]
    best = best_of_each([*first, *second])
    if count > 2:
        assert {name for name in names if best[name] < 50e6} == {"n1"}


def test_the_gain_of_more_nodes_is_what_the_ring_leaves() -> None:
    needs = StepNeeds(gradient_bytes=100_000_000, step_s=1.0, world_size=4, source="")
    assert forecast_gain(needs, 2, 150e6) == pytest.approx(1.0)  # 1.5 x 100 MB take as long as the step
    assert forecast_gain(needs, 2, bandwidth_for(needs, 0.9)) == pytest.approx(1.8)


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
        pytest.param({}, {"data": (), "model_files": None}, id="neither data nor model are known"),
        pytest.param(
            {},
            {"model_files": ModelFiles("Qwen/Qwen3", None), "data": (replace(DATA, num_records=None),)},
            id="a hub that answers, data too large for a second",
        ),
        pytest.param(
            {},
            {
                "data": (replace(DATA, has_turns=False),),
                "model_files": replace(MODEL_FILES, has_chat_template=False),
            },
            id="plain text needs no template",
        ),
        pytest.param({}, {"env": {"NCCL_SOCKET_IFNAME": "^docker,lo"}}, id="NCCL_SOCKET_IFNAME excludes"),
    ],
)
def test_stays_silent(facts: dict[str, Any], inputs: dict[str, Any], node_with: NodeWith) -> None:
    assert complaints(node_with(facts, **inputs)) == []


def test_storage_that_is_lost_and_not_shared_either(node_with: NodeWith) -> None:
    found = complaints(node_with({"mount": Mount("/", "overlay", "overlay", "rw")}))
    assert [finding.id for finding in found] == ["disk.durable", "disk.shared"]


def test_the_versions_that_ftlaunch_is_made_for_are_those_of_pyproject() -> None:
    text = (Path(__file__).parents[3] / "pyproject.toml").read_text("utf-8")
    wanted = dict(re.findall(r'^  "([a-z]+)(>=[\d.,<>=]+)",$', text, re.MULTILINE))
    for package, (lowest, below) in TESTED.items():
        assert wanted[package] == f">={lowest}" + (f",<{below}" if below else "")


@pytest.mark.parametrize(
    ("torch", "cuda", "capability", "fits"),
    [
        ("2.9.1", "12.8", (7, 0), True),
        ("2.7.1", "12.8", (7, 0), False),
        ("2.11.0", "12.8", (7, 0), False),
        ("2.9.1", "12.6", (6, 1), True),
        ("2.9.1", "12.6", (9, 0), True),
        ("2.9.1", "12.6", (12, 0), False),
        ("2.11.0", "13.0", (12, 1), True),
        ("2.11.0", "13.0", (7, 5), True),
    ],
)
def test_which_cards_a_wheel_has_kernels_for(torch: str, cuda: str, capability: tuple[int, int], fits: bool) -> None:
    oldest, newest = kernels_of(torch, cuda)
    assert (oldest <= capability and capability[0] <= newest[0]) is fits


def test_other_interfaces_are_told_with_the_reason(node_with: NodeWith) -> None:
    nics = (*HEALTHY.nics, replace(HEALTHY.nics[1], name="eth3", ipv4=("10.3.0.5",)))
    findings = run_checks(node_with({"nics": nics}, interface_reason="the route to n0"))
    (found,) = [finding for finding in findings if finding.id == "net.interface"]
    assert found.measured == "eth0 10.1.0.5, fe80::5 by the route to n0, not eth3 (10.3.0.5)"


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
