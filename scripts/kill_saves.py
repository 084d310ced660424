"""Kill the code that saves, prunes and resumes, with SIGKILL, ten thousand times, and look each time at what is left.

    python scripts/kill_saves.py                     # some minutes
    python scripts/kill_saves.py --kills 500
    python scripts/kill_saves.py --again 1234        # the one history that broke a promise

How, and what must hold: tests/fault/killed_saves.py. Exit status 1 when something torn was taken or something whole
was lost; the folder is kept then, and the seed is shown. No training takes place: scripts/kill_training.py does that.
"""

from __future__ import annotations

import argparse
import secrets
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # the scripts belong to this checkout, installed or not

from tests.fault.killed_saves import KILLS_PER_HISTORY, Broken, Tally, run_histories  # noqa: E402
from tests.fault.save_script import Phase  # noqa: E402
from tests.fault.traced import why_no_tracing  # noqa: E402

_IN_MEMORY = Path("/dev/shm")
_ON_DISK_ONE_IN = 8  # fsync costs nothing in memory, so most histories are there
_PROGRESS_EVERY_S = 5.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=10_000, help="how many (default 10,000)")
    parser.add_argument("--seed", type=int, default=secrets.randbelow(10**9), help="of the first history")
    parser.add_argument("--again", type=int, metavar="SEED", help="only the history of this seed")
    parser.add_argument("--workers", type=int, default=None, help="how many histories at a time (default: one a CPU)")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="where, on a disk")
    options = parser.parse_args()
    reason = why_no_tracing()
    if reason is not None:
        print(f"nothing was killed: {reason}", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the folders go on that way, too
    on_disk = Path(tempfile.mkdtemp(prefix="kill-saves-", dir=options.folder))
    in_memory = Path(tempfile.mkdtemp(prefix="kill-saves-", dir=_IN_MEMORY if _IN_MEMORY.is_dir() else options.folder))
    seed, num_kills = options.seed, options.kills
    if options.again is not None:
        seed, num_kills = options.again, KILLS_PER_HISTORY
    broken = None
    try:
        broken = kill(num_kills, [*[in_memory] * (_ON_DISK_ONE_IN - 1), on_disk], seed, options.workers)
    finally:
        for folder in (on_disk, in_memory):
            if broken is None or not broken.folder.is_relative_to(folder):
                shutil.rmtree(folder, ignore_errors=True)
    if broken is not None:
        print(
            f"\nA promise was broken.\n{broken.message}\n\nWhat is left lies in {broken.folder}\n"
            f"Once more: python scripts/kill_saves.py --again {broken.seed}",
            file=sys.stderr,
        )
    return 0 if broken is None else 1


def kill(num_kills: int, folders: Sequence[Path], seed: int, num_workers: int | None) -> Broken | None:
    print(f"seed {seed}; in {' and '.join(str(folder) for folder in dict.fromkeys(folders))}", flush=True)
    tally, began_at, shown_at = Tally(), time.monotonic(), time.monotonic()
    broken = None
    for result in run_histories(num_kills, folders, seed=seed, num_workers=num_workers):
        if isinstance(result, Broken):
            broken = result
            break
        tally.merge(result)
        if time.monotonic() - shown_at > _PROGRESS_EVERY_S:
            shown_at = time.monotonic()
            print(f"{tally.num_kills:,} kills, {tally.num_kills / (shown_at - began_at):.0f} a second", flush=True)
    show(tally, time.monotonic() - began_at)
    return broken


def show(tally: Tally, elapsed_s: float) -> None:
    print(f"\n{'killed in':28}{'kills':>8}{'system calls':>14}{'points':>8}")
    for phase in Phase:
        names, points = tally.names.get(phase, set()), tally.points.get(phase, set())
        print(f"{phase.value:28}{tally.kills[phase]:>8,}{len(names):>14}{len(points):>8,}")
    every: Callable[[dict[Phase, set[str]]], int] = lambda sets: len(set().union(*sets.values()))  # noqa: E731
    print(f"{'all':28}{tally.num_kills:>8,}{every(tally.names):>14}{every(tally.points):>8,}")
    print("(points: system call, before or after it, and the file; the same for all saves)\n")
    for fashion, number in tally.fashions.most_common():
        print(f"{number:>8,} {fashion.value}")
    print(
        f"\n{tally.num_kills:,} kills in {tally.num_histories:,} histories, {tally.num_recoveries:,} resumes, "
        f"{elapsed_s:.0f} s ({tally.num_kills / elapsed_s:.0f} kills a second)"
    )


if __name__ == "__main__":
    sys.exit(main())
