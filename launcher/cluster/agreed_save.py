"""A save at a step that all ranks of several nodes agree on, without a collective. Pure.

The leader asks every node to make its ranks wait at the end of the step they are in (`prepared`). Once all nodes have
said so and one rank waits at the end of step k, the step is k + 1. docs/agreed-saves.md has the argument.

Everything said is a state, not an event: it may be lost, doubled or late, and is said again with each heartbeat.
"""

from __future__ import annotations

from collections.abc import Collection

from launcher.cluster.messages import AskSave, SaveState
from launcher.cluster.model import Node


class LeadersSave:
    """The leader's side, from the wish to save until every node's ranks have stopped."""

    def __init__(self, me: Node, known: int, generation: int, members: Collection[str], reason: str) -> None:
        """members: names of all nodes of the generation, the leader's own too."""
        self.generation = generation
        self._me, self._known, self._reason = me, known, reason
        self._members = frozenset(members)
        self._prepared: set[str] = set()
        self._stopped: set[str] = set()
        self._waits_at: int | None = None
        self.save_at: int | None = None

    def hear(self, name: str, state: SaveState) -> bool:
        """True when the step has become known just now."""
        if state.generation != self.generation or name not in self._members:
            return False
        if state.prepared:
            self._prepared.add(name)
        if state.stopped:
            self._stopped.add(name)
        if self._waits_at is None:
            self._waits_at = state.waits_at
        if self.save_at is not None or self._waits_at is None or self._prepared != self._members:
            return False
        self.save_at = self._waits_at + 1
        return True

    @property
    def done(self) -> bool:
        return self._stopped == self._members

    @property
    def missing(self) -> list[str]:
        """Who has not stopped yet."""
        return sorted(self._members - self._stopped)

    def question(self) -> AskSave:
        return AskSave(self._me, self._known, self.generation, self.save_at, self._reason)


class NodesSave:
    """A node's side (the leader's own, too): what has been asked, and how far its ranks are."""

    def __init__(self, me: Node, known: int, generation: int) -> None:
        self.generation = generation
        self.prepared = self.stopped = False
        self.waits_at: int | None = None
        self._me, self._known = me, known

    def state(self) -> SaveState:
        return SaveState(self._me, self._known, self.generation, self.prepared, self.waits_at, self.stopped)
