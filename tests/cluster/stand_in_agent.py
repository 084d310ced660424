"""A stand-in for the agent of a node: as it is started and stopped, without the training.

It reads the order as the agent does and writes FOLDER/NAME.json (FOLDER: the run's output folder). It ends with N when
FOLDER/NAME.end holds N (negative: by a signal), with 138 half a second after a stop signal, with 130 at a second one.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from launcher.event_loop import StopSignals
from launcher.fanout.order import STDIN, read_order
from launcher.fanout.packed_job import unpack_job
from launcher.platforms.told import told_place


def main() -> int:
    with StopSignals() as signals:
        order = read_order(sys.argv[1].partition("=")[2] or STDIN)
        order.enter(os.environ)
        place, job = told_place(os.environ), unpack_job(order.job)
        assert place is not None
        folder, name = Path(job.config.output_dir), f"n{place.node_rank}"
        facts = {
            "pid": os.getpid(),
            "argv": Path("/proc/self/cmdline").read_text().split("\0"),
            "folder": os.getcwd(),
            "environ": dict(os.environ),
            "hosts": place.hosts,
            "sha": job.sha,
            "nohup": signal.getsignal(signal.SIGHUP) is signal.SIG_IGN,
        }
        (folder / f"{name}.json.new").write_text(json.dumps(facts))
        (folder / f"{name}.json.new").rename(folder / f"{name}.json")
        print(f"agent of {name} is here", file=sys.stderr, flush=True)
        return obey(folder / f"{name}.end", folder / f"{name}.say", signals)


def obey(end: Path, say: Path, signals: StopSignals, tick: Callable[[], None] = lambda: None) -> int:
    stops_at_s, said = None, 0
    while True:
        tick()
        for number in signals.take():
            print(f"got {signal.Signals(number).name}", file=sys.stderr, flush=True)
            if stops_at_s is not None:
                return 130
            stops_at_s = time.monotonic() + 0.5
        if stops_at_s is not None and time.monotonic() > stops_at_s:
            return 138
        if say.exists():
            for line in say.read_text().splitlines()[said:]:
                said += 1
                print(line, file=sys.stderr, flush=True)
        if end.exists():
            code = int(end.read_text() or 0)
            end.unlink()
            if code < 0:
                os.kill(os.getpid(), -code)
            return code
        time.sleep(0.02)


if __name__ == "__main__":
    try:
        ended = main()
    except BrokenPipeError:
        ended = 99  # the real agent's console bears this
    os._exit(ended)
