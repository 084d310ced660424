"""Kill a rank again and again, and look whether anything grows: memory, descriptors, zombies, ports, files.

    python scripts/many_restarts.py                   # 200 restarts of a tiny model; some minutes, no GPU

Exit status 1 when something is more in the end than after the first tenth.
"""

from __future__ import annotations

import argparse
import signal
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # the scripts belong to this checkout, installed or not

from tests.fault.harness import Job, base_config, merged  # noqa: E402
from tests.fault.restarts import Held, growth, restarts  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--restarts", type=int, default=200, help="how many (default 200)")
    parser.add_argument("--seed", type=int, default=0, help="of the ranks that are killed")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="many-restarts-") as name:
        folder = Path(name)
        subprocess.run([sys.executable, str(ROOT / "tests/fault/tiny_model.py"), str(folder)], check=True)
        changes = {
            "training": {"max_steps": 10**7, "logging_steps": 1000},
            "checkpoint": {"every_steps": 1000, "keep": 1},
        }
        job = Job(folder, merged(base_config(folder, folder / "out"), changes))
        with job.start() as run:
            run.until_step(3)
            held = []
            for number, now in enumerate(restarts(run, options.restarts, options.seed), start=1):
                held.append(now)
                if number == 1 or number % max(1, options.restarts // 10) == 0:
                    print(f"{number:5}  {shown(now)}", flush=True)
            run.signal(signal.SIGTERM)
            code = run.wait(60)
            left = run.left_after(15)
        seconds = [event["seconds"] for event in job.events("first_step")][1:]
    print(f"restart to its first step: median {statistics.median(seconds):.2f} s, longest {max(seconds):.2f} s")
    grown = growth(held[len(held) // 10], held[-1])
    for line in [*grown, *left]:
        print(f"left or grown: {line}")
    print(f"{len(held)} restarts, exit code {code}: {'something grows' if grown or left else 'nothing grows'}")
    return 1 if grown or left or code != 138 else 0


def shown(held: Held) -> str:
    return ", ".join(
        f"{key} {value:.1f}" if isinstance(value, float) else f"{key} {value}" for key, value in asdict(held).items()
    )


if __name__ == "__main__":
    sys.exit(main())
