"""GPUs by name: memory and speed of matrix products, for a plan on a machine that has none.

TFLOP/s are dense (no sparsity), in bf16 with fp32 accumulation (fp16 for cards without bf16), from NVIDIA's data sheets
and, for GeForce, its architecture white papers. Memory is what the driver reports, a little less than the name says.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass

from launcher.errors import UserError

_GIB = 1024**3


@dataclass(frozen=True)
class Card:
    name: str
    memory_gib: float
    tflops: float
    has_bf16: bool = True
    instances: str = ""  # family of Alibaba Cloud instances with it, which PAI-DLC offers, too

    @property
    def memory_bytes(self) -> int:
        return int(self.memory_gib * _GIB)


CARDS = (
    Card("A100-80G", 79.3, 312, instances="ecs.gn7e"),
    Card("A100-40G", 39.6, 312, instances="ecs.gn7"),
    Card("A800-80G", 79.3, 312),
    Card("H100-80G", 79.6, 989),
    Card("H100-PCIe-80G", 79.6, 756),
    Card("H800-80G", 79.6, 989),
    Card("H200-141G", 139.8, 989),
    Card("H20-96G", 95.6, 148, instances="ecs.gn8v"),
    Card("H20-141G", 139.8, 148),
    Card("B200-180G", 178.0, 2250),
    Card("L40S-48G", 44.5, 362),
    Card("L20-48G", 44.0, 119.5, instances="ecs.gn8is"),
    Card("L4-24G", 22.5, 121),
    Card("A10-24G", 22.2, 125, instances="ecs.gn7i"),
    Card("A30-24G", 23.5, 165),
    Card("A6000-48G", 47.5, 154.8),
    Card("RTX3090-24G", 23.6, 71),
    Card("RTX4090-24G", 23.6, 165),
    Card("RTX5090-32G", 31.0, 209.5),
    Card("V100-16G", 15.8, 125, has_bf16=False, instances="ecs.gn6v"),
    Card("V100-32G", 31.7, 125, has_bf16=False, instances="ecs.gn6e"),
    Card("T4-16G", 14.6, 65, has_bf16=False, instances="ecs.gn6i"),
)

_COUNTED = re.compile(r"(?:(?P<nodes>\d+)x)?(?P<cards>\d+)x(?P<name>\S+)", re.IGNORECASE)


@dataclass(frozen=True)
class CardCount:
    """`num_cards` cards of a kind, all nodes together."""

    card: Card
    num_cards: int


def parse_cards(text: str) -> CardCount:
    """`8xA100-80G`, with several nodes `4x8xA100-80G`. Raises UserError."""
    found = _COUNTED.fullmatch(text.strip())
    if found is None or int(found["cards"]) * int(found["nodes"] or 1) < 1:
        raise UserError(f"--gpus {text}: write the number of cards and their name, such as 8xA100-80G, or 4x8xA100-80G")
    return CardCount(find_card(found["name"]), int(found["nodes"] or 1) * int(found["cards"]))


def find_card(name: str) -> Card:
    """By its name; the size may be left out where there is only one. Raises UserError with the nearest names."""
    wanted = _plain(name)
    exact = [card for card in CARDS if _plain(card.name) == wanted]
    matching = exact or [card for card in CARDS if _plain(card.name.rsplit("-", 1)[0]) == wanted]
    if len(matching) == 1:
        return matching[0]
    if matching:
        raise UserError(f"--gpus: there are several {name}: write {' or '.join(card.name for card in matching)}")
    by_plain = {_plain(card.name): card.name for card in CARDS}
    near = [by_plain[plain] for plain in difflib.get_close_matches(wanted, by_plain, n=3, cutoff=0.4)]
    known = f"did you mean {' or '.join(near)}?" if near else f"known are {', '.join(card.name for card in CARDS)}"
    raise UserError(f"--gpus: {name} is no card that ftlaunch knows; {known}")


def _plain(name: str) -> str:
    return re.sub(r"gi?b$", "g", re.sub(r"[^a-z0-9]", "", name.lower().removeprefix("nvidia")))
