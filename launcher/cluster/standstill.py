"""Whether the ranks of all nodes stand still, as the leader hears of it. Pure.

Invariant: nothing is said before every node has said so itself, and lately: each knows what its own ranks are at, and
how much patience that needs.
"""

from __future__ import annotations

from collections.abc import Collection

from launcher.cluster.messages import Standstill
from launcher.progress_record import RankProgress

RECENT_S = 3.0  # each node says it again once a second, for as long as it is so
_MOST_TOLD = 256


class LeadersStandstill:
    """Of one generation."""

    def __init__(self, generation: int, members: Collection[str]) -> None:
        """members: names of all nodes of the generation, the leader's own too."""
        self._generation, self._members = generation, frozenset(members)
        self._heard: dict[str, tuple[float, tuple[RankProgress, ...]]] = {}

    def hear(self, name: str, said: Standstill, now: float) -> tuple[RankProgress, ...]:
        """All ranks once all nodes stand still, else none."""
        if said.generation != self._generation or name not in self._members:
            return ()
        self._heard[name] = (now, said.ranks)
        recent = [ranks for at, ranks in self._heard.values() if now - at <= RECENT_S]
        if len(recent) < len(self._members):
            return ()
        self._heard.clear()
        return _told([rank for ranks in recent for rank in ranks])


def _told(ranks: list[RankProgress]) -> tuple[RankProgress, ...]:
    if len(ranks) <= _MOST_TOLD:
        return tuple(ranks)
    ordered = sorted(ranks, key=lambda rank: (rank.state not in ("T", "t"), rank.step, rank.collectives, rank.rank))
    return tuple(ordered[: _MOST_TOLD // 2] + ordered[-_MOST_TOLD // 2 :])
