"""What one event has led to so far. Invariant: effects leave in the order of the decisions; none after `GiveUp`."""

from __future__ import annotations

from collections.abc import Callable

from launcher.cluster.effects import Effect, GiveUp, Persist, Say, Send
from launcher.cluster.messages import Message
from launcher.cluster.model import Node
from launcher.cluster.voter import Voter


class Outbox:
    """now: when the event that is being handled happened. A message to this node itself goes to `to_self` at once."""

    def __init__(self, me: Node, voter: Voter, to_self: Callable[[Message], None]) -> None:
        self.me, self._voter, self._to_self = me, voter, to_self
        self.now = 0.0
        self.closed = False
        self._effects: list[Effect] = []
        self._said = ""

    def add(self, effect: Effect) -> None:
        if not self.closed:
            self._effects.append(effect)
            self.closed = isinstance(effect, GiveUp)

    def send(self, address: str, message: Message) -> None:
        if address == self.me.address:
            self._to_self(message)
        else:
            self.add(Send(address, message))

    def reply(self, question: Message, answer: Message) -> None:
        self.send(question.sender.address, answer)

    def persist(self) -> None:
        self.add(Persist(self._voter.durable))

    def say(self, text: str) -> None:
        """What has just been said is not said again."""
        if text != self._said:
            self._said = text
            self.add(Say(text))

    def take(self) -> list[Effect]:
        effects, self._effects = self._effects, []
        return effects
