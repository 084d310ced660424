"""How fast `ftlaunch diagnose` reads a large log, and in how much memory.

    python scripts/bench_diagnose.py [--megabytes 1000] [--folder /tmp]

The log is made in a temporary folder: eight ranks' steps, data loading and NCCL's lines on one console, an error of
rank 5 at two thirds, and then what its peers print. Generated text can be added (`--text`): lines that never repeat are
the worst that can come.
"""

import argparse
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
_BLOCK_STEPS = 20_000
_ERROR_AT = 2 / 3


def main() -> int:
    parser = argparse.ArgumentParser(description="measure `ftlaunch diagnose` on a large log")
    parser.add_argument("--megabytes", type=int, default=1000)
    parser.add_argument("--text", action="store_true", help="one line in five is text that never repeats")
    parser.add_argument("--folder", type=Path, default=None, help="where to make the log (default: the system's)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        log = Path(folder, "job.log")
        _write(log, options.megabytes * 10**6, text=options.text)
        subprocess.run(["cat", log], stdout=subprocess.DEVNULL, check=True)  # into the page cache: no disk is measured
        began_at = time.monotonic()
        command = [sys.executable, "-m", "launcher", "diagnose", str(log)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        took_s = time.monotonic() - began_at
        megabytes = log.stat().st_size / 1e6
        peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
        print(done.stdout)
        print(f"{megabytes:.0f} MB in {took_s:.1f} s: {megabytes / took_s:.0f} MB/s, at most {peak:.0f} MiB of memory")
    return 0


def _write(log: Path, num_bytes: int, *, text: bool) -> None:
    rng = random.Random(1)
    words = ["".join(rng.choices("etaoinshrdlucmfw", k=rng.randint(2, 9))) for _ in range(20_000)]
    with log.open("w") as out:
        step = 0
        failed = False
        while out.tell() < num_bytes:
            out.write("".join(_steps(rng, step, words if text else None)))
            step += _BLOCK_STEPS
            if not failed and out.tell() > _ERROR_AT * num_bytes:
                failed = True
                out.write(
                    '[rank5]: Traceback (most recent call last):\n[rank5]:   File "/opt/app/train.py", line 9, in f\n'
                )
                out.write("[rank5]: KeyError: 'answer'\n")
            if failed:
                break
        number = 0
        while out.tell() < num_bytes:
            number += 1
            out.write("".join(_victims(number)))


def _steps(rng: random.Random, first: int, words: list[str] | None) -> Iterator[str]:
    for i in range(first, first + _BLOCK_STEPS):
        yield (
            f"[rank{i % 8}]: {{'loss': {rng.random() * 3:.4f}, 'grad_norm': {rng.random():.6f}, "
            f"'learning_rate': {rng.random() * 1e-4:.8g}, 'epoch': {i / 1000:.2f}}}\n"
        )
        if i % 10 == 0:
            yield f"n{i % 4}:12:57 [{i % 8}] NCCL INFO Channel {i % 32}/0 : {i % 8}[0] -> {i % 7}[0] via P2P/CUMEM\n"
        if i % 5 == 0:
            yield f"2026-11-30 10:{i // 60 % 60:02d}:{i % 60:02d},123 - INFO - data.loader - shard {i} of 4096 read\n"
        if words and i % 4 == 0:
            yield " ".join(rng.choices(words, k=20)) + "\n"


def _victims(number: int) -> Iterator[str]:
    for rank in (0, 1, 2, 3, 4, 6, 7):
        yield (
            f"[rank{rank}]:[E1130 10:10:{number % 60:02d}.{number:09d} ProcessGroupNCCL.cpp:632] [Rank {rank}] "
            f"Watchdog caught collective operation timeout: WorkNCCL(SeqNum={number}, OpType=ALLREDUCE, NumelIn=1, "
            "NumelOut=1, Timeout(ms)=600000) ran for 600001 milliseconds before timing out.\n"
        )


if __name__ == "__main__":
    sys.exit(main())
