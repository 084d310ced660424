"""`ftlaunch --config JOB.YAML` as far as bringing up the nodes goes: real detection, real fan-out, stand-in agents."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

from launcher.agent.console import Console
from launcher.agent.prepare import asked_of
from launcher.config.load import load_job
from launcher.errors import UserError
from launcher.event_loop import StopSignals
from launcher.fanout.head import Head
from launcher.fanout.plan import plan_fan_out
from launcher.platforms.detect import detect_place
from launcher.platforms.outside import real_outside
from launcher.process import become_subreaper
from tests.cluster import stand_in_agent


def main() -> int:
    with StopSignals() as signals:
        console = Console()
        become_subreaper()
        job = load_job(Path(sys.argv[1]), sys.argv[2:], os.environ)
        asked = replace(asked_of(job.config.cluster), hostfile=job.config.cluster.hostfile)
        place = detect_place(os.environ, asked, real_outside())
        fan_out = plan_fan_out(job, place, os.environ)
        assert fan_out is not None
        with Head(replace(fan_out, agent=("-m", stand_in_agent.__name__)), console.say, signals.pending) as head:
            if head.runs_agent:
                head.start()
                folder = Path(job.config.output_dir)
                console.say("own agent runs")
                told: list[str] = []

                def tick() -> None:
                    head.look_after()
                    end = head.final_end()
                    if end is not None and not told:
                        told.append("final end: {} {} {}".format(*end))
                        console.say(told[0])

                code = stand_in_agent.obey(folder / "own.end", folder / "own.say", signals, tick)
            else:
                code = head.follow()
            head.ended(code)
        return code


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UserError as error:
        print(f"ftlaunch: error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
