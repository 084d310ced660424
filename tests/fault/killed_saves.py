"""Kills the code that saves, prunes and resumes, with SIGKILL at system calls, again and again, and looks after each
kill at what is left: never a torn checkpoint taken, never a whole one lost.

A history is one output folder that lives through several generations (`save_script.Generation`), each of which is
killed somewhere: at a system call that is drawn (of all, or of those that change the disk), at a time that is drawn, or
while a process of the generation before still writes, both moved forward in turns (`Fashion`). After each kill:

- the folder is compared with a model of its own (`save_model.History`);
- on a copy the next generation begins undisturbed: it must take the newest whole checkpoint, leave nothing lying about,
  save, and prune. The original goes on to the next kill as it is, so that kills meet what kills have left.

A seed gives the same history again.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from multiprocessing import get_context
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path

from tests.fault.save_model import BrokenPromise, History, copy_folder
from tests.fault.save_script import DONE, OVER, WAYS, Aim, Board, Code, Generation, Kind, Operation, Phase, tag_of
from tests.fault.traced import Call, Calls, TracedChild

KILLS_PER_HISTORY = 10
_BIG_BYTES = 3 << 20  # takes long enough to write that a kill at a random time tears it
_NUMBER = re.compile(r"\d+")


class Fashion(Enum):
    """How a process is killed."""

    ANY_CALL = "at any system call"
    CHANGING_CALL = "at one that changes the disk"
    RENAME = "at a rename"
    TIME = "at a random time"
    TWO = "with a late process of the generation before"


# How often, and which calls a process stops at then.
FASHIONS = {
    Fashion.ANY_CALL: (0.25, Calls.ALL),
    Fashion.CHANGING_CALL: (0.25, Calls.CHANGING),
    Fashion.RENAME: (0.15, Calls.RENAMES),
    Fashion.TIME: (0.1, Calls.ALL),
    Fashion.TWO: (0.25, Calls.CHANGING),
}
# Where each phase is looked for, and so how often kills are aimed at it: at all alike.
AIMS = {
    Phase.CHOICE: Kind.RESUME,
    Phase.CLEAR: Kind.RESUME,
    Phase.SET_ASIDE: Kind.RESUME,
    Phase.SAVE: Kind.WRITE,
    Phase.COMMIT: Kind.COMMIT,
    Phase.REPLACE: Kind.COMMIT,
    Phase.PRUNE: Kind.PRUNE,
    Phase.FINAL: Kind.WRITE_FINAL,
}


@dataclass
class Tally:
    """What was killed where. `points`: system call, before or after, what it was about."""

    kills: Counter[Phase] = field(default_factory=Counter)
    fashions: Counter[Fashion] = field(default_factory=Counter)
    names: dict[Phase, set[str]] = field(default_factory=dict)
    points: dict[Phase, set[str]] = field(default_factory=dict)
    num_histories: int = 0
    num_recoveries: int = 0

    def add(self, phase: Phase, fashion: Fashion, call: Call | None, output_dir: Path) -> None:
        self.kills[phase] += 1
        self.fashions[fashion] += 1
        if call is not None:
            self.names.setdefault(phase, set()).add(call.name)
            self.points.setdefault(phase, set()).add(_point(call, output_dir))

    def merge(self, other: Tally) -> None:
        self.kills.update(other.kills)
        self.fashions.update(other.fashions)
        for mine, others in ((self.names, other.names), (self.points, other.points)):
            for phase, found in others.items():
                mine.setdefault(phase, set()).update(found)
        self.num_histories += other.num_histories
        self.num_recoveries += other.num_recoveries

    @property
    def num_kills(self) -> int:
        return self.kills.total()


def _point(call: Call, output_dir: Path) -> str:
    """The same for all saves, steps and generations."""
    paths = [re.sub(r"cleared-[0-9a-f]+", "cleared", path.replace(str(output_dir), "")) for path in call.paths]
    return f"{call.moment.value} {call.name} {' '.join(_NUMBER.sub('N', path) for path in paths)}"


@dataclass(frozen=True)
class Broken:
    """A promise that was not kept: by what history, and where its folder lies."""

    seed: int
    message: str
    folder: Path


@dataclass(frozen=True)
class Lengths:
    """How many stops each phase has, and how long an operation takes; measured once, so that kills fall evenly over
    them."""

    stops: Mapping[tuple[Phase, Calls], int]
    seconds: Mapping[Kind, float]


class HistoryRun:
    """One history on one folder."""

    def __init__(self, seed: int, folder: Path, code: Code, lengths: Lengths, phases: Sequence[Phase]) -> None:
        self.phases = phases
        self.seed, self.folder, self.code, self.lengths = seed, folder, code, lengths
        self.rng = random.Random(seed)
        self.output_dir = folder / "out"
        self.history = History()
        self.tally = Tally(num_histories=1)
        self.keep = self.rng.choice((1, 1, 2, 3))
        self.story: list[str] = []
        self._boards = (Board(), Board(), Board())
        self._generation = 0

    def run(self) -> Tally:
        """Raises BrokenPromise."""
        self.output_dir.mkdir(parents=True)
        while self.tally.num_kills < KILLS_PER_HISTORY:
            self._generation += 1
            phase = self.rng.choice(self.phases)
            if phase is Phase.SET_ASIDE or self.rng.random() < 0.25:
                self.story.append(f"damage: {self.history.damage(self.output_dir, self.rng)}")
            fashions = list(FASHIONS)
            fashion = self.rng.choices(fashions, [FASHIONS[f][0] for f in fashions])[0]
            if fashion is Fashion.TWO:
                self._two_processes(phase)
            else:
                self._one_process(phase, fashion)
            self._recover()
        return self.tally

    def operations(self, phase: Phase | None = None) -> list[Operation]:
        """What the generation will do, if it is let: one to three saves, perhaps of a step that is there already, and
        perhaps final/; so that there is a chance of `phase`."""
        operations = [Operation(Kind.RESUME), Operation(Kind.LOAD)]
        ahead = 0 if phase is Phase.REPLACE else self.rng.choice((0, 1, 1))
        for number in range(self.rng.choice((1, 1, 2, 3))):
            tag = tag_of(self._generation, number, _BIG_BYTES if self.rng.random() < 0.05 else 0)
            operations += [Operation(kind, tag, ahead + number) for kind in (Kind.WRITE, Kind.COMMIT)]
            operations.append(Operation(Kind.PRUNE, keep=self.keep))
        if phase is Phase.FINAL or self.rng.random() < 0.25:
            tag = tag_of(self._generation, 9)
            operations += [Operation(Kind.WRITE_FINAL, tag, ahead + 3), Operation(Kind.COMMIT_FINAL, tag, ahead + 3)]
        return operations

    # -- one process ---------------------------------------------------------------------------------------------------

    def _one_process(self, phase: Phase, fashion: Fashion) -> None:
        operations, board = self.operations(phase), self._board(0)
        aim, calls = self._aim(operations, phase), FASHIONS[fashion][1]
        self.story.append(f"generation {self._generation}: {_told(operations)}")
        child = self._start(operations, board, aim, calls)
        if child.wait_until_traced():
            if fashion is Fashion.TIME:
                child.let_go()
                time.sleep(self.rng.random() * 1.2 * self.lengths.seconds[operations[aim.index].kind])
            else:
                self._advance(child, self._stops(phase, calls))
            self._kill(child, board, fashion)
        self._require_outcome(board, (DONE,))
        self.history.absorb([(operations, board)])
        self.history.look(self.output_dir, when="after the kill")

    def _aim(self, operations: Sequence[Operation], phase: Phase) -> Aim:
        indices = [index for index, operation in enumerate(operations) if operation.kind is AIMS[phase]]
        return Aim(indices[0] if phase is Phase.REPLACE else self.rng.choice(indices), phase)

    def _stops(self, phase: Phase, calls: Calls) -> int:
        return self.rng.randint(1, self.lengths.stops[phase, calls] + 1)

    def _start(
        self,
        operations: Sequence[Operation],
        board: Board,
        aim: Aim,
        calls: Calls,
        is_over: Callable[[], bool] = lambda: False,
    ) -> TracedChild:
        board.start()
        generation = Generation(self.output_dir, self._generation, operations, board, self.code, is_over)
        return TracedChild(partial(generation.run, aim=aim), calls)

    def _advance(self, child: TracedChild, num_stops: int) -> bool:
        """False where it has come to its end on the way."""
        return all(child.step() for _ in range(num_stops))

    def _kill(self, child: TracedChild, board: Board, fashion: Fashion) -> None:
        """Counted only where it was alive."""
        call = child.call() if fashion is not Fashion.TIME and child.status is None else None
        if child.kill() and not board.outcome:
            self.tally.add(board.phase, fashion, call, self.output_dir)
            self.story.append(f"  killed in {board.phase.value}: {call or fashion.value}")

    # -- two processes -------------------------------------------------------------------------------------------------

    def _two_processes(self, phase: Phase) -> None:
        """One is somewhere in its generation when the next one begins; both go on in turns, until each is killed or
        has come to its end."""
        boards = (self._board(0), self._board(1))
        early = self.operations(phase)
        aim = self._aim(early, phase)
        first = self._start(early, boards[0], aim, Calls.CHANGING, is_over=lambda: boards[1].started)
        if first.wait_until_traced():
            self._advance(first, self._stops(phase, Calls.CHANGING))
        self._generation += 1
        late = self.operations()
        second = self._start(late, boards[1], Aim(0, Phase.CHOICE), Calls.CHANGING)
        second.wait_until_traced()
        self.story.append(
            f"generation {self._generation - 1}: {_told(early)}, in its {phase.value} when {self._generation} begins: "
            f"{_told(late)}"
        )
        total = sum(self.lengths.stops[phase, Calls.CHANGING] for phase in AIMS)
        left = [self._lifetime(total), self._lifetime(total)]  # stops until each is killed
        children = [first, second]
        while any(child.status is None for child in children):
            which = self.rng.choice([index for index, child in enumerate(children) if child.status is None])
            turn = min(self.rng.choice((1, 2, 3, 8, 30)), left[which])
            self._advance(children[which], turn)
            left[which] -= turn
            if left[which] == 0 and children[which].status is None:
                self._kill(children[which], boards[which], Fashion.TWO)
        self._require_outcome(boards[0], (DONE, OVER))
        self._require_outcome(boards[1], (DONE,))
        self.history.absorb([(early, boards[0]), (late, boards[1])])
        self.history.look(self.output_dir, when="after the kill of two")
        self.history.require_not_overtaken(early, boards[1], "after the kill of two")

    def _lifetime(self, total: int) -> int:
        return self.rng.randint(1, total) if self.rng.random() < 0.7 else 10**9

    # -- afterwards ----------------------------------------------------------------------------------------------------

    def _recover(self) -> None:
        """The next generation, undisturbed, on a copy."""
        copied, number = self.folder / "recovered", self._generation + 1
        copy_folder(str(self.output_dir), str(copied))
        history, board, when = self.history.copied(), self._board(2), "in the next generation"
        tag = tag_of(number, 0)
        save = [Operation(Kind.WRITE, tag, 1), Operation(Kind.COMMIT, tag, 1), Operation(Kind.PRUNE, keep=self.keep)]
        operations = [Operation(Kind.RESUME), Operation(Kind.LOAD), *save]
        Generation(copied, number, operations, board, self.code).run()
        self._require_outcome(board, (DONE,))
        history.require_taken(board, when)
        history.absorb([(operations, board)])
        history.look(copied, when=when)
        if history.holders.get(history.newest()) != tag:
            raise BrokenPromise(f"{when}: its own save {tag} is not the newest one")
        history.require_tidy(copied, when)
        history.require_pruned(self.keep, when)
        shutil.rmtree(copied)
        self.tally.num_recoveries += 1

    def _board(self, index: int) -> Board:
        self._boards[index].clear()
        return self._boards[index]

    def _require_outcome(self, board: Board, expected: Sequence[str]) -> None:
        if board.outcome and board.outcome not in expected:
            raise BrokenPromise(f"a process ended by itself:\n{board.outcome}")


def _told(operations: Sequence[Operation]) -> str:
    return ", ".join(f"{o.kind.name} {o.tag}".rstrip() + (f" +{o.ahead}" if o.tag else "") for o in operations)


def measure(folder: Path, code: Code) -> Lengths:
    """How long each operation is, from generations that nobody kills. Each finds something to clear, to set aside, to
    prune and to replace."""
    stops: Counter[tuple[Phase, Calls]] = Counter()
    seconds: dict[Kind, float] = {}
    board = Board()
    for number, calls in enumerate((None, *Calls, None), start=1):
        (folder / f"checkpoint-{1000 * number}").mkdir(parents=True)
        board.clear()
        operations = [Operation(Kind.RESUME), Operation(Kind.LOAD)]
        for ahead in (0, 1):
            tag = tag_of(number, ahead)
            operations += [Operation(kind, tag, ahead) for kind in (Kind.WRITE, Kind.COMMIT)]
            operations.append(Operation(Kind.PRUNE, keep=1))
        operations += [Operation(kind, tag_of(number, 9), 2) for kind in (Kind.WRITE_FINAL, Kind.COMMIT_FINAL)]
        generation = Generation(folder, number, [*operations, Operation(Kind.WRITE, "left-0", 9)], board, code)
        if calls is None:  # the first warms up, the last is timed
            generation.run()
            seconds = {o.kind: (board.row(i)[1] - board.row(i)[0]) / 1e9 for i, o in enumerate(operations)}
            continue
        child = TracedChild(partial(generation.run, aim=Aim(0, Phase.CHOICE)), calls)
        child.wait_until_traced()
        while child.step():
            stops[board.phase, calls] += 1
        stops[Phase.SAVE, calls] //= 3  # as often as it came
        stops[Phase.PRUNE, calls] //= 2
    shutil.rmtree(folder)
    return Lengths(stops, seconds)


def run_history(seed: int, folder: Path, code: Code, lengths: Lengths, phases: Sequence[Phase]) -> Tally | Broken:
    """Its folder is removed unless a promise was broken."""
    here = folder / f"history-{seed}"
    history = HistoryRun(seed, here, code, lengths, phases)
    try:
        tally = history.run()
    except BrokenPromise as broken:
        return Broken(seed, "\n".join([*history.story, str(broken)]), here)
    shutil.rmtree(here)
    return tally


def run_histories(
    num_kills: int,
    folders: Sequence[Path],
    *,
    seed: int,
    codes: Sequence[Code] = WAYS,
    phases: Sequence[Phase] = tuple(AIMS),
    num_workers: int | None = None,
) -> Iterator[Tally | Broken]:
    """Histories as they end, until there were `num_kills` kills or one broke a promise; in `folders` and with `codes`
    by turns. `seed`: of the first, which says what the turns are. `phases`: what to aim at."""
    lengths = {
        (folder, code): measure(folder / "measured", code) for folder in dict.fromkeys(folders) for code in codes
    }
    workers = num_workers or os.cpu_count() or 1
    killed, context = 0, get_context("fork")
    with ProcessPoolExecutor(workers, mp_context=context, initializer=_settle, initargs=(context.Value("i"),)) as pool:
        number = seed
        while killed < num_kills:
            due = -(-(num_kills - killed) // KILLS_PER_HISTORY)
            jobs = []
            for _ in range(min(due, 20 * workers)):
                folder, code = folders[number % len(folders)], codes[number // len(folders) % len(codes)]
                job = (number, folder, code, lengths[folder, code], phases)
                jobs.append(pool.submit(run_history, *job))
                number += 1
            for done in as_completed(jobs):
                result = done.result()
                yield result
                if isinstance(result, Broken):
                    pool.shutdown(cancel_futures=True)
                    return
                killed += result.num_kills


def _settle(num_settled: Synchronized[int]) -> None:
    """A tracer and its children take turns: on one CPU that is twice as fast."""
    cpus = sorted(os.sched_getaffinity(0))
    with num_settled.get_lock():
        os.sched_setaffinity(0, {cpus[num_settled.value % len(cpus)]})
        num_settled.value += 1
