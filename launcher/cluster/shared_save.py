"""A checkpoint to which every node of a generation writes its part, while the ranks train on. Pure.

The leader gives it its name once all parts are written. Everything said is a state: it may be lost, doubled or late,
and is said again with each heartbeat until it is answered.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from launcher.cluster.messages import PartSaved, SaveOutcome, WrittenFile
from launcher.cluster.model import Node


@dataclass(frozen=True)
class Gathered:
    """All parts of a checkpoint. error: why it cannot be finished."""

    step: int
    files: tuple[WrittenFile, ...]
    error: str


class LeadersParts:
    """The leader's side, over the checkpoints of one generation."""

    def __init__(self, me: Node, known: int, generation: int, members: Collection[str]) -> None:
        """members: names of all nodes of the generation, the leader's own too."""
        self.generation = generation
        self._me, self._known = me, known
        self._members = frozenset(members)
        self._parts: dict[int, dict[str, PartSaved]] = {}
        self._outcomes: dict[int, SaveOutcome] = {}

    def hear(self, name: str, part: PartSaved) -> Gathered | None:
        """Not None once: when nothing more is to be waited for."""
        if part.generation != self.generation or name not in self._members:
            return None
        parts = self._parts.setdefault(part.step, {})
        is_settled = self._is_gathered(part.step)
        parts.setdefault(name, part)
        if is_settled or not self._is_gathered(part.step):
            return None
        errors = [f"{node}: {said.error}" for node, said in sorted(parts.items()) if said.error]
        files = tuple(file for said in parts.values() for file in said.files)
        return Gathered(part.step, files, "; ".join(errors))

    def _is_gathered(self, step: int) -> bool:
        parts = self._parts[step]
        return parts.keys() == self._members or any(part.error for part in parts.values())

    def settle(self, step: int, error: str) -> SaveOutcome:
        self._outcomes[step] = SaveOutcome(self._me, self._known, self.generation, step, error)
        return self._outcomes[step]

    def outcome_of(self, step: int) -> SaveOutcome | None:
        return self._outcomes.get(step)


class NodesParts:
    """A node's side (the leader's own, too): what it has written and not heard the outcome of."""

    def __init__(self, me: Node, known: int, generation: int) -> None:
        self.generation = generation
        self._me, self._known = me, known
        self._unanswered: dict[int, PartSaved] = {}

    def written(self, step: int, files: tuple[WrittenFile, ...], error: str) -> PartSaved:
        part = PartSaved(self._me, self._known, self.generation, step, files, error)
        self._unanswered[step] = part
        return part

    @property
    def unanswered(self) -> tuple[PartSaved, ...]:
        return tuple(self._unanswered.values())

    def hear(self, outcome: SaveOutcome) -> bool:
        """True the first time that the outcome of a step is heard."""
        return outcome.generation == self.generation and self._unanswered.pop(outcome.step, None) is not None
