"""What must be the same on every node, or they would train different things, or not at all.

Each entry is a key and a value in words: a node that is not let in shows them as `precision: fp16, not bf16` and
`job.yaml, training.learning_rate: 0.02, not 0.01`. Left out is what may differ from node to node: driver, kernel, C
library, CPU, Python's patch release, the network interface.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

from launcher.cluster.model import Identity
from launcher.config.load import LoadedJob
from launcher.diagnose.redact import is_secret_name, redact_text
from launcher.host.facts import HostFacts
from launcher.plan.launch_plan import LaunchPlan

# A rank of another release of one of these may save, shard or talk differently.
_PACKAGES = ("ftlaunch", "torch", "deepspeed", "transformers", "peft", "accelerate")
# Of the section cluster: how this one node is reached, started and let in.
_OF_THE_NODE = ("interface", "launcher", "hostfile", "hosts", "token")
_NOT_COMPARED = ("check",)  # which findings a node leaves out is its own business
_MAY_HOLD_SECRETS = ("env", "command")  # shown to nobody: a digest says whether they are the same
_SHOWN_LENGTH = 60


def cluster_identity(job: LoadedJob, plan: LaunchPlan, facts: HostFacts, folder_id: str = "") -> Identity:
    """`folder_id`: what the output folder says of itself; two nodes with different ones do not share it."""
    settings = _compared_settings(job)
    return Identity(
        job_sha=_sha(settings, 16),
        versions=_versions(job, facts),
        contract=_contract(job, plan, folder_id)
        | {f"job.yaml, {key}": _shown(key, value) for key, value in _leaves(settings)},
    )


def _compared_settings(job: LoadedJob) -> dict[str, Any]:
    """job.yaml as it was resolved, by section, without what belongs to one node. Sections that are left out (null) say
    nothing. Files named by a path are compared by that path: the nodes share them, or have them at the same place."""
    settings = job.config.model_dump(mode="json", exclude=set(_NOT_COMPARED))
    settings["cluster"] = {key: value for key, value in settings["cluster"].items() if key not in _OF_THE_NODE}
    return {section: value for section, value in settings.items() if value is not None}


def _versions(job: LoadedJob, facts: HostFacts) -> dict[str, str]:
    names = (*_PACKAGES, "bitsandbytes") if job.config.method == "qlora" else _PACKAGES
    versions = {name: facts.versions[name] for name in names if name in facts.versions}
    if cuda := facts.versions.get("torch_cuda"):
        versions["CUDA of torch"] = cuda
    if python := facts.versions.get("python"):
        versions["Python"] = ".".join(python.split(".")[:2])  # objects that ranks exchange are pickled
    return versions


def _contract(job: LoadedJob, plan: LaunchPlan, folder_id: str) -> dict[str, str]:
    config = job.config
    said: dict[str, object] = {
        "device": plan.device.value,
        "precision": plan.precision.value,
        "ZeRO stage": plan.zero_stage.value,
        "method": config.method,
        "ranks on each node": plan.num_ranks.value,
        "ranks at full size": plan.full_world_size,
        "global batch": plan.global_batch_size,
        "nodes": plan.place.shown_nodes,
        "gradient checkpointing": "on" if plan.gradient_checkpointing.value else "off",
    }
    if config.method != "full":
        targets = plan.lora_target_modules.value
        said["LoRA target modules"] = targets if isinstance(targets, str) else " ".join(targets or ())
    if plan.model.num_parameters is not None:
        said["parameters of the model"] = plan.model.num_parameters
    if config.deepspeed.config is not None:
        said["DeepSpeed JSON"] = _sha(dict(plan.ds_config), 8)
    if plan.device.value == "cuda":
        # Without an RDMA device it is 1: a node that has one would wait for the others to answer over it.
        values = {variable.name: variable.value for variable in plan.variables}
        said["NCCL_IB_DISABLE"] = values.get("NCCL_IB_DISABLE", "unset")
    if plan.meeting is not None:
        said["agent port"] = plan.meeting.agent_port
    if folder_id:
        said["output folder"] = folder_id
    return {key: str(value) for key, value in said.items()}


def _leaves(settings: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted key and value of each setting, lists whole. What is null says nothing."""
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{above}{name}.")
        elif value is not None:
            yield f"{above}{name}", value


def _shown(key: str, value: Any) -> str:
    """The value in one line, as job.yaml could have it; of a long one the beginning and a digest of the whole."""
    text = value if isinstance(value, str) and value and value.isprintable() else json.dumps(value, ensure_ascii=False)
    if key.partition(".")[0] in _MAY_HOLD_SECRETS or is_secret_name(key) or redact_text(text) != text:
        return _sha(value, 8)
    if len(text) > _SHOWN_LENGTH:
        return f"{text[: _SHOWN_LENGTH - 15]}... ({_sha(value, 8)})"
    return text


def _sha(value: Any, digits: int) -> str:
    canonical = json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()[:digits]
