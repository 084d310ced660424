"""Write `docs/platforms.md` from the table of platforms, so that page and code cannot drift apart.

python scripts/gen_platform_docs.py            # write the page
python scripts/gen_platform_docs.py --check    # exit 1 when the page is not up to date
"""

import argparse
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # the scripts belong to this checkout, installed or not

from launcher.platforms.nesting import OUTER_LAUNCHERS  # noqa: E402
from launcher.platforms.row import Certainty, Platform, Sign  # noqa: E402
from launcher.platforms.table import BY_HAND, PLATFORMS  # noqa: E402

TARGET = ROOT / "docs" / "platforms.md"

HEAD = """\
# Platforms

Written by `scripts/gen_platform_docs.py` from `launcher/platforms/table.py`; do not edit this page.

ftlaunch finds out by environment variables which platform has started it, how many nodes there are and which of them
this is. `ftlaunch plan` shows the platform and the variables that say so; with `--json` under `place`.

- What job.yaml says wins: `cluster.hosts` and `cluster.hostfile` over every platform; `cluster.nodes` and
  `cluster.nproc_per_node` over the platform's values.
- A place is never guessed. Where two readings are possible (two platforms that disagree, job.yaml and a platform that
  disagree, a `WORLD_SIZE` that nobody explains) ftlaunch names both and ends with exit code 2.
- Where nothing is recognised it is one machine by itself.
- `RANK`, `WORLD_SIZE`, `MASTER_ADDR` and the like are never passed on to the ranks as they came.

## Several nodes

The platform starts the same command on every node, and each is one agent: `n0`, `n1`, ... by the node index.

- **Where they meet**: at the hosts of the job, where the platform names them; else at the master, from where each hears
  of the others. A master's name that does not resolve yet (its pod is not up) is waited for, up to
  `cluster.wait_seconds`; `ftlaunch plan` says so and goes on.
- **Port**: `cluster.agent_port`, else the platform's `MASTER_PORT` (a Kubernetes service may let through no other),
  else 29430. The ranks of each attempt take a fresh port on the node that leads.
- **Interface**: the one that holds the address by which the list of hosts, or `MASTER_ADDR`, knows this node; else that
  of the route to node 0, or on node 0 to another host; else that of the default route. IPv4. `cluster.interface` wins.
  It becomes `GLOO_SOCKET_IFNAME` and `NCCL_SOCKET_IFNAME` unless you or the platform have set them.
- **Who is let in**: who has the run's token (`cluster.token`, `FTLAUNCH_TOKEN`, else one that the first node draws in
  output_dir), the same job.yaml, the same versions (Python to the minor release, the driver does not matter), the same
  device, precision, ZeRO stage, number of ranks and output folder. A difference is shown as
  `precision: fp16 here, bf16 there`.
- **output_dir** is one folder for all nodes, at the same path ([preflight](preflight.md): `disk.shared`).
- **Fewer nodes**: with `cluster.nodes: MIN:MAX` the run goes on with MIN or more. An optimizer step keeps its number of
  samples; each rank does more micro-batches. `deepspeed.stage: auto` is chosen for MIN nodes.
"""

LISTED = """\
## Hosts that you name

`cluster.hosts: [10.0.0.1, node-2, me@node-3]`, or `cluster.hostfile: /job/hostfile` with `HOST slots=N` lines: the
node's index is its place in the list. This machine is found there by an address or by its name, else by resolving the
names (3 s for all). A machine outside the list only starts the others; where a platform of the table has started it,
that is refused. A host that stands there twice, also by two names, is refused, and so is `localhost` among several.

`slots` is the number of ranks on each node, as DeepSpeed reads it, unless `cluster.nproc_per_node` is given; different
numbers are refused. With fewer `cluster.nodes` than hosts (at least 2) the others are a reserve.
"""

NESTING = """\
## Inside another launcher

ftlaunch starts the ranks itself. Inside a rank of another launcher it refuses to start; run it as the job's command,
once on each node.

| launcher | recognised by |
|---|---|
"""

AFTER_NESTING = """\

The `PMI_*` variables say nothing inside a step of Slurm, which sets them too. On Azure ML `mpirun` with one process
on each node is how a command is started, and is accepted.
"""

CAVEATS = """\
## Caveats

- Nothing here was tried on the platform itself.
- Remedies of preflight are worded for DLC, Slurm, Kubernetes (`KUBERNETES_SERVICE_HOST`), a container, or a bare
  machine.
- A platform that is not in the table: [MASTER_ADDR and RANK](#master_addr-and-rank), or `cluster.hosts`.

## PAI-DLC

- `UserCommand`: `exec ftlaunch --config /mnt/data/job.yaml`. DLC runs it below a shell; `exec` puts ftlaunch in the
  shell's place, so that SIGTERM reaches it.
- Restart policy `ExitCode`: 138 asks for a restart, 1 to 3 do not ([exit-codes.md](exit-codes.md)).
- `SharedMemory` of the resource configuration: 4 GiB or more for eight GPUs (64 MiB x ranks², at least 1 GiB). Jobs
  on public resources (`EcsSpec`) have no such field; `ftlaunch check` measures what is there.
- `output_dir` on a NAS, CPFS or OSS mount, with `MountAccess: RW`; for several nodes NAS or CPFS.
- Several nodes: nothing to set. `WORLD_SIZE`, `RANK`, `MASTER_ADDR` and `MASTER_PORT` of the job are read; the agents
  meet at `MASTER_ADDR`, port `MASTER_PORT` (23456).
- `TerminationGracePeriodSeconds` at least `spot.grace_seconds` and 5 s more. Spot instances may be taken without any
  notice: then the run goes on from the newest checkpoint, so choose `checkpoint.every_steps` by what you can bear to
  lose.
- The settings that the platform presets on RDMA nodes (`NCCL_IB_*`, `NCCL_SOCKET_IFNAME`) are kept as they are.
- The DLC job id plays no part: submit the same job again and the same output_dir continues.
- OSS mounts (JindoFuse, ossfs) have no atomic rename and know no locks. One node can use them: checkpoints are made on
  the node's own disk and [put file by file](checkpoints.md#on-object-mounts). Of two starts in one folder the later one
  takes over. Several nodes need NAS or CPFS. `monitor.tensorboard` needs `Settings.EnableOssAppend`.

## Slurm

- One task on each node, from the batch script or a shell of `salloc`: `srun --ntasks-per-node=1 ftlaunch ...`.
- Node 0 is the first of the node list. The agents meet at all hosts of the list, port 29430. Two jobs on one node need
  different ports: `cluster.agent_port`.
- To go on with fewer nodes (`cluster.nodes: MIN:MAX`) the job has to outlive a node: `sbatch --no-kill` and
  `srun --no-kill --kill-on-bad-exit=0 --ntasks-per-node=1 ftlaunch ...` (general knowledge, not tried).
- `srun` ends with the highest exit code of its tasks.
"""

MEANING = {
    Certainty.SOURCE: "read in the platform's source or its own documents",
    Certainty.USE: "at least in part only seen in public scripts or dumps that use it",
    Certainty.HEARSAY: "general knowledge, in no document seen",
}


def page() -> str:
    """The whole page."""
    rows = (*PLATFORMS, BY_HAND)
    lines = [
        HEAD,
        "## The table",
        "",
        "| platform | recognised by | nodes | node index | certainty |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        signs = _signs(row).replace("|", "\\|")
        cells = (row.name, signs, _first(row.num_nodes), _first(row.node_rank), row.certainty.value)
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", "A dash: see the section of the platform. Certainty:", ""]
    lines += [f"- `{certainty.value}`: {meaning}" for certainty, meaning in MEANING.items() if _used(certainty, rows)]
    lines += ["", "## One by one", ""]
    for row in rows:
        lines += [*_section(row), ""]
    lines += [LISTED, NESTING.rstrip("\n")]
    lines += [f"| {outer.name} | {_names(outer.all_of, ' and ')} |" for outer in OUTER_LAUNCHERS]
    lines += [AFTER_NESTING, CAVEATS]
    return "\n".join(lines).rstrip("\n") + "\n"


def _used(certainty: Certainty, rows: Sequence[Platform]) -> bool:
    return any(row.certainty is certainty for row in rows)


def _section(row: Platform) -> Iterator[str]:
    yield f"### {row.name}"
    yield ""
    yield f"Recognised by {_signs(row)}."
    yield ""
    yield row.note
    yield ""
    values = {
        "nodes": row.num_nodes,
        "node index": row.node_rank,
        "ranks on a node": row.num_ranks,
        "master": (*row.master_addr, *row.master_port),
        "hosts": row.hosts,
        "looked at too": row.also,
    }
    for title, names in values.items():
        if names:
            yield f"- {title}: {_names(names, ', ')}"
    yield f"- source: [{row.certainty.value}] {row.source}"


def _signs(row: Platform) -> str:
    wanted = [_sign(sign) for sign in row.all_of]
    if row.any_of:
        wanted.append("one of " * (len(row.any_of) > 1) + ", ".join(_sign(sign) for sign in row.any_of))
    return "; ".join(wanted) + (f"; none of {_names(row.unless, ', ')}" if row.unless else "")


def _sign(sign: Sign) -> str:
    if sign.value is None:
        return f"`{sign.name}`"
    literal = re.fullmatch(r"[\w/]+", sign.value) is not None
    return f"`{sign.name}={sign.value}`" if literal else f"`{sign.name}` like `{sign.value}`"


def _first(names: Sequence[str]) -> str:
    return f"`{names[0]}`" if names else "-"


def _names(names: Sequence[str], between: str) -> str:
    return between.join(f"`{name}`" for name in names)


def main() -> int:
    parser = argparse.ArgumentParser(description="Write docs/platforms.md from the table of platforms.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when the page is not up to date")
    arguments = parser.parse_args()
    if arguments.check:
        return 0 if TARGET.is_file() and TARGET.read_text("utf-8") == page() else 1
    TARGET.write_text(page(), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
