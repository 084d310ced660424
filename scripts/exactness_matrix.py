"""The whole exactness matrix: every method, ZeRO stage and accumulation, each killed four times and compared, bit for
bit, with the same run undisturbed.

`python scripts/exactness_matrix.py [NAME ...]`: all combinations, or those whose name holds one of NAME. Needs the
training stack; about half a minute for each on two cores. Exit code 1 when one is not exact.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.fault.exactness import ALL, Combination, run_pair  # noqa: E402

_SHOWN = 5  # differences of a combination that are printed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0] if __doc__ else None)
    parser.add_argument("names", nargs="*", metavar="NAME", help="parts of names, such as lora-zero2")
    names = parser.parse_args().names
    chosen = [one for one in ALL if not names or any(name in one.name for name in names)]
    rows: list[str] = []
    num_failed = 0
    with tempfile.TemporaryDirectory(prefix="exactness-") as name:
        folder = Path(name)
        subprocess.run([sys.executable, str(ROOT / "tests/fault/tiny_model.py"), str(folder / "tiny")], check=True)
        for number, combination in enumerate(chosen, start=1):
            row, exact = _row(combination, folder)
            num_failed += not exact
            rows.append(row)
            print(f"[{number}/{len(chosen)}] {row}", flush=True)
    print("\n| combination | precision | killed | checkpoints | tensors | result | seconds |")
    print("|---|---|---|---|---|---|---|")
    print("\n".join(rows))
    print(f"\n{len(chosen) - num_failed} of {len(chosen)} combinations are exact")
    return 1 if num_failed else 0


def _row(combination: Combination, folder: Path) -> tuple[str, bool]:
    started = time.monotonic()
    places = ", ".join(
        f"{kill.get('at', 'step_end')} {kill['step']}" + (f".{kill['batch']}" if "batch" in kill else "")
        for kill in combination.kills()
    )
    try:
        verdict = run_pair(combination, folder / "tiny", folder / combination.name)
    except AssertionError as error:
        print(f"{combination.name}: {error}", file=sys.stderr)
        return f"| {combination.name} | {combination.precision} | {places} | | | did not end well | |", False
    seconds = time.monotonic() - started
    for difference in verdict.differences[:_SHOWN]:
        print(f"{combination.name}: {difference}", file=sys.stderr)
    result = f"{len(verdict.differences)} differences" if verdict.differences else "exact"
    counts = f"{verdict.num_checkpoints} | {verdict.num_tensors} | {result} | {seconds:.0f}"
    return f"| {combination.name} | {combination.precision} | {places} | {counts} |", not verdict.differences


if __name__ == "__main__":
    sys.exit(main())
