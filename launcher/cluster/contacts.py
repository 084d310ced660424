"""Whom to turn to: the list that all nodes go through in the same order, and who of it was of no use lately.

Invariant: nodes that know the same newest generation have the same order; what differs is whom they pass over.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import count

from launcher.cluster.model import GENESIS, Generation, Node


class Contacts:
    def __init__(self, me: Node, seeds: Sequence[str], rng: random.Random, retry_s: float) -> None:
        """retry_s: who is passed over is tried again after one to two times this, at random: rivals get out of step."""
        self._me, self._seeds, self._rng, self._retry_s = me, tuple(seeds), rng, retry_s
        self._place: dict[str, int] = {}
        self._passed_over_until: dict[str, float] = {}
        self._lost: set[str] = set()
        self._refusals: dict[str, tuple[str, float]] = {}
        self.follow_order_of(GENESIS)

    def follow_order_of(self, base: Generation) -> None:
        """The members of the newest generation, then the seeds, then whoever was a member before.

        Only a member (of no generation: a seed) stands in its own list, because only such a node may form the next one.
        """
        me = self._me
        members = [m.address for m in base.members if m.address != me.address or m.key == me.key]
        others = [*self._seeds, *self._place]
        if base != GENESIS:
            others = [address for address in others if address != me.address]
        self._place = dict(zip(dict.fromkeys([*members, *others]), count(), strict=False))

    @property
    def known(self) -> tuple[str, ...]:
        return tuple(self._place)

    @property
    def may_form(self) -> bool:
        return self._me.address in self._place

    def first(self, now: float) -> str | None:
        return next((address for address in self._place if not self.is_passed_over(address, now)), None)

    def next_to_try(self) -> str:
        """When all are passed over: the one that is tried again first; "" when there is nobody but ourselves."""
        return min(self._place, key=lambda address: self._passed_over_until.get(address, 0.0), default="")

    def is_before(self, address: str, other: str) -> bool:
        end = len(self._place)
        return self._place.get(address, end) < self._place.get(other, end)

    def pass_over(self, address: str, now: float) -> None:
        """It does not lead to a generation for now; it may be alive."""
        self._passed_over_until[address] = now + self._retry_s * self._rng.uniform(1.0, 2.0)

    def mark_lost(self, address: str, now: float) -> None:
        self.pass_over(address, now)
        self._lost.add(address)

    def mark_found(self, address: str) -> None:
        self._passed_over_until.pop(address, None)
        self._lost.discard(address)

    def mark_all_found(self, generation: Generation) -> None:
        if self._passed_over_until or self._lost:
            for member in generation.members:
                self.mark_found(member.address)

    def mark_refusing(self, address: str, reason: str, now: float) -> None:
        """An agent is there, and does not want us. Until it says something else."""
        _, since = self._refusals.get(address, (reason, now))
        self._refusals[address] = reason, since

    def mark_heard(self, address: str) -> None:
        if self._refusals:
            self._refusals.pop(address, None)

    def refusal(self, address: str) -> tuple[str, float]:
        """What it has against us, and since when; an empty text where it has nothing."""
        return self._refusals.get(address, ("", 0.0))

    def is_passed_over(self, address: str, now: float) -> bool:
        return self._passed_over_until.get(address, 0.0) > now

    def is_lost(self, address: str, now: float) -> bool:
        return address in self._lost and self.is_passed_over(address, now)
