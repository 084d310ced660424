"""What an interval between checkpoints in memory costs: failures are replayed and the time lost is added up.

    python scripts/sim_save_interval.py                         # failures at random (Poisson)
    python scripts/sim_save_interval.py --traces FOLDER         # and as spot machines were really taken away

One line for each job and each kind of failure. The columns give the share of the time in which stalls held the
training up or work was done that a failure took away, for intervals around the one that
`launcher/policy/save_interval.py` chooses when it knows the mean time between failures, and for the best of all. The
restarts themselves cost the same with any interval and are left out. `learning` begins with the policy's prior alone
and decides again after each failure, as a run does.

What must hold: `auto` loses more than the best by at most the budget (one of a hundred), and where failures decide, by
at most a twentieth of what the best loses. Exit code 1 where it does not.

Traces: `milliseconds,add|remove,node` (.csv) or `date, time, machines alive` (.txt), as in the public Bamboo repository
(https://github.com/uclasystem/bamboo). Every moment at which machines were taken away counts as one failure of the job.
They hold some dozens to hundreds of failures, to the minute, so each is replayed many times with every failure up to
five minutes later: else the best interval would be the one that happens to fit these moments.
"""

from __future__ import annotations

import argparse
import bisect
import csv
import itertools
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # the scripts belong to this checkout, installed or not

from launcher.policy.save_interval import (  # noqa: E402
    FailureHistory,
    IntervalInputs,
    IntervalReason,
    SaveInterval,
    Stall,
    choose_interval,
)

NUM_POISSON_FAILURES = 4000
NUM_REPLAYS = 40
MOVED_BY_S = 300.0
CLOSE = 0.05  # `auto` may lose this much more than the best, relative, where failures decide
AROUND = (0.25, 0.5, 1, 2, 4)  # intervals in the table, times the chosen one


@dataclass(frozen=True)
class Job:
    """Seconds. A snapshot stalls for `stall_s` and is safe `seal_s` after it began."""

    name: str
    step_s: float
    stall_s: float
    seal_s: float
    restart_s: float = 15.0
    budget: float = 0.01


JOBS = (
    Job("LoRA, small", step_s=0.5, stall_s=0.002, seal_s=0.05),
    Job("LoRA, slow link", step_s=1.0, stall_s=0.06, seal_s=0.5),
    Job("full 7B", step_s=4.0, stall_s=0.4, seal_s=3.0),
    Job("full 70B, no overlap", step_s=12.0, stall_s=15.0, seal_s=15.0),
)


@dataclass(frozen=True)
class Failures:
    """`times_s`: sorted, of `length_s` seconds, one after the other for `num_replays` of the same."""

    name: str
    times_s: tuple[float, ...]
    length_s: float
    num_nodes: int = 1
    num_replays: int = 1

    @property
    def mean_s(self) -> float:
        return self.length_s / len(self.times_s)

    def of(self, job: Job) -> FailureHistory:
        """What a long run of this job has seen: it trains where it does not restart."""
        restarts_s = sum(min(job.restart_s, up_s) for up_s in self.uptimes_s())
        return FailureHistory(len(self.times_s), self.length_s - restarts_s)

    def uptimes_s(self) -> Iterator[float]:
        """From one failure to the next; the last one ends with the trace."""
        begin_s = 0.0
        for time_s in (*self.times_s, self.length_s):
            yield time_s - begin_s
            begin_s = time_s

    def replayed(self) -> Failures:
        rng, times_s = random.Random(0), []
        for number in range(NUM_REPLAYS):
            shifted = (at_s + rng.uniform(0, MOVED_BY_S) for at_s in self.times_s)
            times_s += sorted(number * (self.length_s + MOVED_BY_S) + at_s for at_s in shifted)
        length_s = NUM_REPLAYS * (self.length_s + MOVED_BY_S)
        return replace(self, times_s=tuple(times_s), length_s=length_s, num_replays=NUM_REPLAYS)


LINE = "{:28}  {:20}  {:>16}  {:>7}  {:>7}  {:>7}  {:>7}  {:>7}  {:>14}  {:>8}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--traces", type=Path, help="folder with traces of machines that were taken away")
    options = parser.parse_args()
    scenarios = [poisson(mean_s, seed) for seed, mean_s in enumerate((300.0, 3600.0, 24 * 3600.0))]
    scenarios += list(real_traces(options.traces))
    for job in JOBS:
        print(f"{job.name}: {_about(job)}")
    print(LINE.format("failures, mean", "job", "auto", *(f"x {factor:g}" for factor in AROUND), "best", "learning"))
    bad = [f"{failures.name}, {job.name}" for failures in scenarios for job in JOBS if not report(failures, job)]
    for name in bad:
        print(f"NOT NEAR THE BEST: {name}")
    return 1 if bad else 0


def report(failures: Failures, job: Job) -> bool:
    """Print one line; False where the chosen interval is not what the policy promises."""
    inputs = IntervalInputs(
        budget=job.budget,
        step_s=job.step_s,
        stall=Stall(job.stall_s, job.stall_s),
        seal_s=job.seal_s,
        failures=failures.of(job),
        num_nodes=failures.num_nodes,
    )
    chosen = choose_interval(inputs)
    steps = chosen.every_steps
    shown = [max(1, round(steps * factor)) for factor in AROUND]
    lost = {every: lost_of(failures, job, every) for every in {*shown, *_grid()}}
    best = min(lost, key=lambda every: lost[every])
    figures = [f"{lost[every]:.2%}" for every in shown]
    learning = lost_while_learning(failures, job, inputs)
    print(
        LINE.format(
            f"{failures.name}, {failures.mean_s / 60:.0f} min",
            job.name,
            f"{steps} ({chosen.reason.value})",
            *figures,
            f"{lost[best]:.2%} ({best})",
            f"{learning:.2%}",
        )
    )
    return is_as_promised(chosen, lost[steps], lost[best], job.budget)


def is_as_promised(chosen: SaveInterval, lost: float, best: float, budget: float) -> bool:
    if chosen.reason is IntervalReason.FAILURES:
        return lost <= (1 + CLOSE) * best
    return lost - best <= budget


def lost_of(failures: Failures, job: Job, every_steps: int) -> float:
    return sum(lost_s(up_s, job, every_steps) for up_s in failures.uptimes_s()) / failures.length_s


def lost_while_learning(failures: Failures, job: Job, inputs: IntervalInputs) -> float:
    """The interval follows what the run has seen by then; each replay is a run of its own."""
    seen, current, sum_s = FailureHistory(), None, 0.0
    for up_s in failures.uptimes_s():
        if seen.num_faults >= len(failures.times_s) / failures.num_replays:
            seen, current = FailureHistory(), None
        current = choose_interval(replace(inputs, failures=seen), current).every_steps
        sum_s += lost_s(up_s, job, current)
        seen = seen.plus(1, max(0.0, up_s - job.restart_s))
    return sum_s / failures.length_s


def lost_s(up_s: float, job: Job, every_steps: int) -> float:
    """Seconds, of one stretch without a failure, that the next one (at its end) or stalls take away.

    The restart comes first. Then a snapshot begins after every `every_steps` steps and stalls; the newest that is safe
    at the end is where the run goes on.
    """
    trained_s = up_s - min(job.restart_s, up_s)
    cycle_s = every_steps * job.step_s + job.stall_s
    # Snapshot j begins at j cycles less its own stall.
    num_safe = max(0, int((trained_s - max(job.seal_s, job.stall_s) + job.stall_s) // cycle_s))
    return trained_s - num_safe * every_steps * job.step_s


def poisson(mean_s: float, seed: int) -> Failures:
    rng = random.Random(seed)
    times_s, now_s = [], 0.0
    for _ in range(NUM_POISSON_FAILURES):
        now_s += rng.expovariate(1 / mean_s)
        times_s.append(now_s)
    return Failures("Poisson", tuple(times_s), now_s)


def real_traces(folder: Path | None) -> Iterator[Failures]:
    paths = sorted(folder.glob("*.[ct][sx][vt]")) if folder is not None else []
    if not paths:
        print("no traces of real machines: left out (--traces FOLDER)")
    for path in paths:
        yield (_read_csv(path) if path.suffix == ".csv" else _read_samples(path)).replayed()


def _read_csv(path: Path) -> Failures:
    alive: set[str] = set()
    most, taken_at_s, at_s = 1, set(), 0.0
    with path.open() as stream:
        for at_ms, what, node, *_ in csv.reader(stream):
            at_s = int(at_ms) / 1000
            if what == "add":
                alive.add(node)
            else:
                alive.discard(node)
                taken_at_s.add(at_s)
            most = max(most, len(alive))
    return Failures(path.stem, tuple(sorted(taken_at_s)), at_s, num_nodes=most)


def _read_samples(path: Path) -> Failures:
    """Machines alive at a time; lines may be out of order, and several may tell of the same moment."""
    samples: list[tuple[float, int]] = []
    with path.open() as stream:
        for day, time, num_alive in csv.reader(stream, skipinitialspace=True):
            at = datetime.strptime(f"{day} {time}", "%Y-%m-%d %H:%M:%S")
            bisect.insort(samples, (at.timestamp(), int(num_alive)))
    begin_s = samples[0][0]
    fewer = {later[0] - begin_s for before, later in itertools.pairwise(samples) if later[1] < before[1]}
    return Failures(path.stem, tuple(sorted(fewer)), samples[-1][0] - begin_s, num_nodes=max(n for _, n in samples))


def _grid() -> Iterator[int]:
    """1 to some 20 000 in steps of at most a twelfth."""
    every = 1
    while every < 20_000:
        yield every
        every = max(every + 1, round(every * 1.08))


def _about(job: Job) -> str:
    return f"steps of {job.step_s:g} s, stall {job.stall_s * 1000:g} ms, safe after {job.seal_s:g} s"


if __name__ == "__main__":
    sys.exit(main())
