"""A failed attempt becomes an incident: evidence gathered, cause named, bundle written, one screen shown."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from launcher.agent.console import Console
from launcher.agent.events import EventLog, utc_now
from launcher.agent.forkserver_client import ForkServerError
from launcher.agent.generation import RankProcess
from launcher.agent.hangs import Hang
from launcher.agent.lifecycle import Lifecycle
from launcher.agent.room import make_room
from launcher.agent.sample_hunt import SampleHunt
from launcher.agent.stacks import flight_dumps_beside
from launcher.checkpoint.object_file import read_when_there
from launcher.diagnose.bundle import screen, write_bundle
from launcher.diagnose.evidence import (
    NodeEvidence,
    NumberedLines,
    RankEvidence,
    name_exit,
    read_head,
    read_tail,
    with_last_words,
)
from launcher.diagnose.match import compile_rules
from launcher.diagnose.node_facts import Counters, Unanswered, collect, node_evidence, take_counters
from launcher.diagnose.verdict import Verdict, diagnose
from launcher.errors import ExitCode
from launcher.host.bounded import within
from launcher.policy.restart import ADJUSTED_BY_RESTART, Action, Decision

_READ_WITHIN_S = 5.0  # the logs; with the collectors' bound and the next 20 s in all
_WRITE_WITHIN_S = 8.0
_DISK_FULL = ("no_space", "disk_quota")


@dataclass(frozen=True)
class Incident:
    """`verdict` and `bundle` are None for a wrong input, which is the user's to mend and needs no investigation."""

    fault_class: str
    retryable: bool
    label: str = ""  # for one line: who ended how
    verdict: Verdict | None = None
    bundle: Path | None = None
    input_error_code: int | None = None
    message: str = ""


class IncidentRecorder:
    """Gathers evidence of this node. `attempt_begins` takes the counters' values, so that only what is new counts.

    `alone`: no other node writes into the output folder.
    """

    def __init__(
        self,
        output_dir: Path,
        events: EventLog,
        environ: Mapping[str, str],
        host_facts: Mapping[str, Any],
        *,
        shown: Callable[[Path], Path] = lambda log: log,
        alone: bool = False,
        hunt: SampleHunt | None = None,
    ) -> None:
        """`shown`: where people find a log; `hunt` looks for the sample behind a fault of the data."""
        self._hunt = hunt
        self._alone = alone
        self._room = ""
        self._root = output_dir / "ftlaunch" / "incidents"
        self._events = events
        self._environ = environ
        self._host_facts = host_facts
        self._shown = shown
        self._bundle_trouble = ""
        self._before = Counters(at_s=time.time())

    def attempt_begins(self, generation: int) -> None:
        self._before = take_counters()
        compile_rules()  # while the fork server imports: between a death and the decision it would be felt

    def ranks_failed(
        self,
        generation: int,
        lifecycle: Lifecycle,
        ranks: Sequence[RankProcess],
        input_error: str | None,
        *,
        hang: Hang | None = None,
        only_if_it_stays: bool = False,
    ) -> Incident | None:
        """`hang`: why this agent has ended them. `only_if_it_stays`: None, and nothing recorded, for a fault that a new
        attempt may do without."""
        if input_error is not None:
            codes = [view.exit.code for view in lifecycle.ranks.values() if view.exit is not None]
            code = int(ExitCode.REFUSED if ExitCode.REFUSED in codes else ExitCode.WRONG_INPUT)
            return Incident("input", retryable=False, input_error_code=code, message=input_error)
        logs = collect({str(r.rank): partial(_read_ends, r.log_path) for r in ranks}, _READ_WITHIN_S)
        evidence = [self._rank_evidence(lifecycle, rank, logs[str(rank.rank)]) for rank in ranks]
        node = self._node_evidence()
        verdict = diagnose(evidence, [node], hang.evidence if hang is not None else None)
        if only_if_it_stays and (verdict.retryable or verdict.action in ADJUSTED_BY_RESTART):
            return None
        if self._hunt:
            verdict = self._hunt.explain(verdict, evidence)
        stacks = hang.stacks if hang is not None else {}
        incident = self._record(verdict, evidence, node, {"generation": generation}, stacks, flight_dumps_beside(ranks))
        return replace(incident, label=_label(incident, evidence))

    def fork_server_failed(self, generation: int, failure: ForkServerError) -> Incident:
        """The imports failed: the fork server's own log is the evidence."""
        code = failure.exit_code
        evidence = [
            RankEvidence(
                rank=0,
                node=self._events.node,
                pid=None,
                exit_code=code if code is not None and code >= 0 else None,
                signal=-code if code is not None and code < 0 else None,
                log_path=str(self._shown(failure.log_path)),
                tail=read_tail(failure.log_path),
                last_step=None,
            )
        ]
        node = self._node_evidence()
        extra = {"generation": generation, "phase": str(failure)}
        return self._record(diagnose(evidence, [node]), evidence, node, extra)

    def unfinished(self, generation: int) -> Incident:
        """The ranks left with status 0, but the files do not prove the planned end."""
        node = self._node_evidence()
        verdict = diagnose([], [node])
        return self._record(
            verdict, [], node, {"generation": generation, "phase": "ranks ended without the planned end"}
        )

    def show(self, incident: Incident, decision: Decision, console: Console) -> None:
        if incident.verdict is None:
            console.say(f"error: {incident.message}")
            return
        self._complete_summary(incident, decision, console)
        what = (
            "starts again"
            if decision.action is Action.RESTART
            else f"stops with exit code {int(decision.exit_code or 1)}"
        )
        console.block(screen(incident.verdict, f"{what}: {decision.reason}"))
        if self._room:
            console.say(self._room)
        console.say(f"evidence: {incident.bundle}" if incident.bundle else self._bundle_trouble)

    def _complete_summary(self, incident: Incident, decision: Decision, console: Console) -> None:
        """The bundle is written before the decision is taken; what was decided belongs into the ticket as well."""
        if incident.bundle is None:
            return
        try:
            summary = incident.bundle / "summary.md"  # written anew: object mounts append nothing
            text = read_when_there(summary)
            summary.write_text(f"{text}\n**ftlaunch**: {decision.action.value}: {decision.reason}\n", "utf-8")
        except OSError as error:
            console.say(f"summary.md could not be completed: {error}")

    def _rank_evidence(self, lifecycle: Lifecycle, process: RankProcess, log: Any) -> RankEvidence:
        exit_ = process.exit
        head, tail = ((), ()) if isinstance(log, Unanswered) else log
        return RankEvidence(
            rank=process.rank,
            node=self._events.node,
            pid=process.pid,
            exit_code=exit_.code if exit_ else None,
            signal=exit_.signal if exit_ else None,
            log_path=str(self._shown(process.log_path)),
            tail=with_last_words(tail, lifecycle.ranks[process.rank].last_words),
            last_step=lifecycle.ranks[process.rank].step or None,
            killed_by_us=bool(exit_ and exit_.killed_by_us),
            exited_at_s=time.time() - (time.monotonic() - exit_.at_s) if exit_ else None,
            head=head,
        )

    def _node_evidence(self) -> NodeEvidence:
        disks = {"output_dir": self._root.parent.parent, "temporary": Path(tempfile.gettempdir())}
        return node_evidence(self._before, self._events.node, disks)

    def _record(
        self,
        verdict: Verdict,
        ranks: Sequence[RankEvidence],
        node: NodeEvidence,
        extra: dict[str, Any],
        stacks: Mapping[int, str] = MappingProxyType({}),
        dumps: Sequence[Path] = (),
    ) -> Incident:
        utc = utc_now().strftime("%Y%m%dT%H%M%S.%fZ")
        versions = self._host_facts.get("versions", {})
        extra["about"] = {
            "time": utc,
            "host": str(self._host_facts.get("hostname", "")),
            "output_dir": str(self._root.parent.parent),
            "attempt": str(extra.get("generation", "")),
            "versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
        }
        bundle: Path | None = None
        self._room = ""
        if self._alone and verdict.cls in _DISK_FULL:  # else the bundle would not fit either
            self._room = make_room(self._root.parent.parent, int(extra["generation"]))
        try:
            write = partial(
                write_bundle,
                self._root,
                utc,
                verdict,
                ranks,
                [node],
                self._environ,
                self._host_facts,
                extra,
                stacks=stacks,
                dumps=dumps,
            )
            bundle = within(_WRITE_WITHIN_S, write, "the output folder")
        except OSError as error:
            self._bundle_trouble = f"the bundle could not be written: {error}"
        as_json = verdict.to_json()
        self._events.emit(
            "incident",
            **{"class": verdict.cls},  # a keyword of Python
            retryable=verdict.retryable,
            culprit_rank=verdict.culprit.rank if verdict.culprit else None,
            evidence=as_json["evidence"],
            bundle=os.fspath(bundle) if bundle else None,
        )
        retryable = verdict.retryable or verdict.action in ADJUSTED_BY_RESTART
        return Incident(verdict.cls, retryable, verdict=verdict, bundle=bundle)


def _read_ends(log: Path) -> tuple[NumberedLines, NumberedLines]:
    tail = read_tail(log)
    return read_head(log, tail), tail


def _label(incident: Incident, evidence: Sequence[RankEvidence]) -> str:
    culprit = incident.verdict.culprit.rank if incident.verdict and incident.verdict.culprit else None
    for rank in evidence:
        if rank.rank == culprit:
            step = f" after step {rank.last_step}" if rank.last_step else ""
            how = "hung" if rank.killed_by_us else name_exit(rank.exit_code, rank.signal)
            return f"{incident.fault_class}: rank {rank.rank} {how}{step}"
    return incident.fault_class
