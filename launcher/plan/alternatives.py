"""Which ZeRO stage, offloading and micro-batch fit on a card, fastest first, and why the others do not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from launcher.plan.memory_model import MemoryForecast, MemorySetting, forecast_memory
from launcher.plan.model_facts import ModelFacts

_GIB = 1024**3

# Of a card's memory. The rest is for what a forecast cannot know: other kernels, an uneven spread of experts.
FITS_SHARE = 0.92

# ZeRO stage, optimizer in host memory, weights in host memory; fastest first.
ORDER = ((2, False, False), (3, False, False), (2, True, False), (3, True, False), (3, True, True))


@dataclass(frozen=True)
class Alternative:
    """One way to run. `why`: why not, empty where it fits."""

    zero_stage: int
    offload_optimizer: bool
    offload_params: bool
    micro_batch: int
    memory: MemoryForecast
    card_bytes: int
    fits: bool
    why: str

    @property
    def name(self) -> str:
        offload = " and ".join(
            what for what, on in (("optimizer", self.offload_optimizer), ("weights", self.offload_params)) if on
        )
        return f"ZeRO {self.zero_stage}" + (f", {offload} in host memory" if offload else "")


def weigh(model: ModelFacts, setting: MemorySetting, card_bytes: int) -> Alternative | None:
    memory = forecast_memory(model, setting)
    if memory is None:
        return None
    fits = memory.total_bytes <= FITS_SHARE * card_bytes
    return Alternative(
        setting.zero_stage,
        setting.offload_optimizer,
        setting.offload_params,
        setting.micro_batch,
        memory,
        card_bytes,
        fits,
        "" if fits else _why_not(memory, card_bytes),
    )


def weigh_all(model: ModelFacts, setting: MemorySetting, card_bytes: int) -> tuple[Alternative, ...]:
    """Every stage and offloading of `ORDER` with the same micro-batch. Empty where the model's shape is not known."""
    found = []
    for stage, offload_optimizer, offload_params in ORDER:
        if offload_params and setting.method == "qlora":
            continue  # packed 4-bit weights live on the card
        other = replace(
            setting,
            zero_stage=stage,
            offload_optimizer=offload_optimizer,
            offload_params=offload_params,
            # Both are what ftlaunch's own JSON asks for (see `make_ds_config`).
            bucket_elements=(model.hidden_size or 0) ** 2 if stage == 3 else setting.bucket_elements,
            num_buckets=1 if stage == 3 else 2,
        )
        alternative = weigh(model, other, card_bytes)
        if alternative is not None:
            found.append(alternative)
    return tuple(found)


def first_that_fits(alternatives: Sequence[Alternative]) -> Alternative | None:
    return next((alternative for alternative in alternatives if alternative.fits), None)


def largest_micro_batch(
    model: ModelFacts, setting: MemorySetting, card_bytes: int, most: int
) -> tuple[Alternative, ...]:
    """The fastest way that fits at all, with the largest micro-batch (a power of two, at most `most`) that fits; then
    every way at a micro-batch of 1, and the doubled one that no longer fits."""
    smallest = weigh_all(model, replace(setting, micro_batch=1), card_bytes)
    best = first_that_fits(smallest)
    if best is None:
        return smallest
    tried: list[Alternative] = []
    size = 2
    while size <= most and (not tried or tried[-1].fits):
        at_size = weigh_all(model, replace(setting, micro_batch=size), card_bytes)
        tried.append(next(one for one in at_size if _same_way(one, best)))
        size *= 2
    larger = [one for one in reversed(tried) if one.fits][:1] + [one for one in tried if not one.fits]
    return (*larger, *smallest)


def _same_way(one: Alternative, other: Alternative) -> bool:
    return (one.zero_stage, one.offload_optimizer, one.offload_params) == (
        other.zero_stage,
        other.offload_optimizer,
        other.offload_params,
    )


def _why_not(memory: MemoryForecast, card_bytes: int) -> str:
    needed, free = memory.total_bytes / _GIB, FITS_SHARE * card_bytes / _GIB
    states = memory.weights + memory.optimizer + memory.gradients
    name, size = max(memory.parts().items(), key=lambda part: part[1])
    what = "weights, gradients and optimizer alone" if states > FITS_SHARE * card_bytes else f"most of it {name}"
    size = states if states > FITS_SHARE * card_bytes else size
    return f"{needed:.1f} of {free:.1f} GiB: {what} ({size / _GIB:.1f})"
