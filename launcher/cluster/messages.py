"""What agents say to each other about membership. A message may be lost, doubled, late or out of order: each says
enough to be judged by itself.

`Join` is answered by `Guide`, `Beat` by `Beat`, `Prepare` by `Promise`, `Accept` by `AcceptedBy`, `End` by `End`, so
that over HTTP an answer can travel in the response. Any message whose `known` is behind the receiver's is also answered
by `Learn`, and one whose `known` is ahead by `Join`.
"""

from __future__ import annotations

from dataclasses import dataclass

from launcher.cluster.model import Accepted, Generation, Identity, Node
from launcher.progress_record import RankProgress


@dataclass(frozen=True, slots=True)
class Message:
    """known: number of the newest generation that the sender knows to be chosen."""

    sender: Node
    known: int


@dataclass(frozen=True, slots=True)
class Join(Message):
    """I am in no generation and follow you. From a member of generation `known` it also says: I am out of it for good.

    heard: you have answered me, so words pass in both directions.
    """

    voted: int
    heard: bool
    leaving: bool
    identity: Identity


@dataclass(frozen=True, slots=True)
class Guide(Message):
    """Follow the node at `to`. When that is the sender, and it runs no generation, it is forming the next one.

    to: "" when the sender follows nobody who answers.
    waits_for: whom the one that forms the next generation misses, in words.
    """

    to: str
    running: bool
    reason: str
    waits_for: str = ""

    @property
    def is_call(self) -> bool:
        return self.to == self.sender.address and not self.running


@dataclass(frozen=True, slots=True)
class Refuse(Message):
    """You cannot be in this job."""

    reason: str


@dataclass(frozen=True, slots=True)
class Beat(Message):
    """I am alive and in `generation`. From a member to its leader, and back."""

    generation: int
    leaving: bool = False
    finished: bool = False


@dataclass(frozen=True, slots=True)
class Prepare(Message):
    """May I propose the successor of generation `base` under this number?"""

    number: int
    base: int


@dataclass(frozen=True, slots=True)
class Promise(Message):
    """Yes: I am out of every generation below `number` and accept nothing below it.

    accepted: what I have accepted as the successor of `known`, if anything: it may have been chosen.
    port: a free port on my machine, in case I become the leader.
    """

    number: int
    accepted: Accepted | None
    port: int
    leaving: bool


@dataclass(frozen=True, slots=True)
class Accept(Message):
    """Accept this generation as the successor of its base."""

    ballot: int
    generation: Generation


@dataclass(frozen=True, slots=True)
class AcceptedBy(Message):
    ballot: int


@dataclass(frozen=True, slots=True)
class Learn(Message):
    """This generation has been chosen."""

    generation: Generation


@dataclass(frozen=True, slots=True)
class End(Message):
    """The whole run ends with this code."""

    exit_code: int
    reason: str


@dataclass(frozen=True, slots=True)
class AskSave(Message):
    """From the leader, until all have stopped: the ranks of `generation` are to save at a step that all agree on.

    save_at: that step; None until it is known.
    """

    generation: int
    save_at: int | None
    reason: str


@dataclass(frozen=True, slots=True)
class SaveState(Message):
    """To the leader: how far this node's ranks are with the agreed save.

    prepared: each of them will wait at the end of the step it is in. waits_at: the step at whose end one of them waits.
    stopped: they have saved, and are gone.
    """

    generation: int
    prepared: bool
    waits_at: int | None
    stopped: bool


@dataclass(frozen=True, slots=True)
class AskOrders(Message):
    """To the leader: what are the ranks of `generation` to do?"""

    generation: int


@dataclass(frozen=True, slots=True)
class Orders(Message):
    """What the ranks of `generation` are told (`RankSpec` as JSON), and where they continue."""

    generation: int
    spec: str
    resume_step: int


@dataclass(frozen=True, slots=True)
class AskCourier(Message):
    """Where does your courier listen?"""


@dataclass(frozen=True, slots=True)
class CourierAt(Message):
    """My courier listens at `address` (`IPv4:port`)."""

    address: str


@dataclass(frozen=True, slots=True)
class WrittenFile:
    """A file of a checkpoint, in the output folder; `name` is relative to the checkpoint."""

    name: str
    size_bytes: int
    xxh3_128: str


@dataclass(frozen=True, slots=True)
class PartSaved(Message):
    """To the leader, until it says `SaveOutcome`: this node's files of the checkpoint of `step` are written.

    error: why they are not; then there are no files.
    """

    generation: int
    step: int
    files: tuple[WrittenFile, ...]
    error: str = ""


@dataclass(frozen=True, slots=True)
class SaveOutcome(Message):
    """From the leader: the checkpoint of `step` has its name. error: why it will not get it."""

    generation: int
    step: int
    error: str


@dataclass(frozen=True, slots=True)
class Standstill(Message):
    """To the leader, at each look: this node's ranks of `generation` have stood still for too long."""

    generation: int
    ranks: tuple[RankProgress, ...]


@dataclass(frozen=True, slots=True)
class AllStandStill(Message):
    """From the leader: the ranks of all nodes of `generation` do, and these are they (of very many: the ones that are
    furthest back and furthest on). The node whose rank is behind ends it."""

    generation: int
    ranks: tuple[RankProgress, ...]
