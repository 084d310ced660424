"""ftlaunch and its peers on the same job of this machine, in turn: `make bench`, or

    python -m scripts.bench_peers                                # every case, three times
    python -m scripts.bench_peers --cases kill,node --peers torchrun --repeats 1
    python -m scripts.bench_peers --show                         # run nothing: table and page from what is kept

Values are kept in `.bench/results.json`: the cases and launchers that are run anew take the place of their old values.
Then the table is printed, and docs/benchmarks.md and docs/benchmarks.svg are written from all that is kept. Exit code 1
where a target is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from datetime import datetime, timezone

from scripts.bench_peers.cases import CASES, QUICK, WARM_UP, Case, measure, why_not
from scripts.bench_peers.chart import svg
from scripts.bench_peers.job_files import BENCH, ROOT, prepare_files
from scripts.bench_peers.launchers import LAUNCHERS, NOTES, Launcher, prepare
from scripts.bench_peers.machine import describe
from scripts.bench_peers.page import page
from scripts.bench_peers.running import NotMeasuredError
from scripts.bench_peers.table import OURS, Figures, Results, is_missed, rows, text_table

RESULTS = BENCH / "results.json"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m scripts.bench_peers", description="ftlaunch against its peers")
    parser.add_argument("--cases", default=",".join(CASES), help=f"of {', '.join(CASES)} (default: all)")
    parser.add_argument("--peers", default=",".join(LAUNCHERS), help=f"of {', '.join(LAUNCHERS)} (default: all)")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each (default 3)")
    parser.add_argument("--quick", action="store_true", help=f"once, and only {', '.join(QUICK)}")
    parser.add_argument("--show", action="store_true", help="run nothing: table and page from what is kept")
    options = parser.parse_args()
    cases = QUICK if options.quick else _chosen(parser, options.cases, list(CASES))
    names = _chosen(parser, options.peers, list(LAUNCHERS))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the started runs are ended then, too
    BENCH.mkdir(exist_ok=True)
    results = _kept()
    if not options.show:
        prepare_files()
        ready = _ready(results, [LAUNCHERS[name] for name in names])
        for case in cases:
            _run(results, CASES[case], ready, 1 if options.quick else options.repeats)
    found = rows(results)
    print(text_table(found))
    (ROOT / "docs/benchmarks.md").write_text(page(results, NOTES), "utf-8")
    (ROOT / "docs/benchmarks.svg").write_text(svg(found), "utf-8")
    return 1 if any(is_missed(row) for row in found) else 0


def _chosen(parser: argparse.ArgumentParser, given: str, known: Sequence[str]) -> Sequence[str]:
    names = [name for name in given.split(",") if name]
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        parser.error(f"unknown: {', '.join(unknown) or repr(given)}; there are {', '.join(known)}")
    return names


def _ready(results: Results, launchers: Sequence[Launcher]) -> list[Launcher]:
    """Those that this machine can run, installed."""
    results["machine"] = describe()
    ready = []
    for launcher in launchers:
        reason = launcher.why_not() or prepare(launcher) or _warm_up(results, launcher)
        if reason is None:
            results["skipped"].pop(launcher.name, None)
            ready.append(launcher)
        else:
            print(f"{launcher.name}: skipped: {reason}", file=sys.stderr)
            results["skipped"][launcher.name] = reason
        _keep(results)
    return ready


def _warm_up(results: Results, launcher: Launcher) -> str | None:
    """The first run of a version does not count."""
    version = launcher.version()
    if results["versions"].get(launcher.name) == version:
        return None
    print(f"{launcher.name} {version}: a run that does not count", file=sys.stderr)
    try:
        measure(WARM_UP, launcher)
    except NotMeasuredError as error:
        return f"does not start: {error}"
    results["versions"][launcher.name] = version
    return None


def _run(results: Results, case: Case, launchers: Sequence[Launcher], repeats: int) -> None:
    """Round by round, so that a change of the machine's speed meets all launchers alike."""
    kept = results["cases"].setdefault(case.name, {})
    for number in range(1, repeats + 1):
        for launcher in launchers:
            if number == 1:
                kept[launcher.name] = []
            elif case.once_for_peers and launcher.name != OURS:
                continue
            began = time.monotonic()
            figures = _figures(case, launcher)
            figures["at"] = datetime.now(timezone.utc).isoformat(timespec="minutes")
            kept[launcher.name].append(figures)
            took_s = time.monotonic() - began
            print(f"{case.name} {number}/{repeats} {launcher.name} ({took_s:.0f} s): {figures}", file=sys.stderr)
            _keep(results)


def _figures(case: Case, launcher: Launcher) -> Figures:
    if (reason := why_not(case, launcher)) is not None:
        return {"why_not": reason}
    try:
        return measure(case, launcher)
    except NotMeasuredError as error:
        return {"why_not": str(error)}


def _kept() -> Results:
    if not RESULTS.is_file():
        return {"machine": {}, "versions": {}, "skipped": {}, "cases": {}}
    kept: Results = json.loads(RESULTS.read_text("utf-8"))
    return kept


def _keep(results: Results) -> None:
    part = RESULTS.with_suffix(".part")
    part.write_text(json.dumps(results, indent=1), "utf-8")
    os.replace(part, RESULTS)


if __name__ == "__main__":
    sys.exit(main())
