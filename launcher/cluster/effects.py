"""What membership asks its agent to do. The agent carries effects out in the order given, each before the next."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from launcher.cluster.messages import Message
from launcher.cluster.model import Durable, Generation


@dataclass(frozen=True, slots=True)
class Send:
    """May fail in silence; a refused or reset connection comes back as `on_unreachable`."""

    address: str
    message: Message


@dataclass(frozen=True, slots=True)
class Persist:
    """To be durable before anything later in the same list is done."""

    durable: Durable


@dataclass(frozen=True, slots=True)
class Enter:
    """Start the local ranks of this generation."""

    generation: Generation


@dataclass(frozen=True, slots=True)
class Quit:
    """Stop the local ranks of generation `number`; they must be gone before anything later in the list is done."""

    number: int
    reason: str


@dataclass(frozen=True, slots=True)
class AskClaim:
    """Write `value` as the claim for `base` unless one is there, and answer `on_claim(base, whichever is there)`."""

    base: int
    value: Generation


@dataclass(frozen=True, slots=True)
class AskPause:
    """On the leader only: have all ranks of the generation save at an agreed step, then say `Paused`."""

    generation: int
    reason: str


@dataclass(frozen=True, slots=True)
class GiveUp:
    """This node's agent ends."""

    exit_code: int
    reason: str


@dataclass(frozen=True, slots=True)
class Say:
    """A line for the log."""

    text: str


Effect: TypeAlias = Send | Persist | Enter | Quit | AskClaim | AskPause | GiveUp | Say
