"""`ftlaunch diagnose PATH...`: cause, proof and remedy from logs, a run folder, an incident bundle or an archive."""

from __future__ import annotations

import argparse
import json
import sys
import time

from launcher.diagnose.bundle import screen
from launcher.diagnose.sources import read_sources
from launcher.diagnose.verdict import diagnose
from launcher.errors import UserError

_PROGRESS_EVERY_S = 2.0


def main(options: argparse.Namespace) -> int:
    if not options.paths:
        raise UserError("diagnose: give at least one path: a log, an output_dir, an incident folder or an archive")
    progress = _Progress()
    sources = read_sources(options.paths, progress.read)
    progress.end()
    for what in sources.left_out:
        print(f"left out: {what}", file=sys.stderr)
    verdict = diagnose(sources.ranks, sources.nodes)
    if options.json:
        print(json.dumps(verdict.to_json(), ensure_ascii=False, indent=2))
    else:
        print(screen(verdict, decision=""), end="")
    return 0


class _Progress:
    """A line on standard error while large logs are read: redrawn on a terminal, a new one each time elsewhere."""

    def __init__(self) -> None:
        self._began_at = self._shown_at = time.monotonic()
        self._num_bytes = 0
        self._drawn = False

    def read(self, name: str, num_bytes: int, size: int | None) -> None:
        self._num_bytes += num_bytes
        now = time.monotonic()
        if now - self._shown_at < _PROGRESS_EVERY_S:
            return
        self._shown_at = now
        per_second = self._num_bytes / (now - self._began_at) / 1e6
        of = f", this log has {size / 1e6:,.0f} MB" if size else ""
        line = f"reading {name}: {self._num_bytes / 1e6:,.0f} MB so far{of} ({per_second:.0f} MB/s)"
        terminal = sys.stderr.isatty()
        print(f"\r\x1b[K{line}" if terminal else line, end="" if terminal else "\n", file=sys.stderr, flush=True)
        self._drawn = terminal

    def end(self) -> None:
        if self._drawn:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
