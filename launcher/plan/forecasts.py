"""Bytes of checkpoints, of the memory tier and of host memory, from the model's shape; docs/sizing.md has the table.

Everything here is computed before a weight is read. Unknown is None: nothing is refused because of what is not known.
"""

from __future__ import annotations

from dataclasses import dataclass

from launcher.config.models import JobConfig
from launcher.host.compute import MEMORY_TIGHT, Memory
from launcher.plan.chosen import Chosen
from launcher.plan.model_facts import ModelFacts, linear_shapes

_GIB = 1024**3
ADAM_BYTES = 12  # of a trained parameter in DeepSpeed's shards: fp32 weight and two moments
OFFLOADED_BYTES = 16  # of a trained parameter in host memory: the same and its gradient (DeepSpeed's estimators)
SMALL_FILES_BYTES = 16 * 2**20  # of a checkpoint: tokenizer, random states, scripts, trainer state
LORA_SHARE = 0.01  # of the parameters that an adapter trains, where its shape is not known
NUM_SLOTS = 3  # of each rank: two whole snapshots and the one that is being written or copied to disk
NUM_RESUME_COPIES = 1
NUM_PEER_COPIES = 4  # of the neighbour's snapshot: the last three whole ones and the incoming one


@dataclass(frozen=True)
class CheckpointSize:
    """One checkpoint, all ranks together.

    `optimizer_bytes` are spread evenly over the ranks (ZeRO 1 to 3) or written by rank 0 (ZeRO 0); rank 0 writes the
    rest: `states_bytes` (weights in DeepSpeed's model states) and `export_bytes` (weights, tokenizer and small files in
    Transformers' layout).
    """

    optimizer_bytes: int
    states_bytes: int
    export_bytes: int
    zero_stage: int

    @property
    def total_bytes(self) -> int:
        return self.optimizer_bytes + self.states_bytes + self.export_bytes

    def of_first_node(self, num_ranks: int, num_nodes: int) -> int:
        """What the ranks of the node with rank 0 write: any node may become that one, so each must have room for it."""
        shards = self.optimizer_bytes if self.zero_stage == 0 else self.optimizer_bytes // num_nodes
        return shards + num_ranks * ADAM_BYTES + self.states_bytes + self.export_bytes


@dataclass(frozen=True)
class NodeForecast:
    """Bytes, None where the model's shape is not known: of this node's memory the ranks take `ranks_bytes` and
    checkpoints in memory `tier_bytes`; on disk one checkpoint takes `checkpoint_bytes` and `final/` `final_bytes`."""

    ranks_bytes: int | None
    tier_bytes: int | None
    checkpoint_bytes: int | None
    final_bytes: int | None


def trained_parameters(config: JobConfig, model: ModelFacts, targets: str | tuple[str, ...] | None) -> int | None:
    """How many parameters the method trains: r (in + out) for each layer with an adapter (Hu et al., LoRA, 2021)."""
    if model.num_parameters is None or config.method == "full":
        return model.num_parameters
    shapes = linear_shapes(model)
    names = tuple(shapes) if targets == "all-linear" else targets
    if not shapes or not isinstance(names, tuple) or not set(names) <= set(shapes):
        adapter = int(LORA_SHARE * model.num_parameters)
    else:
        adapter = (model.num_layers or 0) * config.lora.r * sum(sum(shapes[name]) for name in names)
    whole = {"lm_head", "embed_tokens"} & set(config.lora.modules_to_save)
    return adapter + len(whole) * (model.hidden_size or 0) * (model.vocab_size or 0)


def checkpoint_size(
    config: JobConfig, model: ModelFacts, targets: str | tuple[str, ...] | None, *, zero_stage: int, precision: str
) -> CheckpointSize | None:
    trained = trained_parameters(config, model, targets)
    if trained is None:
        return None
    weights = trained * bytes_of_weight(precision)
    states = weights
    if config.method != "full" and model.ties_embeddings:
        # DeepSpeed leaves frozen weights out by their names, and a tied output head has a second one.
        states += (model.hidden_size or 0) * (model.vocab_size or 0) * bytes_of_weight(precision)
    return CheckpointSize(
        optimizer_bytes=_optimizer_bytes(zero_stage, precision) * trained,
        states_bytes=0 if zero_stage == 3 else states,  # with ZeRO 3 the shards have the weights
        export_bytes=weights + SMALL_FILES_BYTES,
        zero_stage=zero_stage,
    )


def _optimizer_bytes(zero_stage: int, precision: str) -> int:
    """Of a trained parameter. ZeRO's shards have an fp32 weight of their own in fp32, too."""
    return ADAM_BYTES - 4 if zero_stage == 0 and precision == "fp32" else ADAM_BYTES


def bytes_of_weight(precision: str) -> int:
    return 4 if precision == "fp32" else 2


def memory_tier_bytes(size: CheckpointSize, num_ranks: int, *, min_nodes: int, max_nodes: int, peers: bool) -> int:
    """Of host memory on one node, at the size of the job that needs most: with fewer nodes each holds more of the
    optimizer, with more than one it holds a neighbour's as well. `num_ranks`: on each node.

    An upper estimate: a slot keeps the size of the largest snapshot that it has held.
    """

    def of(num_nodes: int) -> int:
        copies = NUM_SLOTS + NUM_RESUME_COPIES + (NUM_PEER_COPIES if peers and num_nodes > 1 else 0)
        return copies * size.of_first_node(num_ranks, num_nodes)

    return max(of(num_nodes) for num_nodes in {min_nodes, max(min_nodes, min(2, max_nodes))})


def forecast_node(
    config: JobConfig,
    model: ModelFacts,
    targets: str | tuple[str, ...] | None,
    *,
    device: str,
    precision: str,
    zero_stage: int,
    num_ranks: int,
    nodes: tuple[int, int],
    card_bytes: int | None,
) -> NodeForecast:
    """`num_ranks`: on each node. `nodes`: the fewest and the most. `card_bytes`: what one rank holds of weights,
    gradients and optimizer."""
    size = checkpoint_size(config, model, targets, zero_stage=zero_stage, precision=precision)
    parameters, trained = model.num_parameters, trained_parameters(config, model, targets)
    if size is None or parameters is None or trained is None:
        return NodeForecast(None, None, None, None)
    fewest, most = nodes
    if device == "cpu":  # everything lives there
        ranks_bytes = num_ranks * max(parameters * bytes_of_weight(precision), card_bytes or 0)
    else:
        # The weights are mapped from files, which the ranks of a node share; each rank has its own copy of what it
        # moves at a time (a GiB is generous); an offloaded optimizer lives there with its gradients, too.
        offloaded = OFFLOADED_BYTES * trained // fewest if config.deepspeed.offload_optimizer else 0
        ranks_bytes = 2 * parameters + num_ranks * 2**30 + offloaded
    peers = config.checkpoint.peer == "auto"
    return NodeForecast(
        ranks_bytes=ranks_bytes,
        tier_bytes=memory_tier_bytes(size, num_ranks, min_nodes=fewest, max_nodes=most, peers=peers),
        checkpoint_bytes=size.total_bytes,
        final_bytes=size.export_bytes,
    )


def choose_memory_tier(config: JobConfig, memory: Memory | None, forecast: NodeForecast) -> Chosen[bool]:
    """Whether snapshots are taken in memory. What job.yaml asks for is taken: preflight refuses it where it does not
    fit (`memory.tier`)."""
    asked = config.checkpoint.memory
    if asked != "auto":
        return Chosen(asked != "off", "checkpoint.memory", by="job.yaml")
    needed, ranks = forecast.tier_bytes, forecast.ranks_bytes or 0
    if memory is None or needed is None:
        return Chosen(True, "what it needs is not known before the model is loaded")
    free = max(0, memory.usable_bytes - ranks)
    sizes = f"needs {needed / _GIB:.1f} GiB on this node, {free / _GIB:.1f} GiB are free"
    if needed + ranks <= MEMORY_TIGHT * memory.usable_bytes:
        return Chosen(True, sizes)
    return Chosen(False, f"{sizes}, and a tenth of the memory is kept")
