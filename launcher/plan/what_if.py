"""Does it fit, on how few cards, how long, at what cost, how often to save: from a model's shape and a card's name.

Pure: no job.yaml, no GPU, no network, no weights.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from launcher.config.models import JobConfig
from launcher.plan.alternatives import Alternative, first_that_fits, largest_micro_batch, weigh_all
from launcher.plan.cards import CARDS, CardCount
from launcher.plan.decisions import choose_lora_targets
from launcher.plan.forecasts import ADAM_BYTES, trained_parameters
from launcher.plan.memory_model import MemorySetting, lora_sizes
from launcher.plan.model_facts import ModelFacts
from launcher.policy.save_interval import lost_share, steps_of_least_loss

# Of the card's TFLOP/s that reach the model. Published full and LoRA runs with ZeRO on A100 and H100 are at 0.3 to 0.5;
# offloading and slow networks are far below.
DEFAULT_UTILISATION = 0.4
MAX_CARDS = 1024
MAX_MICRO_BATCH = 16
COPY_BYTES_PER_S = 10e9  # from a card to host memory, PCIe 4 with pinned buffers
DISK_BYTES_PER_S = 1e9  # one node to a shared file system
DAY_S = 86400.0


@dataclass(frozen=True)
class Question:
    model: ModelFacts
    gpus: CardCount
    method: str = "lora"
    max_length: int = 2048
    global_batch: int | None = None  # samples of an optimizer step; None: eight for each card
    tokens: int | None = None  # of the whole training
    price: float | None = None  # of one card and hour
    utilisation: float = DEFAULT_UTILISATION
    preemptions_per_day: float | None = None

    @property
    def samples_per_step(self) -> int:
        return self.global_batch or 8 * self.gpus.num_cards


@dataclass(frozen=True)
class Saves:
    """How often to save at a rate of preemptions. Of a save in memory only the copy holds training up; a save to disk
    that training waits for is there to compare. `lost_*`: share of the time that saving and work done again take."""

    between_s: float  # mean time between preemptions
    state_bytes: int  # of the job: what a checkpoint holds of weights and optimizer
    memory_stall_s: float
    memory_every_steps: int
    memory_lost: float
    disk_stall_s: float
    disk_every_steps: int
    disk_lost: float


@dataclass(frozen=True)
class Answer:
    """`best` is None where nothing fits. `fewest`: cards of this kind that are enough without host memory for states,
    None where more than MAX_CARDS would be needed. `step_s` and what follows from it are None without a best."""

    question: Question
    precision: str
    gradient_checkpointing: bool
    num_trained: int
    best: Alternative | None
    alternatives: tuple[Alternative, ...]
    fewest: int | None
    fewest_way: Alternative | None
    elsewhere: tuple[CardCount, ...]  # as few other cards that are enough, least memory in all first
    step_s: float | None
    tokens_per_s: float | None
    hours: float | None
    cost: float | None
    saves: Saves | None


def answer(question: Question) -> Answer:
    model, card, num_cards = question.model, question.gpus.card, question.gpus.num_cards
    setting = setting_for(question)
    most = min(MAX_MICRO_BATCH, max(1, question.samples_per_step // num_cards))
    alternatives = largest_micro_batch(model, setting, card.memory_bytes, most)
    best = first_that_fits(alternatives)
    fewest, fewest_way = _fewest(model, setting, card.memory_bytes)
    step_s = tokens_per_s = hours = cost = None
    saves = None
    if best is not None:
        flops = flops_per_token(model, question.method, question.max_length, recomputes=setting.gradient_checkpointing)
        tokens_per_s = num_cards * card.tflops * 1e12 * question.utilisation / flops
        step_s = question.samples_per_step * question.max_length / tokens_per_s
        if question.tokens is not None:
            hours = question.tokens / tokens_per_s / 3600
            cost = None if question.price is None else hours * num_cards * question.price
        if question.preemptions_per_day:
            saves = _saves(question, setting.num_trained, step_s)
    return Answer(
        question=question,
        precision=setting.precision,
        gradient_checkpointing=setting.gradient_checkpointing,
        num_trained=setting.num_trained,
        best=best,
        alternatives=alternatives,
        fewest=fewest,
        fewest_way=fewest_way,
        elsewhere=_elsewhere(question),
        step_s=step_s,
        tokens_per_s=tokens_per_s,
        hours=hours,
        cost=cost,
        saves=saves,
    )


def setting_for(question: Question) -> MemorySetting:
    """The setting of a job.yaml that says no more than the question does."""
    config = JobConfig.model_validate(
        {"output_dir": ".", "model": {"path": "."}, "data": {"train": ["."]}, "method": question.method}
    )
    targets = choose_lora_targets(config, question.model).value
    inputs, ranks = lora_sizes(question.model, targets, config.lora.r) if question.method != "full" else (0, 0)
    return MemorySetting(
        method=question.method,
        precision="bf16" if question.gpus.card.has_bf16 else "fp16",
        zero_stage=2,
        num_ranks=question.gpus.num_cards,
        num_trained=trained_parameters(config, question.model, targets) or 0,
        length=question.max_length,
        gradient_checkpointing=True,
        padded=True,
        accumulates=True,
        double_quant=config.qlora.double_quant,
        lora_inputs=inputs,
        lora_ranks=ranks,
    )


def flops_per_token(model: ModelFacts, method: str, length: int, *, recomputes: bool) -> float:
    """Floating-point operations of training with one token (Kaplan et al., 2020): 2 for each weight forward, 2 for the
    gradients of activations, 2 for those of weights, which adapters leave out, and 2 to run a layer again; attention
    comes on top: 4 x length x width forward, half of it masked."""
    passes = 2 + (1 if method == "full" else 0) + (1 if recomputes else 0)
    attention_passes = 3 + (1 if recomputes else 0)  # its backward pass has no weights to leave out
    weights = 2.0 * (model.num_active_parameters or 0) * passes
    return weights + 2.0 * length * (model.attention_size or 0) * (model.num_layers or 0) * attention_passes


def _fewest(model: ModelFacts, setting: MemorySetting, card_bytes: int) -> tuple[int | None, Alternative | None]:
    """More cards never need more memory on each, but for one step from one card to two (NCCL's buffers)."""

    def way(num_cards: int) -> Alternative | None:
        alternatives = weigh_all(model, replace(setting, num_ranks=num_cards, micro_batch=1), card_bytes)
        return first_that_fits([one for one in alternatives if not one.offload_optimizer])

    if (alone := way(1)) is not None:
        return 1, alone
    most = way(MAX_CARDS)
    if most is None:
        return None, None
    low, high = 1, MAX_CARDS  # not enough, enough
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if way(middle) is None else (low, middle)
    return high, way(high)


def _elsewhere(question: Question) -> tuple[CardCount, ...]:
    found = []
    for card in CARDS:
        if card is question.gpus.card:
            continue
        there = replace(question, gpus=CardCount(card, question.gpus.num_cards))
        fewest, _ = _fewest(question.model, setting_for(there), card.memory_bytes)
        if fewest is not None:
            found.append(CardCount(card, fewest))
    return tuple(sorted(found, key=lambda one: one.num_cards * one.card.memory_gib))


def _saves(question: Question, num_trained: int, step_s: float) -> Saves:
    assert question.preemptions_per_day
    between_s = DAY_S / question.preemptions_per_day
    state_bytes = (ADAM_BYTES + 2) * num_trained
    memory_s = state_bytes / question.gpus.num_cards / COPY_BYTES_PER_S
    disk_s = state_bytes / DISK_BYTES_PER_S
    memory_steps, disk_steps = (steps_of_least_loss(stall_s, step_s, between_s) for stall_s in (memory_s, disk_s))
    return Saves(
        between_s=between_s,
        state_bytes=state_bytes,
        memory_stall_s=memory_s,
        memory_every_steps=memory_steps,
        memory_lost=lost_share(memory_steps, memory_s, step_s, between_s),
        disk_stall_s=disk_s,
        disk_every_steps=disk_steps,
        disk_lost=lost_share(disk_steps, disk_s, step_s, between_s),
    )
