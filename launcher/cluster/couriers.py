"""Where the couriers of the other members listen. Pure; asked for with each heartbeat until all are known."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from launcher.cluster.messages import AskCourier, CourierAt
from launcher.cluster.model import Node


class Couriers:
    """As one node knows them. An agent that has started anew has its courier at another port: every generation asks
    anew."""

    def __init__(self, me: Node) -> None:
        self._me = me
        self._mine = ""
        self._others: tuple[Node, ...] = ()
        self._at: dict[str, str] = {}

    def begin(self, members: Collection[Node]) -> None:
        self._others = tuple(member for member in members if member.key != self._me.key)
        self._at = {}

    def listens(self, address: str) -> None:
        """This node's courier. "" where it does not listen."""
        self._mine = address

    def questions(self, known: int) -> Mapping[str, AskCourier]:
        """By address of the agent."""
        return {node.address: AskCourier(self._me, known) for node in self._others if node.name not in self._at}

    def answer(self, known: int) -> CourierAt | None:
        return CourierAt(self._me, known, self._mine) if self._mine else None

    def hear(self, message: CourierAt) -> None:
        if any(node.key == message.sender.key for node in self._others):
            self._at[message.sender.name] = message.address

    @property
    def known(self) -> Mapping[str, str]:
        """Addresses by the node's name."""
        return self._at

    @property
    def all_known(self) -> bool:
        return len(self._at) == len(self._others)
