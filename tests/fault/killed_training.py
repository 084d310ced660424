"""A real training whose processes are killed with SIGKILL again and again, and that reaches its planned end all the
same.

Ranks, the fork server and the agent are hit, each while it trains, while it saves (the folder in staging is there) or
while it starts; a killed agent is started again, as a scheduler would. At the end everything is compared with a run
that nobody disturbed. Raises AssertionError.
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from enum import Enum
from pathlib import Path
from typing import Any

from launcher.agent.ledger import effective_samples, read_samples, samples_path
from launcher.checkpoint.verify import list_checkpoints, verify_checkpoint
from launcher.data.order import SampleOrder
from tests.fault.harness import Job, Run
from tests.fault.tiny_model import NUM_RECORDS
from tests.fault.weights import digests

STEPS_PER_KILL = 12
EVERY_STEPS = 4
_START_S = 300.0  # on a machine that is busy with other things
_LOOK_EVERY_S = 0.002


class Victim(Enum):
    RANK = "a rank"
    FORK_SERVER = "the fork server"
    AGENT = "the agent"


class Moment(Enum):
    TRAINING = "while it trains"
    SAVING = "while it saves"
    STARTING = "while it starts"


SHARES = {Victim.FORK_SERVER: 0.1, Victim.AGENT: 0.14}  # the others are ranks; the agent's start takes longest
MOMENTS = {Moment.TRAINING: 0.35, Moment.SAVING: 0.4, Moment.STARTING: 0.25}


def changes_for(num_kills: int) -> dict[str, Any]:
    """Of the tests' base configuration: so long a training that every kill finds some of it left."""
    return {
        "training": {"max_steps": planned_steps(num_kills)},
        "checkpoint": {"every_steps": EVERY_STEPS, "keep": 3},
        "restart": {"max_without_progress": 1000, "backoff_seconds": 0.0},
    }


def planned_steps(num_kills: int) -> int:
    return STEPS_PER_KILL * (num_kills + 3)


class KilledTraining:
    """`run` starts the job until it ends by itself. Kill number k is due when step k * STEPS_PER_KILL is done."""

    def __init__(self, job: Job, num_kills: int, seed: int, say: Callable[[str], None]) -> None:
        self.job, self.num_kills, self.say = job, num_kills, say
        self.rng = random.Random(seed)
        self.kills: Counter[tuple[Victim, Moment]] = Counter()
        few = [victim for victim, share in SHARES.items() for _ in range(max(1, round(share * num_kills)))]
        self._victims = few + [Victim.RANK] * (num_kills - len(few))
        self.rng.shuffle(self._victims)
        self._samples = _Tail(samples_path(job.output_dir, "n0"))
        self._step = 0
        self._step_s = 0.05  # so long a step, or a little more
        self._save_s = 0.2
        self._disturbed = False  # the last kill has ended the attempt

    def run(self) -> None:
        while True:
            with self.job.start() as run:
                killed = self._kill_until_it_ends(run)
                if not killed:
                    assert run.wait(_START_S) == 0, run.log
                    return
                run.process.wait()
                assert not run.left_after(30), "the agent was killed and left processes behind"
            self._require_whole_checkpoints()

    def _kill_until_it_ends(self, run: Run) -> bool:
        """True where the agent was killed."""
        while self.kills.total() < self.num_kills:
            victim = self._victims[self.kills.total()]
            moment = self._await_moment(run, victim)
            pid = self._pid(run, victim)
            if pid is None:
                continue
            os.kill(pid, signal.SIGKILL)
            self.kills[victim, moment] += 1
            self._disturbed = victim is not Victim.FORK_SERVER or moment is Moment.STARTING
            self.say(f"{self.kills.total():4} {victim.value} {moment.value}, step {self._step}")
            if victim is Victim.AGENT:
                return True
        return False

    # -- when ----------------------------------------------------------------------------------------------------------

    def _await_moment(self, run: Run, victim: Victim) -> Moment:
        moment = self.rng.choices(list(MOMENTS), list(MOMENTS.values()))[0]
        if moment is Moment.STARTING and self._disturbed:
            self._await_start(run, victim)
            return moment
        due = (self.kills.total() + 1) * STEPS_PER_KILL
        self._until(run, lambda: self._look() >= due and self._trains(run), f"step {due}")
        if moment is Moment.SAVING:
            staging, before = self.job.output_dir / "ftlaunch" / "staging", self._checkpoints()
            self._until(run, lambda: any(staging.glob("gen-*/checkpoint-*")), "the next save")
            began_at = time.monotonic()
            time.sleep(self.rng.random() * 1.5 * self._save_s)
            if self._checkpoints() != before:
                self._save_s = 0.5 * (self._save_s + time.monotonic() - began_at)
            return moment
        time.sleep(self.rng.random() * EVERY_STEPS * self._step_s)
        return Moment.TRAINING

    def _await_start(self, run: Run, victim: Victim) -> None:
        """Any moment from when there is such a victim again to the first step."""
        steps = self.job.events("first_step")
        longest_s = steps[-1]["seconds"] if steps else 1.0

        def trains() -> bool:
            return len(self.job.events("first_step")) > len(steps)

        self._until(run, lambda: self._pid(run, victim) is not None or trains(), f"there is {victim.value}")
        began_at, wanted_s = time.monotonic(), self.rng.random() * longest_s
        self._until(run, lambda: time.monotonic() - began_at > wanted_s or trains(), "the start goes on")

    def _trains(self, run: Run) -> bool:
        """Whether the attempt that the last kill has brought about has come so far."""
        if not self._disturbed:
            return True
        started, first = run.events("generation_started"), run.events("first_step")
        self._disturbed = not (started and first and first[-1]["gen"] == started[-1]["gen"])
        return not self._disturbed

    def _until(self, run: Run, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + _START_S
        while not condition():
            if run.process.poll() is not None:
                raise AssertionError(f"ended with {run.process.returncode} before {what}\n{run.log}")
            if time.monotonic() > deadline:
                raise AssertionError(f"not within {_START_S:.0f} s: {what}\n{run.log}")
            time.sleep(_LOOK_EVERY_S)

    def _look(self) -> int:
        """The highest step that any attempt has done."""
        for record in self._samples.new():
            self._step = max(self._step, int(record["step"]))
        return self._step

    def _checkpoints(self) -> set[str]:
        return {path.name for path in self.job.output_dir.glob("checkpoint-*")}

    # -- who -----------------------------------------------------------------------------------------------------------

    def _pid(self, run: Run, victim: Victim) -> int | None:
        """None where there is no such process in this moment."""
        try:
            if victim is Victim.RANK:
                return run.rank_pid(self.rng.randrange(2))
            if victim is Victim.FORK_SERVER:
                return run.fork_server_pid()
        except AssertionError:
            return None
        return run.process.pid if run.process.poll() is None else None

    # -- what must hold ------------------------------------------------------------------------------------------------

    def _require_whole_checkpoints(self) -> None:
        """While nothing of the run is alive."""
        for step, path in list_checkpoints(self.job.output_dir):
            verification = verify_checkpoint(path, step)
            assert verification.whole, f"{path}: {verification.reason}"


class _Tail:
    """New whole lines of a file that grows."""

    def __init__(self, path: Path) -> None:
        self._path, self._at = path, 0

    def new(self) -> Iterator[dict[str, Any]]:
        try:
            with self._path.open("rb") as stream:
                stream.seek(self._at)
                data = stream.read()
        except FileNotFoundError:
            return
        whole = data[: data.rfind(b"\n") + 1]
        self._at += len(whole)
        yield from (json.loads(line) for line in whole.splitlines() if line)


def require_nothing_lost(job: Job) -> None:
    """Every attempt began at the newest checkpoint that had been saved, or a newer one; none was refused."""
    saved = 0
    for event in job.events():
        if event["event"] == "checkpoint_saved":
            saved = max(saved, event["step"])
        elif event["event"] == "resumed":
            assert event["step"] >= saved, f"step {saved} was saved, {event}"
        elif event["event"] == "first_step":
            assert event["step"] > saved, f"step {saved} was saved, {event}"
        assert event["event"] != "checkpoint_rejected", event


def require_the_same(killed: Job, undisturbed: Job, last_step: int) -> None:
    """Weights, optimizer and random states bit for bit, and each step's samples those of the order: none lost, none
    twice."""
    expected = digests(undisturbed.checkpoint(last_step))
    assert len(expected) > 20, "a comparison of nothing would pass as well"
    assert digests(killed.checkpoint(last_step)) == expected
    final = digests(undisturbed.output_dir / "final")
    assert final
    assert digests(killed.output_dir / "final") == final
    order = SampleOrder(num_samples=NUM_RECORDS, batch_size=2, world_size=2, global_batch_size=4, seed=42)
    steps = effective_samples(read_samples(killed.output_dir))
    assert sorted(steps) == list(range(1, last_step + 1))
    for step, ids in steps.items():
        epoch, index = divmod(step - 1, order.steps_per_epoch)
        places = order.permutation(epoch)[index * 4 : index * 4 + 4].tolist()
        assert sorted(ids) == sorted(places), f"step {step}"
