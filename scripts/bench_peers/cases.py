"""The cases: what is done to a run, and which figures come of it. Seconds, unless the figure's name says otherwise."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import signal
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.host.compute import read_cpu
from scripts.bench_peers.job_files import BENCH, Job
from scripts.bench_peers.launchers import Launcher
from scripts.bench_peers.phases import phases_after
from scripts.bench_peers.running import NotMeasuredError, Run, Step
from scripts.bench_peers.table import Figures

if TYPE_CHECKING:
    from tests.cluster.cluster import TestCluster

FAULT_STEP = 8
FAULT_RANK = 1
HANG_BOUND_S = 60.0
_NUM_STEPS = 14
_ENDLESS = 1000
_RESTART_BOUND_S = 120.0
_STOP_BOUND_S = 60.0
_LOOP_BOUND_S = 240.0


@dataclass(frozen=True)
class Case:
    name: str
    job: Job
    measure: Callable[[Run], Figures]
    once_for_peers: bool = False  # what does not happen within the bound is not waited for again


# -- starts ------------------------------------------------------------------------------------------------------------


def _fresh(run: Run) -> Figures:
    return {"first_step_s": run.until_step(1).at - run.started_at, **_phases(run, run.started_at)}


def _fresh_and_memory(run: Run) -> Figures:
    figures = _fresh(run)
    run.until_step(FAULT_STEP)  # by then everything that stands by is ready
    sizes = run.supervisor_mb()
    figures["memory_mb"] = sum(proportional for _, _, proportional in sizes)
    figures["memory_parts"] = "; ".join(f"{name}: {resident:.0f}, {own:.0f}" for name, resident, own in sizes)
    figures["agent_mb"] = run.resident_mb(run.agents[0].pid)
    return figures


# -- ranks and nodes that end ------------------------------------------------------------------------------------------


def _rank_killed(run: Run) -> Figures:
    return _after(run, _signal_rank(run, signal.SIGKILL))


def _node_killed(run: Run) -> Figures:
    """The second node, so that the peers' rendezvous stays."""
    assert run.cluster is not None
    run.until(lambda: len(run.rank_pids()) == 2 and _has_reached(run, FAULT_STEP), "both nodes train together", 150)
    killed_at = time.time()
    run.cluster.nodes[1].kill_all()
    return _after(run, killed_at)


def _has_reached(run: Run, number: int) -> bool:
    return any(step.number >= number for step in run.steps())


def _after(run: Run, fault_at: float) -> Figures:
    """The first step that is made again after a fault, and the first one that had not been made before."""
    before = [step for step in run.steps() if step.at <= fault_at]
    best, attempt = max(step.number for step in before), before[-1].attempt

    def later() -> list[Step]:
        return [step for step in run.steps() if step.at > fault_at and step.attempt != attempt]

    run.until(lambda: any(step.number > best for step in later()), "a new step", _RESTART_BOUND_S)
    first = later()[0]
    new = next(step for step in later() if step.number > best)
    return {
        "first_step_s": first.at - fault_at,
        "new_step_s": new.at - fault_at,
        "redone_steps": float(best + 1 - first.number),
        **_phases(run, fault_at),
    }


def _phases(run: Run, since: float) -> Figures:
    return {"phases": phases_after(run, since)} if run.launcher.is_ftlaunch else {}


# -- ranks that hang ---------------------------------------------------------------------------------------------------


def _rank_stopped(run: Run) -> Figures:
    return _found(run, _signal_rank(run, signal.SIGSTOP))


def _rank_loops(run: Run) -> Figures:
    return _found(run, _order(run, "loop"))


def _rank_stays_away(run: Run) -> Figures:
    return _found(run, _order(run, "wait"))


def _order(run: Run, how: str) -> float:
    """user_model.py obeys in its next forward pass; the time at which it does."""
    run.until_step(FAULT_STEP)
    part = run.job.fault_order.with_suffix(".part")
    part.write_text(json.dumps({"rank": FAULT_RANK, "how": how}), "utf-8")
    part.rename(run.job.fault_order)
    begun = run.job.fault_order.with_name(run.job.fault_order.name + ".begun")
    run.until(lambda: begun.is_file() and begun.read_text("utf-8") != "", "the rank hangs", 60)
    return float(json.loads(begun.read_text("utf-8")))


def _found(run: Run, hung_at: float) -> Figures:
    """ftlaunch says so itself. A peer has found it once it starts the ranks anew or gives up."""
    num_attempts = len(run.attempts())
    steps = [step.at for step in run.steps()]
    step_s = statistics.median(later - earlier for earlier, later in itertools.pairwise(steps))
    figures: Figures = {"found_s": None, "named": None, "step_s": step_s}

    def found_at() -> float | None:
        if run.launcher.is_ftlaunch:
            incidents = run.events("incident")
            return float(incidents[0]["at"]) if incidents else None
        is_found = len(run.attempts()) > num_attempts or any(agent.poll() is not None for agent in run.agents)
        return time.time() if is_found else None

    with contextlib.suppress(NotMeasuredError):
        run.until(lambda: found_at() is not None, "the hang is found", HANG_BOUND_S)
    if (at := found_at()) is not None:
        figures["found_s"] = at - hung_at
        if run.launcher.is_ftlaunch:
            rank = run.events("incident")[0]["culprit_rank"]
            figures["named"] = "nobody" if rank is None else f"rank {rank}"
            if rank == FAULT_RANK:
                figures["spare_s"] = 3 + 2 * step_s - (at - hung_at)
    return figures


# -- ends of the run ---------------------------------------------------------------------------------------------------


def _asked_to_stop(run: Run) -> Figures:
    """SIGTERM to the launcher, until the last process is gone; steps that no checkpoint on disk has are lost."""
    run.until_step(FAULT_STEP)
    asked_at = time.time()
    for agent in run.agents:
        agent.send_signal(signal.SIGTERM)
    gone_s = None
    while time.time() < asked_at + _STOP_BOUND_S:
        if run.is_over():
            gone_s = time.time() - asked_at
            break
        time.sleep(0.05)
    code = run.agents[0].poll()
    lost = float(run.steps()[-1].number - run.saved_step())
    return {"gone_s": gone_s, "lost_steps": lost, "exit_code": None if code is None else str(code)}


def _crash_loop(run: Run) -> Figures:
    """Restarts after which the same record raises the same KeyError; until the launcher gives up."""
    deadline = time.time() + _LOOP_BOUND_S
    while not run.is_over() and time.time() < deadline:
        time.sleep(0.1)
    ended_s = time.time() - run.started_at if run.is_over() else None
    if "KeyError" not in run.all_logs():
        raise NotMeasuredError("ended without the KeyError that it was to be hurt by")
    return {"restarts": float(len(run.attempts()) - 1), "ended_s": ended_s}


def _signal_rank(run: Run, number: signal.Signals) -> float:
    """Sent when the fault's step has ended; the time of it."""
    run.until_step(FAULT_STEP)
    run.until(lambda: FAULT_RANK in run.rank_pids(), f"rank {FAULT_RANK} is there", 10)
    pid = run.rank_pids()[FAULT_RANK]
    at = time.time()
    os.kill(pid, number)
    return at


# ----------------------------------------------------------------------------------------------------------------------

_JOB = Job(Path(), _NUM_STEPS)
_LONG = replace(_JOB, num_steps=_ENDLESS)
_USER = replace(_LONG, has_user_code=True)
CASES = {
    case.name: case
    for case in (
        Case("fresh2", _JOB, _fresh_and_memory),
        Case("fresh8", replace(_JOB, num_ranks=8, num_steps=3), _fresh),
        Case("kill", _LONG, _rank_killed),
        Case("hang-sigstop", _LONG, _rank_stopped, once_for_peers=True),
        Case("hang-loop", _USER, _rank_loops, once_for_peers=True),
        Case("hang-collective", _USER, _rank_stays_away, once_for_peers=True),
        Case("node", replace(_LONG, num_ranks=1, num_nodes=2), _node_killed),
        Case("sigterm", replace(_LONG, saves_at_sigterm=True), _asked_to_stop),
        Case("crashloop", replace(_USER, has_bad_records=True), _crash_loop),
    )
}
WARM_UP = Case("warm-up", replace(_JOB, num_steps=2), _fresh)  # DeepSpeed's CPU operator is compiled, files are cached
QUICK = ("fresh2", "kill", "hang-sigstop", "sigterm")


def why_not(case: Case, launcher: Launcher) -> str | None:
    if (reason := launcher.why_not()) is not None:
        return reason
    if case.job.num_nodes == 1:
        return None
    if not launcher.is_elastic:
        return "cannot go on with fewer nodes"
    from tests.cluster.cluster import why_no_cluster

    return why_no_cluster(ssh=False)


def measure(case: Case, launcher: Launcher) -> Figures:
    """One run. Its folder is kept until the next one of its kind. NotMeasuredError: there are no figures."""
    folder = BENCH / "runs" / f"{case.name}-{launcher.name}"
    shutil.rmtree(folder, ignore_errors=True)
    job = replace(case.job, folder=folder, bf16=read_cpu().flags_bf16)
    with _nodes(case) as cluster, Run(launcher, job, cluster) as run:
        return case.measure(run)


@contextlib.contextmanager
def _nodes(case: Case) -> Iterator[TestCluster | None]:
    if case.job.num_nodes == 1:
        yield None
        return
    from tests.cluster.cluster import TestCluster
    from tests.cluster.node import ClusterError

    try:
        with TestCluster(case.job.num_nodes, ssh=False) as cluster:
            yield cluster
    except ClusterError as error:
        raise NotMeasuredError(f"the nodes failed: {error}") from error
