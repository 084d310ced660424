"""`ftlaunch plan --gpus ... --model ...`: the plan before there is a job.yaml or a machine."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Iterator, Sequence
from typing import Any

from launcher.cli.what_if_options import OPTIONS
from launcher.errors import UserError
from launcher.plan.alternatives import FITS_SHARE, Alternative
from launcher.plan.cards import CardCount, parse_cards
from launcher.plan.known_models import find_model
from launcher.plan.memory_model import MemoryForecast
from launcher.plan.what_if import MAX_CARDS, Answer, Question, answer
from launcher.preflight.finding import show_bytes

_GIB = 1024**3
NUM_ELSEWHERE = 5  # other kinds of cards that are shown; --json has all


def main(options: argparse.Namespace) -> int:
    if options.config is not None or options.set:
        raise UserError("plan: either --config job.yaml, or --gpus and --model, not both")
    if options.gpus is None or options.model is None:
        raise UserError("plan: --gpus and --model go together, such as --gpus 8xA100-80G --model Qwen/Qwen2.5-32B")
    for name in OPTIONS[3:]:
        value = getattr(options, name)
        if value is not None and not value > 0:
            raise UserError(f"plan: --{name.replace('_', '-')} {value:g}: must be more than 0")
    given = {name: getattr(options, name) for name in OPTIONS[2:] if getattr(options, name) is not None}
    found = answer(Question(find_model(options.model), parse_cards(options.gpus), **given))
    print(json.dumps(to_json(found), ensure_ascii=False, indent=2) if options.json else "\n".join(render(found)))
    return 0


def to_json(found: Answer) -> dict[str, Any]:
    document = dataclasses.asdict(found)
    model = found.question.model
    return {
        "v": 1,
        "fits": found.best is not None,
        "model": {"name": model.source, "parameters": model.num_parameters},
        **document,
        "best": alternative_json(found.best),
        "fewest_way": alternative_json(found.fewest_way),
        "alternatives": [alternative_json(one) for one in found.alternatives],
    }


def alternative_json(one: Alternative | None) -> dict[str, Any] | None:
    return None if one is None else {**dataclasses.asdict(one), "total_bytes": one.memory.total_bytes}


def render(found: Answer) -> Iterator[str]:
    question, best = found.question, found.best
    model, card, count = question.model, question.gpus.card, question.gpus.num_cards
    size = (model.num_parameters or 0) / 1e9
    checkpointing = "with" if found.gradient_checkpointing else "without"
    trained = f"{question.method} trains {found.num_trained / 1e6:,.1f} million"
    yield f"{model.source}: {size:.2f} billion parameters, {trained}"
    rows = f"rows of {question.max_length} tokens, {checkpointing} gradient checkpointing"
    yield f"{count} x {card.name}, {found.precision}, {rows}"
    yield ""
    if best is None:
        yield f"  {'fits:':15}no, on {count} card{'s' if count > 1 else ''} of {card.memory_gib:g} GiB"
    else:
        total = best.memory.total_bytes
        yield (
            f"  {'fits:':15}yes, {best.name}, micro-batch {best.micro_batch}: {total / _GIB:.1f} of "
            f"{card.memory_gib:g} GiB on each card"
        )
        yield f"  {'memory:':15}{parts_line(best.memory)}"
    way = f" ({found.fewest_way.name}, micro-batch 1)" if found.fewest_way else ""
    yield f"  {'fewest cards:':15}{found.fewest if found.fewest else f'more than {MAX_CARDS}'}{way}"
    others = ", ".join(_other_cards(one) for one in found.elsewhere[:NUM_ELSEWHERE])
    yield f"  {'or:':15}{others or 'no other card that ftlaunch knows'}"
    yield from _time_and_cost(found)
    yield from _how_often_to_save(found)
    yield ""
    yield f"alternatives, fastest first (a card is full at {FITS_SHARE:.0%})"
    yield from table(found.alternatives, best)


def _other_cards(one: CardCount) -> str:
    return f"{one.num_cards} x {one.card.name}" + (f" ({one.card.instances})" if one.card.instances else "")


def table(alternatives: Sequence[Alternative], best: Alternative | None = None) -> Iterator[str]:
    yield f"  {'':46}{'micro-batch':>12}{'GiB':>8}  fits"
    for one in alternatives:
        chosen = "* " if one is best else "  "
        fits = "yes" if one.fits else f"no: {one.why}"
        yield f"{chosen}{one.name:46}{one.micro_batch:>12}{one.memory.total_bytes / _GIB:>8.1f}  {fits}"


def parts_line(memory: MemoryForecast) -> str:
    """Largest first; what is below a MiB is left out."""
    parts = sorted(memory.parts().items(), key=lambda part: -part[1])
    return ", ".join(f"{name} {show_bytes(size)}" for name, size in parts if size >= 2**20)


def _time_and_cost(found: Answer) -> Iterator[str]:
    question = found.question
    if found.tokens_per_s is None or found.step_s is None:
        return
    assert found.best is not None
    assumed = f"at {question.utilisation:.0%} of {question.gpus.card.tflops:g} TFLOP/s"
    slower = ", less with states in host memory" if found.best.offload_optimizer else ""
    yield (
        f"  {'speed:':15}{found.tokens_per_s:,.0f} tokens/s {assumed}{slower}; a step of {question.samples_per_step} "
        f"samples takes {found.step_s:.1f} s"
    )
    if found.hours is not None:
        cost = ""
        if found.cost is not None:
            cost = f"; {found.cost:,.2f} at {question.price:g} for each card and hour"
        yield f"  {'time:':15}{found.hours:,.1f} hours for {question.tokens or 0:,} tokens{cost}"


def _how_often_to_save(found: Answer) -> Iterator[str]:
    saves, question = found.saves, found.question
    if saves is None:
        return
    yield (
        f"  {'save:':15}in memory every {_steps(saves.memory_every_steps)} ({saves.memory_lost:.2%} of the time lost "
        f"with {question.preemptions_per_day:g} preemptions a day)"
    )
    disk_s = saves.disk_every_steps * (found.step_s or 0)
    yield (
        f"  {'':15}on disk, if training waited: every {_steps(saves.disk_every_steps)}, {disk_s / 60:.0f} min "
        f"({saves.disk_lost:.2%} lost; {show_bytes(saves.state_bytes)} at 1 GB/s)"
    )


def _steps(num: int) -> str:
    return "step" if num == 1 else f"{num} steps"
