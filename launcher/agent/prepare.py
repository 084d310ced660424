"""Everything before the first process: configuration, inputs, host facts, plan, findings. Changes nothing with
`write=False`."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from launcher.agent.completion import finished_already
from launcher.agent.generation import port_is_free
from launcher.agent.living import agents_of, epoch_of
from launcher.agent.run_lock import lives_here
from launcher.checkpoint.choose import choose_checkpoint
from launcher.checkpoint.manifest import Manifest
from launcher.checkpoint.verify import list_checkpoints, verify_checkpoint
from launcher.config.inputs import check_inputs
from launcher.config.load import LoadedJob, load_job
from launcher.config.model_files import ModelFiles, read_model_files
from launcher.config.models import ClusterConfig, JobConfig
from launcher.data.facts import DataFacts
from launcher.data.look import load_tokenizer_file, look_at_data
from launcher.errors import unusable_folder
from launcher.host.disk_speed import DiskSpeed, measure_disk
from launcher.host.facts import HostFacts, StorageKind, read_host_facts
from launcher.host.kernel_log import read_kernel_lines
from launcher.host.storage import read_disk
from launcher.plan.launch_plan import LaunchPlan, make_plan
from launcher.plan.model_facts import ModelFacts, read_model_facts
from launcher.plan.network import choose_network, hosts_of
from launcher.platforms.detect import Asked, detect_place, refuse_nesting
from launcher.platforms.outside import real_outside
from launcher.preflight.check_gpu_health import xids_of
from launcher.preflight.check_hosts import check_hosts
from launcher.preflight.checks import run_checks
from launcher.preflight.finding import Finding
from launcher.preflight.inputs import PreflightInputs


@dataclass(frozen=True)
class Prepared:
    job: LoadedJob
    facts: HostFacts
    plan: LaunchPlan
    findings: tuple[Finding, ...]
    overrides: tuple[str, ...] = ()
    inputs: PreflightInputs | None = None  # of the findings; None on a head, and where nothing was checked

    @property
    def output_dir(self) -> Path:
        return Path(self.job.config.output_dir)

    def resume_preview(self) -> str:
        """What a start would continue from, in words. Looks only, and compares sizes, not contents: a start does both.

        Raises UserError where the output folder holds what this start cannot continue, or cannot be read.
        """
        try:
            return self._resume_preview()
        except OSError as error:
            raise unusable_folder(error) from error

    def _resume_preview(self) -> str:
        config, plan = self.job.config, self.plan
        if finished_already(self.output_dir, plan.identity, config.training, hashes=False) is not None:
            return "nothing left to do: this run has reached its planned end"
        choice = choose_checkpoint(self.output_dir, plan.identity, hashes=False)
        refused = "".join(f"; {v.path.name} refused: {v.reason}" for v in choice.refused)
        if choice.taken is None:
            return f"from the beginning{refused}"
        return f"step {choice.taken.step} ({choice.taken.path}){refused}"


def prepare(
    config: Path | None,
    overrides: Sequence[str],
    environ: Mapping[str, str],
    *,
    write: bool,
    job: LoadedJob | None = None,
    checks: bool = True,
) -> Prepared:
    """`job`: loaded already. `checks`: False finds nothing, and does not look at data and model (`judge` does).

    Raises UserError (exit code 2) for what the user can mend, PreflightRefused (3) for what this node cannot do."""
    refuse_nesting(environ)
    job = job or load_job(config, overrides, environ)
    check_inputs(job, write=write)
    outside = real_outside()
    place = detect_place(environ, asked_of(job.config.cluster), outside)
    facts = read_host_facts(Path(job.config.output_dir), environ)
    model = read_model_facts(job.config.model.path) if job.config.model else ModelFacts(source="none")
    earlier = newest_manifest(Path(job.config.output_dir))
    plan = make_plan(
        job,
        facts,
        model,
        place,
        choose_network(job.config, facts, place, outside.resolve),
        environ,
        earlier.identity if earlier else {},
        earlier.batch_of_run if earlier else None,
    )
    prepared = Prepared(job, facts, plan, (), tuple(overrides))
    return judge(prepared, environ) if checks else prepared


def judge(prepared: Prepared, environ: Mapping[str, str]) -> Prepared:
    """With the findings of all checks."""
    plan = prepared.plan
    if plan.is_head_only:  # it trains nothing, so it is not judged itself
        return replace(prepared, findings=_hosts_of_a_head(plan))
    inputs = preflight_inputs(prepared.job, prepared.facts, plan, environ)
    return replace(prepared, findings=run_checks(inputs), inputs=inputs)


def newest_manifest(output_dir: Path) -> Manifest | None:
    """Of the newest whole checkpoint (sizes compared, not contents); None for a new run. Raises UserError where the
    storage fails."""
    return next(_whole_manifests(output_dir), None)


def _whole_manifests(output_dir: Path) -> Iterator[Manifest]:
    """Newest first."""
    try:
        for step, path in list_checkpoints(output_dir):
            manifest = verify_checkpoint(path, step, hashes=False).manifest
            if manifest is not None:
                yield manifest
    except OSError as error:
        raise unusable_folder(error) from error


def asked_of(cluster: ClusterConfig) -> Asked:
    """What job.yaml says about the cluster, without what is only a default."""
    fewest, most = cluster.min_nodes, cluster.max_nodes
    given = "nodes" in cluster.model_fields_set
    return Asked(
        num_nodes=(most if fewest == most else (fewest, most)) if given else None,
        hosts=tuple(cluster.hosts),
        hostfile=cluster.hostfile,
        num_ranks_per_node=None if cluster.nproc_per_node == "auto" else cluster.nproc_per_node,
    )


def _hosts_of_a_head(plan: LaunchPlan) -> tuple[Finding, ...]:
    network, hosts = plan.network, hosts_of(plan.place)
    known = dict(zip(hosts, network.nodes, strict=True)) if network.nodes else {}
    return check_hosts(hosts, {host: ip for host, ip in known.items() if host not in network.unresolved})


def own_agent_here(output_dir: Path) -> str:
    """`n1, pid 7` where another agent of the run in this folder is alive on this machine, else ""."""
    epoch = epoch_of(output_dir, {})
    agents = [] if epoch is None else agents_of(output_dir, epoch, "")
    others = (agent for agent in agents if agent.pid != os.getpid() and lives_here(agent.holder))
    return next((f"{agent.node}, pid {agent.pid}" for agent in others), "")


def preflight_inputs(job: LoadedJob, facts: HostFacts, plan: LaunchPlan, environ: Mapping[str, str]) -> PreflightInputs:
    config, network = job.config, plan.network
    port = config.cluster.master_port
    # The first attempt's port; of several nodes, the first one of the list is the one that leads it.
    listens_there = port is not None and (plan.num_nodes == 1 or plan.place.node_rank == 0)
    agent_port = plan.meeting.agent_port if plan.meeting else None
    model_files = read_model_files(config.model, {**environ, **config.env}) if config.model else None
    return PreflightInputs(
        facts=facts,
        num_ranks=plan.num_ranks.value,
        num_dataloader_workers=int(config.training.get("dataloader_num_workers") or 0),
        device="cuda" if plan.device.value == "cuda" else "cpu",
        interface=network.interface,
        interface_reason=network.reason,
        master_addr=network.master_addr,
        master_port=port,
        port_free=port_is_free(network.master_addr, port) if port is not None and listens_there else None,
        agent_port=agent_port,
        agent_port_free=port_is_free("0.0.0.0", agent_port) if agent_port is not None else None,
        agent_here=own_agent_here(Path(config.output_dir)) if agent_port is not None else "",
        disk_needed_bytes=_disk_needed(config, plan),
        scratch=read_disk(_scratch(config)) if facts.storage_kind is StorageKind.OBJECT else None,
        # From memory the courier puts checkpoints straight to their place; final/ is made here in any case.
        scratch_needed_bytes=(
            plan.node_forecast.final_bytes if plan.memory_every is not None else plan.node_forecast.checkpoint_bytes
        ),
        tensorboard=_writes_tensorboard(config, environ),
        gpu_needed_bytes=plan.memory_forecast.total_bytes if plan.memory_forecast else None,
        gpu_states_bytes=plan.memory_forecast.states_bytes if plan.memory_forecast else None,
        memory_needed_bytes=plan.node_forecast.ranks_bytes,
        memory_tier_bytes=plan.node_forecast.tier_bytes if config.checkpoint.memory != "off" else None,
        memory_tier_required=config.checkpoint.memory != "auto",
        env={**environ, **config.env},
        skip=tuple(config.check.skip),
        num_nodes=plan.num_nodes,
        method=config.method,
        data=_look_at_data(config, model_files),
        model_files=model_files,
        disk_speed=_disk_speed(config, plan.node_forecast.checkpoint_bytes),
        checkpoint_bytes=plan.node_forecast.checkpoint_bytes,
        grace_s=config.spot.grace_seconds,
        xids=xids_of(read_kernel_lines()) if facts.gpus else None,
        platform=plan.place.platform,
    )


def _look_at_data(config: JobConfig, files: ModelFiles | None) -> tuple[DataFacts, ...]:
    data = config.data
    if data is None:
        return ()
    tokenizer = load_tokenizer_file(Path(files.tokenizer_file) if files and files.tokenizer_file else None)
    train = look_at_data("train", data.train, data.format, data.system_prompt, data.max_length, tokenizer)
    held_out = look_at_data("eval", data.eval, data.format, data.system_prompt, data.max_length, tokenizer)
    return tuple(facts for facts in (train, held_out) if facts is not None and facts.num_looked_at)


def _disk_speed(config: JobConfig, checkpoint_bytes: int | None) -> DiskSpeed | None:
    if not checkpoint_bytes or "disk.speed" in config.check.skip:
        return None
    return measure_disk(Path(config.output_dir), most_bytes=checkpoint_bytes)


def _disk_needed(config: JobConfig, plan: LaunchPlan) -> int | None:
    """Bytes that are still to be written: `keep` checkpoints, one more that is being written, and `final/`, less what
    an earlier start of this run has written already."""
    one_checkpoint = plan.node_forecast.checkpoint_bytes
    if one_checkpoint is None:
        return None
    there = sum(manifest.total_bytes for manifest in _whole_manifests(Path(config.output_dir)))
    # Beside those that are there a new one is always written before an old one is pruned.
    checkpoints = max(one_checkpoint, (config.checkpoint.keep + 1) * one_checkpoint - there)
    return checkpoints + (plan.node_forecast.final_bytes or 0)


def _scratch(config: JobConfig) -> Path:
    """Where the ranks' temporary files go; they have `env` in their environment."""
    return Path(config.env.get("TMPDIR") or tempfile.gettempdir())


def _writes_tensorboard(config: JobConfig, environ: Mapping[str, str]) -> bool:
    if {**environ, **config.env}.get("TENSORBOARD_LOGGING_DIR"):
        return False
    return config.monitor.tensorboard or "tensorboard" in str(config.training.get("report_to") or "")
