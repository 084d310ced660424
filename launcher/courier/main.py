"""The courier's process: `python -m launcher.courier.main`, a child of the agent.

Invariants: it ends with the agent, whatever its threads are stuck in; the thread that reads the agent's requests does
no work of its own, so nothing slow delays anything else; every request gets exactly one `done` or `failed`.
"""

from __future__ import annotations

import itertools
import os
import queue
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from launcher.courier import disk
from launcher.courier.channel import Secret
from launcher.courier.job import Job
from launcher.courier.messages import (
    FD_VARIABLE,
    PERMIT_WAIT_S,
    PROGRESS_S,
    Cause,
    Failed,
    identities_from,
)
from launcher.courier.peers import Membership, Peers
from launcher.courier.wire import Parcel, Wire, close_all
from launcher.host.storage import StorageKind
from launcher.link import STOP_SIGNALS, Message
from launcher.process import die_with_parent

Work = Callable[[Job], dict[str, Any]]  # does a request; the fields of `done`


class Lane(Protocol):
    def add(self, work: Callable[[], None]) -> None: ...


class _Alone:
    """A thread for one thing."""

    def __init__(self, name: str) -> None:
        self._name = name

    def add(self, work: Callable[[], None]) -> None:
        threading.Thread(target=work, name=self._name, daemon=True).start()


class _InTurn:
    """A thread that does one thing after the other."""

    def __init__(self, name: str) -> None:
        self._waiting: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def add(self, work: Callable[[], None]) -> None:
        self._waiting.put(work)

    def _run(self) -> None:
        while True:
            self._waiting.get()()


@dataclass
class _Answer:
    """Of the agent, to a question from a thread."""

    parcel: Parcel | None = None
    here: threading.Event = field(default_factory=threading.Event)


class Courier:
    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._disk = _InTurn("disk")
        self._network = _InTurn("network")
        self._peers = Peers(self.ask, self._notice)
        self._jobs: dict[int, Job] = {}
        self._answers: dict[int, _Answer] = {}
        self._questions = itertools.count(1)
        self._turn = threading.Lock()

    def serve(self) -> None:
        """Until the agent is gone."""
        say_at = time.monotonic() + PROGRESS_S
        while not self._wire.closed:
            select.select([self._wire], [], [], max(0.0, say_at - time.monotonic()))
            for parcel in self._wire.receive():
                self._handle(parcel)
            if time.monotonic() >= say_at:
                self._say_progress()
                say_at = time.monotonic() + PROGRESS_S

    def ask(self, kind: str, timeout_s: float, fds: Sequence[int] = (), **fields: Any) -> Parcel | None:
        """The agent's answer; None when it does not come in time. For any thread but the one that serves."""
        question = next(self._questions)
        answer = self._answers[question] = _Answer()
        try:
            self._wire.send(kind, fds, question=question, **fields)
            answer.here.wait(timeout_s)
            return answer.parcel
        finally:
            del self._answers[question]

    # -- what the agent says -------------------------------------------------------------------------------------------

    def _handle(self, parcel: Parcel) -> None:
        message, fds = parcel.message, parcel.fds
        kind = message["kind"]
        if "question" in message:
            self._take_answer(parcel)
        elif parcel.fds_lost:
            self._fail(
                message["id"], Cause.DEFECT, "its descriptors did not arrive: the limit of open files is reached"
            )
        elif kind == "cancel":
            job = self._jobs.get(message["id"])
            if job is not None:
                job.cancel()
        elif kind == "write":
            self._start(self._disk, message, fds, lambda job: _write(message, fds, job))
        elif kind == "publish":
            self._start(self._disk, message, fds, lambda job: self._publish(message, job))
        elif kind == "discard":
            self._start(self._disk, message, fds, lambda job: {"path": str(disk.discard(_place(message)).path)})
        elif kind == "listen":
            self._start(self._network, message, fds, lambda job: self._listen(message))
        elif kind == "send":
            self._start(_Alone("send"), message, fds, lambda job: self._send(message, fds, job))
        elif kind == "fetch":
            self._start(_Alone("fetch"), message, fds, lambda job: self._fetch(message, job))
        elif kind == "ask_inventory":
            ask = self._peers.inventory
            self._start(_Alone("inventory"), message, fds, lambda job: ask(str(message["address"]), job))
        else:
            close_all(fds)
            self._fail(message["id"], Cause.DEFECT, f"the courier does not know {kind!r}")

    def _take_answer(self, parcel: Parcel) -> None:
        answer = self._answers.get(parcel.message["question"])
        if answer is None:
            close_all(parcel.fds)
            return
        answer.parcel = parcel
        answer.here.set()

    # -- work ----------------------------------------------------------------------------------------------------------

    def _start(self, lane: Lane, message: Message, fds: tuple[int, ...], work: Work) -> None:
        job = Job(message["id"])
        with self._turn:
            self._jobs[job.number] = job
        lane.add(lambda: self._work(job, fds, work))

    def _work(self, job: Job, fds: tuple[int, ...], work: Work) -> None:
        try:
            job.require_wanted()
            job.begun = True
            started = time.monotonic()
            kind, fields = "done", work(job)
            fields.setdefault("seconds", time.monotonic() - started)
        except Failed as failure:
            cause = Cause.CANCELLED if job.cancelled else failure.cause
            kind, fields = "failed", {"cause": cause.value, "reason": str(failure)}
        except Exception as error:  # noqa: BLE001 - the edge of a request: without an answer the agent would wait
            traceback.print_exc()
            kind, fields = "failed", {"cause": Cause.DEFECT.value, "reason": f"{type(error).__name__}: {error}"}
        close_all(fds)  # before the answer: with it the slots are free
        with self._turn:
            del self._jobs[job.number]
        self._wire.send(kind, job.fds, id=job.number, **fields)
        close_all(job.fds)

    def _publish(self, message: Message, job: Job) -> dict[str, Any]:
        def ask_permission() -> None:
            answer = self.ask("may_publish", PERMIT_WAIT_S, id=job.number)
            job.require_wanted()
            if answer is None:
                within = f"within {PERMIT_WAIT_S:.0f} s"
                raise Failed(
                    Cause.REFUSED, f"the agent has not said {within} whether this generation is still the current one"
                )
            if not answer.message["allowed"]:
                raise Failed(Cause.REFUSED, str(answer.message["reason"]) or "the agent gave no reason")

        return disk.publish(
            _place(message),
            message["manifest"],
            int(message["keep"]),
            replace=bool(message["replace"]),
            ask_permission=ask_permission,
        ).to_fields()

    def _listen(self, message: Message) -> dict[str, Any]:
        membership = Membership(
            node=str(message["node"]),
            run_id=str(message["run_id"]),
            secret=Secret(str(message["token"]), str(message["run_id"])),
            limit_bytes=int(message["limit_bytes"]),
            stall_s=float(message["stall_s"]),
        )
        return {"port": self._peers.listen(membership, str(message["host"]), int(message["port"]))}

    def _send(self, message: Message, fds: tuple[int, ...], job: Job) -> dict[str, Any]:
        return self._peers.send(str(message["address"]), identities_from(message["snapshots"]), fds, job)

    def _fetch(self, message: Message, job: Job) -> dict[str, Any]:
        return self._peers.fetch(str(message["address"]), identities_from(message["snapshots"]), job)

    def _notice(self, text: str) -> None:
        self._wire.send("notice", text=text)

    def _fail(self, number: int, cause: Cause, reason: str) -> None:
        self._wire.send("failed", id=number, cause=cause.value, reason=reason)

    def _say_progress(self) -> None:
        with self._turn:
            jobs = list(self._jobs.values())
        for job in jobs:
            self._wire.send(
                "progress", id=job.number, begun=job.begun, bytes_done=job.bytes_done, bytes_total=job.bytes_total
            )


def _place(message: Message) -> disk.Place:
    return disk.Place(
        Path(message["output_dir"]), StorageKind(message["storage"]), int(message["generation"]), str(message["name"])
    )


def _write(message: Message, fds: tuple[int, ...], job: Job) -> dict[str, Any]:
    return disk.write(_place(message), identities_from(message["snapshots"]), fds, job).to_fields()


def main() -> int:
    die_with_parent(os.getppid())
    # Signals to the process group are the agent's business.
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    Courier(Wire(socket.socket(fileno=int(os.environ.pop(FD_VARIABLE))))).serve()
    sys.stdout.flush()
    sys.stderr.flush()
    # Not `return`: a thread may be stuck in a file system that does not answer, and nothing is to wait for it.
    os._exit(0)


if __name__ == "__main__":
    raise SystemExit(main())
