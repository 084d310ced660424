"""ftlaunch and its peers: what has to be installed, how each starts the job, and what had to be done for that.

A peer's virtual environment is made once, in `.bench/`. It sees the packages of the project's own environment through a
.pth file, so that all train with the same torch, DeepSpeed, Transformers and PEFT; pip adds only what is missing.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import shlex
import shutil
import socket
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from scripts.bench_peers.job_files import BENCH, ROOT, Job, job_yaml, plain_job

_PORT = 23456  # on the first of two nodes, which have a network of their own
_MAX_RESTARTS = 3


@dataclass(frozen=True)
class Command:
    argv: list[str]
    environ: Mapping[str, str] = field(default_factory=dict)
    node: int = 0
    serves_port: int | None = None  # a service beside the launcher: started first, waited for, never asked to stop


@dataclass(frozen=True)
class Launcher:
    name: str
    version: Callable[[], str]
    commands: Callable[[Job], list[Command]]
    notes: tuple[str, ...] = ()  # what had to be done to make it work, and its settings
    packages: tuple[str, ...] = ()  # of its own environment
    built_for: str | None = None  # the Python that the first of the packages is built for: it is retagged for any
    why_not: Callable[[], str | None] = lambda: None
    is_elastic: bool = True

    @property
    def is_ftlaunch(self) -> bool:
        return self.name == "ftlaunch"


def prepare(launcher: Launcher) -> str | None:
    """Its virtual environment; nothing where it needs none or has it. The reason where it cannot be installed."""
    folder = BENCH / launcher.name
    if not launcher.packages or (folder / "made").is_file():
        return None
    print(f"preparing {launcher.name} in {folder} (once)", file=sys.stderr)
    shutil.rmtree(folder, ignore_errors=True)
    try:
        _install(launcher, folder)
    except subprocess.CalledProcessError as error:
        return f"could not be installed: {shlex.join(error.cmd)} gave {error.returncode}"
    (folder / "made").touch()
    return None


def _install(launcher: Launcher, folder: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    (inside,) = folder.glob("lib/python*/site-packages")
    (inside / "project.pth").write_text(sysconfig.get_path("purelib") + "\n", "utf-8")
    python = str(folder / "bin/python")
    pip = [python, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    packages = list(launcher.packages)
    if launcher.built_for is not None:
        subprocess.run([*pip, "install", "wheel"], check=True)
        asked = ["--no-deps", "--only-binary=:all:", "--python-version", launcher.built_for]
        asked += ["--platform", f"manylinux_2_39_{platform.machine()}"]
        subprocess.run([*pip, "download", *asked, "--dest", str(folder), packages[0]], check=True)
        (built,) = folder.glob("*.whl")
        anywhere = ["--python-tag", "py3", "--abi-tag", "none", "--platform-tag", "any"]
        subprocess.run([python, "-m", "wheel", "tags", "--remove", *anywhere, str(built)], check=True)
        (retagged,) = folder.glob("*.whl")
        packages[0] = str(retagged)
    subprocess.run([*pip, "install", *packages], check=True)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def _version_in(name: str, package: str) -> Callable[[], str]:
    def version() -> str:
        python = str(BENCH / name / "bin/python") if name else sys.executable
        code = f"import importlib.metadata as m; print(m.version({package!r}))"
        return subprocess.run([python, "-c", code], check=True, capture_output=True, text=True).stdout.strip()

    return version


# -- ftlaunch ----------------------------------------------------------------------------------------------------------


def _ftlaunch_version() -> str:
    """With the commit, where there is one, and whether the code differs from it."""
    from launcher import __version__

    revision = _git("rev-parse", "--short=10", "HEAD")
    changed = ", changed" if _git("status", "--porcelain", "--", "launcher", "scripts") else ""
    return f"{__version__} ({revision}{changed})" if revision else __version__


def _git(*arguments: str) -> str:
    told = subprocess.run(["git", "-C", str(ROOT), *arguments], check=False, capture_output=True, text=True)
    return told.stdout.strip()


def _ftlaunch(job: Job) -> list[Command]:
    argv = [sys.executable, "-m", "launcher", "--config", str(job_yaml(job))]
    environ = {"PYTHONPATH": str(ROOT)}
    if job.num_nodes == 1:
        return [Command(argv, environ)]
    commands = []
    for node in range(job.num_nodes):  # as PAI-DLC's PyTorchJob sets them
        role = "master-0" if node == 0 else f"worker-{node - 1}"
        own = {
            "HOSTNAME": f"dlc1a2b3c4d5e6f-{role}",
            "NPROC_PER_NODE": str(job.num_ranks),
            "WORLD_SIZE": str(job.num_nodes),
            "RANK": str(node),
            "MASTER_ADDR": "node0",
            "MASTER_PORT": str(_PORT),
        }
        commands.append(Command(argv, environ | own, node))
    return commands


# -- peers -------------------------------------------------------------------------------------------------------------


def _torchrun(job: Job) -> list[Command]:
    argv = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(job.num_ranks)]
    argv += ["--max-restarts", str(_MAX_RESTARTS), "--monitor-interval", "0.1"]
    environ = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    if job.num_nodes == 1:
        return [Command([*argv, "--standalone", *plain_job(job)], environ)]
    argv += ["--nnodes", f"1:{job.num_nodes}", "--rdzv-backend", "c10d", "--rdzv-id", "bench"]
    argv += ["--rdzv-endpoint", f"node0:{_PORT}"]
    argv += ["--rdzv-conf", "last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=2,join_timeout=60"]
    nodes = range(job.num_nodes)
    return [Command([*argv, "--local-addr", f"node{node}", *plain_job(job)], environ, node) for node in nodes]


def _ft_launcher(job: Job) -> list[Command]:
    argv = [str(BENCH / "ft_launcher/bin/ft_launcher"), "--standalone", "--nproc-per-node", str(job.num_ranks)]
    argv += ["--max-restarts", str(_MAX_RESTARTS), "--monitor-interval", "0.1"]
    return [Command([*argv, *plain_job(job)])]


def _dlrover(job: Job) -> list[Command]:
    port = _PORT if job.num_nodes > 1 else free_port()
    host = "node0" if job.num_nodes > 1 else "127.0.0.1"
    name = f"bench{os.getpid()}"
    master = [str(BENCH / "dlrover-run/bin/python"), "-u", "-m", "dlrover.python.master.main", "--platform", "local"]
    master += ["--port", str(port), "--node_num", str(job.num_nodes), "--job_name", name, "--service_type", "grpc"]
    commands = [Command(master, serves_port=port)]
    nodes = f"--nnodes=1:{job.num_nodes}" if job.num_nodes > 1 else "--nnodes=1"
    argv = [str(BENCH / "dlrover-run/bin/dlrover-run"), nodes, f"--nproc_per_node={job.num_ranks}"]
    argv += [f"--max-restarts={_MAX_RESTARTS}", "--monitor-interval=0.1"]
    if job.num_nodes > 1:
        argv += ["--rdzv-conf", "lastcall_timeout=2,join_timeout=60"]
    for node in range(job.num_nodes):
        environ = {
            "DLROVER_MASTER_ADDR": f"{host}:{port}",
            "DLROVER_MASTER_SERVICE_TYPE": "grpc",
            "NODE_RANK": str(node),
            "NODE_ID": str(node),
            "NODE_NUM": str(job.num_nodes),
            "ELASTIC_JOB_NAME": name,
        }
        if job.num_nodes > 1:
            environ["POD_IP"] = f"10.77.0.{node + 1}"
        commands.append(Command([*argv, *plain_job(job)], environ, node))
    return commands


def _why_no_dlrover() -> str | None:
    if importlib.util.find_spec("telnetlib") is None:
        return "dlrover 0.6.1 imports telnetlib, which Python 3.13 has no more"
    return None


FTLAUNCH = Launcher(
    "ftlaunch",
    _ftlaunch_version,
    _ftlaunch,
    notes=("No script and no settings beside the job: `checkpoint.memory` and `restart` are at their defaults.",),
)
TORCHRUN = Launcher(
    "torchrun",
    _version_in("", "torch"),
    _torchrun,
    notes=(
        "`TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1`: as shipped, torch 2.13 restarts into the store of the dead attempt "
        "and hangs in `init_process_group`.",
        "`--max-restarts 3`: 0 is its default.",
        "Two nodes: `last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=2`; with its defaults (30, 5, 3) "
        "it would take some 46 s to go on alone. The lost node is the second: losing the first ends its job.",
    ),
)
FT_LAUNCHER = Launcher(
    "ft_launcher",
    _version_in("ft_launcher", "nvidia-resiliency-ext"),
    _ft_launcher,
    notes=(
        "Its wheel installs on Python 3.12 with glibc 2.39 or newer only: it is retagged for any. The launcher is pure "
        "Python; the wheel's compiled module, for GPU profiling, is not used.",
        "`--max-restarts 3`: 0 is its default.",
        "It cannot go on with fewer nodes: no figure for a lost node.",
    ),
    packages=("nvidia-resiliency-ext==0.7.0",),
    built_for="3.12",
    is_elastic=False,
)
DLROVER = Launcher(
    "dlrover-run",
    _version_in("dlrover-run", "dlrover"),
    _dlrover,
    notes=(
        "`--standalone` does not start on torch 2.13: its local master is started by hand, before the clock starts.",
        "`pip install dlrover` alone lacks grpc and protobuf: `dlrover[k8s]`, `protobuf` and `numpy`.",
        "Two nodes: `lastcall_timeout=2`. Its master is on the node that stays.",
    ),
    packages=("dlrover[k8s]==0.6.1", "protobuf", "numpy"),
    why_not=_why_no_dlrover,
)
LAUNCHERS = {launcher.name: launcher for launcher in (FTLAUNCH, TORCHRUN, FT_LAUNCHER, DLROVER)}
NOTES: dict[str, tuple[str, ...]] = {
    "": (
        "A fault is the same for all: the benchmark sees step 8 end, then sends the signal. What hangs or fails by "
        "itself does so in the model's own code (`scripts/bench_peers/user_model.py`).",
        "A peer has found a hang once it starts ranks anew or ends. None names a rank.",
        "Where one of two nodes is lost, the peers' script runs without DeepSpeed (DDP): ZeRO's checkpoints cannot be "
        "loaded by another number of ranks. ftlaunch keeps ZeRO-2. Nodes are network namespaces of this machine.",
        "SIGTERM: the peers' Trainer has `enable_jit_checkpoint`, its own save at SIGTERM.",
        "All have `OMP_NUM_THREADS=1`, and the peers `--monitor-interval 0.1`.",
        "A peer's environment sees the packages of the project's own, so that all train with the same versions.",
    ),
    **{launcher.name: launcher.notes for launcher in LAUNCHERS.values()},
}
