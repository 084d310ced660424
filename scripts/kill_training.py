"""Kill the processes of a real training with SIGKILL, a hundred times, and compare its end with an undisturbed run's.

    python scripts/kill_training.py                  # some minutes; needs the training stack, no GPU
    python scripts/kill_training.py --kills 10

Two ranks train a tiny model (tests/fault/tiny_model.py). Exit status 1 when weights, optimizer, random states or
samples are not those of the undisturbed run, or something on the way was wrong; the folders are kept then.
"""

from __future__ import annotations

import argparse
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # the scripts belong to this checkout, installed or not

from tests.fault.harness import Job, base_config, merged  # noqa: E402
from tests.fault.killed_training import (  # noqa: E402
    KilledTraining,
    Moment,
    Victim,
    changes_for,
    planned_steps,
    require_nothing_lost,
    require_the_same,
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=100, help="how many (default 100)")
    parser.add_argument("--seed", type=int, default=secrets.randbelow(10**9), help="of victims and moments")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="kill-training-"))
    steps = planned_steps(options.kills)
    print(f"seed {options.seed}; {steps} steps; in {folder}", flush=True)
    subprocess.run([sys.executable, str(ROOT / "tests/fault/tiny_model.py"), str(folder)], check=True)
    jobs = [
        Job(folder / name, merged(base_config(folder, folder / name / "out"), changes_for(options.kills)))
        for name in ("undisturbed", "killed")
    ]
    began_at = time.monotonic()
    run = jobs[0].run(timeout_s=3600)
    if run.process.returncode != 0:
        print(f"the undisturbed run failed\n{run.log}", file=sys.stderr)
        return 1
    print(f"undisturbed: {time.monotonic() - began_at:.0f} s", flush=True)
    began_at = time.monotonic()
    training = KilledTraining(jobs[1], options.kills, options.seed, lambda line: print(line, flush=True))
    try:
        training.run()
        require_nothing_lost(jobs[1])
        require_the_same(jobs[1], jobs[0], steps)
    except AssertionError as error:
        print(f"\nbroken: {error}\nWhat is left lies in {folder}", file=sys.stderr)
        return 1
    show(training.kills, jobs[1], time.monotonic() - began_at)
    shutil.rmtree(folder)
    return 0


def show(kills: Counter[tuple[Victim, Moment]], job: Job, elapsed_s: float) -> None:
    print(f"\n{'killed':18}" + "".join(f"{moment.value:>18}" for moment in Moment) + f"{'all':>8}")
    for victim in Victim:
        numbers = [kills[victim, moment] for moment in Moment]
        print(f"{victim.value:18}" + "".join(f"{number:>18}" for number in numbers) + f"{sum(numbers):>8}")
    print(
        f"\n{kills.total()} kills, {len(job.events('generation_started'))} attempts, "
        f"{len(job.events('checkpoint_saved'))} checkpoints, {len(job.events('resumed'))} resumes, {elapsed_s:.0f} s. "
        "Weights, optimizer, random states and samples are those of the undisturbed run, bit for bit."
    )


if __name__ == "__main__":
    sys.exit(main())
