"""How long `ftlaunch --help` takes: median, fastest and slowest of ten runs, after one to warm up.

Not a test, because a busy machine would fail it; tests check instead that nothing heavy is imported.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time

NUM_RUNS = 10
BOUND_S = 0.15


def one_run_s() -> float:
    began = time.perf_counter()
    subprocess.run([sys.executable, "-m", "launcher", "--help"], stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - began


def main() -> int:
    one_run_s()
    runs = sorted(one_run_s() for _ in range(NUM_RUNS))
    median_s = statistics.median(runs)
    spread = f"{runs[0]:.3f} to {runs[-1]:.3f} s"
    print(f"ftlaunch --help: median {median_s:.3f} s of {NUM_RUNS} runs ({spread}), bound {BOUND_S} s")
    return 0 if median_s <= BOUND_S else 1


if __name__ == "__main__":
    raise SystemExit(main())
