"""The snapshots of a node's ranks are kept on the next node of the ring, too: what one node takes along when it goes is
still there, whatever the number of nodes and the ZeRO stage.

Invariant: a node's ranks hear that a step is exchanged only when the next node's agent has all of it, or that it is not
to be had; none of them waits for ever.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from contextlib import ExitStack
from functools import partial
from typing import Any

from launcher.agent.courier_client import CourierClient
from launcher.agent.crew import Crew, Turn
from launcher.agent.memory_tier import MemoryTier
from launcher.agent.peer_tier import Fetched, PeerTier, Place, Sent
from launcher.agent.resume_folder import HeldSnapshot, Job, NotResumable, ResumeFolder, materialise
from launcher.checkpoint.snapshot import SnapshotIdentity
from launcher.checkpoint.whole_step import WholeStep, whole_steps
from launcher.courier.messages import Cause, Failure
from launcher.courier.wire import close_all
from launcher.event_loop import CalledOff, EventLoop

_ADDRESSES_S = 5.0  # until all couriers are known; those that are not are left out
_INVENTORY_S = 5.0
_FETCH_S = 600.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 5.0, 300.0  # after a next node that could not be reached


class Ring:
    """Of one agent, over its turns."""

    def __init__(
        self,
        courier: CourierClient,
        place: Place,
        memory: MemoryTier,
        crew: Crew,
        loop: EventLoop,
        say: Callable[[str], None],
        exchanged: Callable[[int, str], None],
    ) -> None:
        """`exchanged`: gets a step that the next node has, or why it has not."""
        self._courier, self._memory, self._crew, self._loop = courier, memory, crew, loop
        self._say, self._exchanged = say, exchanged
        self._host = place.host
        self._turn: Turn | None = None
        self._sealed: dict[int, dict[int, tuple[SnapshotIdentity, int]]] = {}
        self._said = ""
        self._again_at_s, self._pause_s = 0.0, _FIRST_PAUSE_S
        self._peers = PeerTier(
            courier, place, own=memory.inventory, on_listening=self._on_listening, on_kept=self._on_kept
        )

    # -- while the ranks train -----------------------------------------------------------------------------------------

    def begin(self, turn: Turn) -> None:
        self._turn, self._sealed, self._said, self._again_at_s = turn, {}, "", 0.0

    def on_snapshot(self, identity: SnapshotIdentity, fd: int) -> None:
        """A rank of this node has sealed it. Once all have, it is sent."""
        turn = self._turn
        if turn is None or turn.num_nodes == 1:
            return
        sealed = self._sealed.setdefault(identity.step, {})
        sealed[identity.rank] = (identity, fd)
        if len(sealed) < turn.mine.num_ranks:
            return
        self._sealed = {step: ranks for step, ranks in self._sealed.items() if step > identity.step}
        name = turn.seats[(turn.index + 1) % turn.num_nodes].name
        address = self._crew.couriers().get(name)
        if address is None:
            self._settle(turn, identity.step, f"the courier of {name} is not known")
        elif time.monotonic() < self._again_at_s:  # each further attempt would cost the training its time-out
            self._settle(turn, identity.step, self._said)
        else:
            self._peers.send(address, list(sealed.values()), partial(self._on_sent, turn, identity.step, name))

    def end(self) -> None:
        """The ranks are gone."""
        self._peers.call_off_sending()
        self._turn = None

    def close(self) -> None:
        self._peers.close()

    def _on_sent(self, turn: Turn, step: int, name: str, outcome: Sent | Failure) -> None:
        if isinstance(outcome, Sent):
            self._pause_s = _FIRST_PAUSE_S
            self._settle(turn, step, "")
        elif outcome.cause is not Cause.SUPERSEDED:
            if outcome.cause is Cause.NETWORK:
                self._again_at_s = time.monotonic() + self._pause_s
                self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
            self._settle(turn, step, f"this node's state does not reach {name} ({outcome.reason})")

    def _settle(self, turn: Turn, step: int, error: str) -> None:
        if self._turn is not turn:
            return
        if error and error != self._said:
            self._say(f"{error}; the training goes on, with it on this node alone")
        elif not error and self._said:
            self._say("the next node keeps this node's state again")
        self._said = error
        self._exchanged(step, error)

    def _on_listening(self, outcome: int | Failure) -> None:
        if isinstance(outcome, Failure):
            self._say(f"other nodes cannot keep their state here: {outcome.reason}")
            self._crew.courier_listens("")
        else:
            self._crew.courier_listens(f"{self._host}:{outcome}")

    def _on_kept(self, source: str, step: int) -> None:
        """What former neighbours have sent is of use until the present one has sent something."""
        turn = self._turn
        if turn is not None and source == turn.seats[turn.index - 1].name:
            self._peers.forget_all_but([source])

    # -- between two turns ---------------------------------------------------------------------------------------------

    def newest_whole(
        self, turn: Turn, run_id: str, is_acceptable: Callable[[WholeStep], bool], called_off: Callable[[], bool]
    ) -> WholeStep | None:
        """Over the memory of all nodes. Raises CalledOff."""
        found = self._own_identities()
        for identities in self._inventories(turn, called_off).values():
            found |= identities
        mine = [identity for identity in found if identity.run_id == run_id]
        return next(filter(is_acceptable, whole_steps(mine)), None)

    def assemble(self, turn: Turn, whole: WholeStep, job: Job, called_off: Callable[[], bool]) -> ResumeFolder:
        """All of it on this node: what others have is fetched. Raises NotResumable, CalledOff."""
        with ExitStack() as borrowed:
            copies: dict[int, list[HeldSnapshot]] = {}
            lent = borrowed.enter_context(self._peers.lent())
            for held in (*self._memory.inventory(), *lent):
                if whole.has(held.snapshot.identity):
                    copies.setdefault(held.snapshot.identity.rank, []).append(held)
            missing = set(range(whole.world_size)) - copies.keys()
            for held in self._fetched(turn, whole, missing, called_off) if missing else ():
                borrowed.callback(close_all, [held.fd])
                copies.setdefault(held.snapshot.identity.rank, []).append(held)
            left = sorted(set(range(whole.world_size)) - copies.keys())
            if left:
                raise NotResumable(f"no node has the state of rank {', '.join(map(str, left))} at step {whole.step}")
            # It stops by itself once `called_off()`; until then nothing that it reads may be closed.
            return self._loop.aside(partial(materialise, whole, copies, job, cancelled=called_off))

    def _fetched(
        self, turn: Turn, whole: WholeStep, missing: set[int], called_off: Callable[[], bool]
    ) -> Iterator[HeldSnapshot]:
        """One after the other, so that each is the caller's to close at once."""
        for name, there in self._inventories(turn, called_off).items():
            wanted = [identity for identity in there if whole.has(identity) and identity.rank in missing]
            if not wanted:
                continue
            ask = partial(self._peers.fetch, self._crew.couriers()[name], wanted)
            outcome: Fetched | Failure | None = self._answer_of(ask, _FETCH_S, called_off)
            if isinstance(outcome, Fetched):
                yield from outcome.snapshots
                missing = missing - {identity.rank for identity in wanted}
            elif outcome is not None:
                self._say(f"step {whole.step} could not be fetched from {name}: {outcome.reason}")

    def _own_identities(self) -> set[SnapshotIdentity]:
        return {held.snapshot.identity for held in self._memory.inventory()} | set(self._peers.inventory())

    def _inventories(self, turn: Turn, called_off: Callable[[], bool]) -> Mapping[str, AbstractSet[SnapshotIdentity]]:
        """What the other nodes of the turn have, by name; without those that do not answer."""
        deadline = time.monotonic() + _ADDRESSES_S
        while len(self._crew.couriers()) < turn.num_nodes - 1 and time.monotonic() < deadline:
            if called_off():
                raise CalledOff
            self._loop.wait(0.1)
        found: dict[str, AbstractSet[SnapshotIdentity]] = {}
        for name, address in self._crew.couriers().items():
            ask = partial(self._peers.ask_inventory, address)
            outcome: list[SnapshotIdentity] | Failure | None = self._answer_of(ask, _INVENTORY_S, called_off)
            if isinstance(outcome, list):
                found[name] = set(outcome)
            else:
                why = outcome.reason if outcome is not None else f"no answer within {_INVENTORY_S:g} s"
                self._say(f"what {name} has in memory is not known: {why}")
        return found

    def _answer_of(
        self, ask: Callable[[Callable[[Any], None]], int], bound_s: float, called_off: Callable[[], bool]
    ) -> Any:
        """None at the bound. Raises CalledOff. What comes afterwards is given back."""
        answers: list[Any] = []
        is_late = False
        deadline = time.monotonic() + bound_s

        def answered(outcome: Any) -> None:
            answers.append(outcome)
            if is_late and isinstance(outcome, Fetched):
                close_all(held.fd for held in outcome.snapshots)

        number = ask(answered)
        while not answers:
            if called_off() or time.monotonic() > deadline:
                is_late = True
                self._courier.cancel(number)
                if called_off():
                    raise CalledOff
                return None
            self._loop.wait(0.5)
        return answers[0]
