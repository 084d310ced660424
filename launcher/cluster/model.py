"""What membership talks about: nodes, generations, what a node must remember, what it is told and what it wants done.

Invariant: everything here is data that never changes; two nodes that hold equal values hold the same thing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

_NUM_NAMED = 8

NodeKey: TypeAlias = tuple[str, str]  # name and incarnation: whoever has lost its memory is somebody else


def shortened(names: Sequence[str]) -> str:
    """The first of them and how many more there are: a line for people, also with a thousand nodes."""
    more = len(names) - _NUM_NAMED
    return ", ".join(names[:_NUM_NAMED]) + (f" and {more} more" if more > 0 else "")


@dataclass(frozen=True, slots=True)
class Node:
    """One machine of the job, as its agent presents itself.

    name: stable over restarts of the agent: "n<node rank>", or the host's address.
    address: "ip:port" where its agent listens.
    incarnation: drawn at random when an agent starts without memory (`Durable`), and kept together with that memory.
    """

    name: str
    address: str
    num_ranks: int
    incarnation: str

    @property
    def key(self) -> NodeKey:
        return self.name, self.incarnation

    def __str__(self) -> str:
        return f"{self.name} ({self.address})"


@dataclass(frozen=True, slots=True)
class Generation:
    """A set of nodes that train together. The first member leads it and hosts rank 0 and the store on `master_port`.

    number: unique and growing along the chain of generations, with gaps (an attempt that fails costs a number).
    base: number of the generation that this one succeeds; exactly one generation ever succeeds it.
    """

    number: int
    members: tuple[Node, ...]
    base: int
    master_port: int
    reason: str

    @property
    def leader(self) -> Node:
        return self.members[0]

    def has(self, node: Node) -> bool:
        return any(member.name == node.name and member.key == node.key for member in self.members)

    def __str__(self) -> str:
        return f"generation {self.number} ({shortened([member.name for member in self.members])})"


# What every generation descends from. Nobody is in it, so its quorum is half of nobody, and the claim.
GENESIS = Generation(number=0, members=(), base=0, master_port=0, reason="nothing has been formed yet")


@dataclass(frozen=True, slots=True)
class Wanted:
    """How many nodes a generation may have. Where the two are the same, the size is fixed: the missing are awaited."""

    min_nodes: int
    max_nodes: int

    @property
    def fixed(self) -> bool:
        return self.min_nodes == self.max_nodes


@dataclass(frozen=True, slots=True)
class Identity:
    """What must be the same on every node, or they would not be training the same thing."""

    job_sha: str
    versions: Mapping[str, str] = field(default_factory=dict)
    contract: Mapping[str, str] = field(default_factory=dict)  # of the world: backend, precision, ...

    def differences(self, other: Identity) -> list[str]:
        """In words, this side's value first ("here"); empty when the two agree."""
        if self == other:
            return []
        found: list[str] = []
        for mine, theirs in ((self.versions, other.versions), (self.contract, other.contract)):
            found += [
                f"{key}: {mine.get(key, 'none')} here, {theirs.get(key, 'none')} there"
                for key in sorted({*mine, *theirs})
                if mine.get(key) != theirs.get(key)
            ]
        if self.job_sha != other.job_sha and not any(words.startswith("job.yaml, ") for words in found):
            found.insert(0, f"job.yaml: {self.job_sha} here, {other.job_sha} there")  # no single key shows it
        return found


@dataclass(frozen=True, slots=True)
class Timing:
    """Durations. Safety rests on none of them; they trade the speed of recovery against false alarms.

    silence_s: not heard from for this long is lost.
    vote_s: how long the answers to one question (prepare, accept, claim) are awaited.
    gather_s: elastic, first generation: how long to wait for more than min_nodes.
    bound_s: how long a node waits in no generation before it gives up.
    pause_s: how long ranks may take for an agreed save, when a node has to go; then the generation changes without it.
    join_pause_s: the same, when a node wants to join, which is not urgent: a step may be long.
    """

    heartbeat_s: float = 0.5
    silence_s: float = 3.0
    vote_s: float = 1.0
    gather_s: float = 30.0
    bound_s: float = 600.0
    pause_s: float = 20.0
    join_pause_s: float = 600.0

    def of_size(self, num_nodes: int) -> Timing:
        """The same for 250 nodes and fewer. With more, one agent answers all the others: their heartbeats come up to
        half as often, silence counts only after five of them, and a vote may take longer."""
        if num_nodes <= 250:
            return self
        heartbeat_s = min(num_nodes / 500, 1.0)
        silence_s = max(self.silence_s, 5 * heartbeat_s)
        return replace(self, heartbeat_s=heartbeat_s, silence_s=silence_s, vote_s=self.vote_s + num_nodes / 500)


@dataclass(frozen=True, slots=True)
class Accepted:
    """The proposal a voter accepted last. `ballot` exceeds `generation.number` when a later proposer took it up."""

    ballot: int
    generation: Generation


@dataclass(frozen=True, slots=True)
class Durable:
    """What a node must not forget. An agent that has lost it comes back under a new incarnation, as somebody else.

    voted: the highest number this node has promised, accepted or learned.
    committed: the newest generation it knows to be chosen.
    """

    incarnation: str
    voted: int = 0
    accepted: Accepted | None = None
    committed: Generation = GENESIS


# ---- what the agent tells membership ----


@dataclass(frozen=True, slots=True)
class LocalFailed:
    """Ranks on this node have failed. Not retryable: the whole run ends with `exit_code`."""

    generation: int
    retryable: bool
    reason: str
    exit_code: int = 1


@dataclass(frozen=True, slots=True)
class LocalFinished:
    """The ranks on this node have reached the planned end."""

    generation: int


@dataclass(frozen=True, slots=True)
class Paused:
    """The ranks of all nodes have made the agreed save that `AskPause` asked for."""

    generation: int


@dataclass(frozen=True, slots=True)
class LeaveAsked:
    """This node has to go (a notice, SIGTERM)."""

    reason: str


LocalEvent: TypeAlias = LocalFailed | LocalFinished | Paused | LeaveAsked
