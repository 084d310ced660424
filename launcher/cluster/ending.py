"""The end of the whole run: a node that knows of it stays until the others know, or for a bound."""

from __future__ import annotations

from collections.abc import Iterable

from launcher.cluster.messages import End, Message
from launcher.cluster.model import Node
from launcher.cluster.outbox import Outbox


class Ending:
    def __init__(self, end: End, untold: Iterable[Node], outbox: Outbox, until: float) -> None:
        self.end = end
        self._untold = {node.address for node in untold} - {end.sender.address}
        self._outbox, self._until = outbox, until

    @property
    def is_done(self) -> bool:
        return not self._untold or self._outbox.now > self._until

    def tell(self) -> None:
        for address in sorted(self._untold):
            self._outbox.send(address, self.end)

    def hear(self, message: Message) -> None:
        """`End` says that its sender knows; any other message that it does not."""
        if isinstance(message, End):
            self.forget(message.sender.address)
        else:
            self._outbox.reply(message, self.end)

    def forget(self, address: str) -> None:
        self._untold.discard(address)
