"""A generation, seen by one of its members: whom it watches, who wants what. It lasts from `Enter` to `Quit`."""

from __future__ import annotations

from collections.abc import Collection
from functools import cached_property

from launcher.cluster.messages import Beat, Message
from launcher.cluster.model import Generation, Node


class Running:
    """The leader watches every member, a member watches the leader.

    pause_by: set when the ranks have been asked for an agreed save; then the generation is changed without it.
    pausing_for_leave: whether somebody has to go, who cannot wait as long as who wants to join.
    """

    def __init__(self, generation: Generation, me: Node, now: float) -> None:
        self.generation = generation
        self.leader = generation.leader
        self.is_leader = self.leader.key == me.key
        self.finished: set[str] = set()
        self.leaving: set[str] = set()
        self.pause_by: float | None = None
        self.pausing_for_leave = False
        watched = generation.members if self.is_leader else (self.leader,)
        self._heard = {node.name: now for node in watched if node.key != me.key}

    @cached_property
    def _members(self) -> dict[str, Node]:
        """By name. A member hardly ever needs it, and with a thousand members it takes a while to make."""
        return {member.name: member for member in self.generation.members}

    def __len__(self) -> int:
        return len(self.generation.members)

    @property
    def all_finished(self) -> bool:
        return len(self.finished) == len(self)

    def has_name(self, name: str) -> bool:
        return name in self._members

    def is_out(self, message: Message, now: float, silence_s: float) -> bool:
        """From a `Join` or a call: a member that runs nothing and knows this generation has quit it; a member's name
        with another incarnation has come back without memory. But where the member itself still speaks from another
        address, two agents have one name (a second start of the job): the later one waits."""
        sender = message.sender
        member = self._members.get(sender.name)
        if member is None:
            return False
        if member.key == sender.key:
            return message.known == self.generation.number
        speaks = now - self._heard.get(sender.name, 0.0) <= silence_s
        return member.address == sender.address or not speaks

    def hear(self, beat: Beat, now: float) -> None:
        name = beat.sender.name
        if name in self._heard:
            self._heard[name] = now
        if beat.leaving:
            self.leaving.add(name)
        if beat.finished:
            self.finished.add(name)

    def silent(self, now: float, silence_s: float) -> list[str]:
        return [name for name, at in self._heard.items() if now - at > silence_s]

    def watched_at(self, address: str) -> list[str]:
        return [node.name for node in self.generation.members if node.address == address and node.name in self._heard]

    def members_named(self, names: Collection[str]) -> list[Node]:
        return [member for member in self.generation.members if member.name in names]
