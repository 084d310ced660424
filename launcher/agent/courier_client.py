"""The agent's side of the courier (`launcher/courier/`): start it, ask it for things, replace it, end it.

Invariants: nothing here waits, except `close` within its bound; every request gets exactly one answer, through its
callback, from within `loop.wait()`, never from within the call that asks; a courier that died is replaced and its
requests fail with `Cause.LOST`, so that they can be asked again, also from within that callback.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from launcher.checkpoint.manifest import Manifest
from launcher.checkpoint.snapshot import SnapshotIdentity
from launcher.courier.messages import (
    FD_VARIABLE,
    Cause,
    Discarded,
    Failure,
    Progress,
    Published,
    Written,
)
from launcher.courier.wire import Parcel, Wire, close_all
from launcher.event_loop import EventLoop
from launcher.host.storage import StorageKind
from launcher.link import pair
from launcher.process import RUN_TOKEN_VARIABLE

# A request of which nothing has moved for so long is given up, and the courier with it. Longer than one fsync of a
# large file, or reading it back from an object store, may take.
STUCK_S = 1800.0
CLOSE_S = 3.0
_RESTART_PAUSE_S = 10.0  # from one start to the next
_LOOK_S = 5.0
_DYING_S = 2.0  # between the end of the courier's socket and its exit status

OnProgress = Callable[[Progress], None]
Permit = Callable[[bool, str], None]  # allowed, and why not; may be called later
Answered = Callable[["Parcel | Failure"], None]


@dataclass(frozen=True)
class Reply:
    """To a question of the courier. The descriptors stay the replier's."""

    fields: Mapping[str, Any]
    fds: Sequence[int] = ()


@dataclass
class _Request:
    answered: Answered
    on_progress: OnProgress
    may_publish: Callable[[Permit], None] | None
    bytes_done: int = 0
    moved_at: float = field(default_factory=time.monotonic)


class CourierClient:
    """One courier after the other."""

    def __init__(
        self, loop: EventLoop, environ: Mapping[str, str], token: str, log_path: Path, say: Callable[[str], None]
    ) -> None:
        """`token`: what marks the processes of this start, see RUN_TOKEN_VARIABLE. `say`: a line for people."""
        self._loop = loop
        self._environ = environ
        self._token = token
        self._log_path = log_path
        self._say = say
        self._name = f"courier {id(self)}"
        self._numbers = itertools.count(1)
        self._requests: dict[int, _Request] = {}
        self._questions: dict[str, Callable[[Parcel], Reply]] = {}
        self._on_replaced: Callable[[], None] = lambda: None
        self._calls: list[Callable[[], None]] = []
        self._process: subprocess.Popen[bytes] | None = None
        self._pidfd = -1
        self._dying: list[subprocess.Popen[bytes]] = []
        self._closed = False
        self._started_at = -_RESTART_PAUSE_S
        self._open()
        loop.every(self._name, _LOOK_S, self._give_up_what_is_stuck)

    @property
    def pids(self) -> list[int]:
        """Of the courier, and of those before it that have been killed but have not ended. Not to be ended or reaped by
        others."""
        self._dying = [process for process in self._dying if process.poll() is None]
        return [process.pid for process in (*self._dying, self._process) if process is not None]

    # -- requests ------------------------------------------------------------------------------------------------------

    def write(
        self,
        snapshots: Sequence[tuple[SnapshotIdentity, int]],
        output_dir: Path,
        storage: StorageKind,
        generation: int,
        name: str,
        on_done: Callable[[Written | Failure], None],
        on_progress: OnProgress = lambda progress: None,
    ) -> int:
        """Copy the files of these snapshots (identity, descriptor of the slot) to where `publish` finds them.

        The slots must stay as they are until the answer. Returns the request's number, for `cancel`.
        """
        return self.ask(
            "write",
            lambda parcel: on_done(parcel if isinstance(parcel, Failure) else Written.from_fields(parcel.message)),
            on_progress,
            fds=[fd for _, fd in snapshots],
            snapshots=[asdict(identity) for identity, _ in snapshots],
            output_dir=str(output_dir),
            storage=storage.value,
            generation=generation,
            name=name,
        )

    def publish(
        self,
        manifest: Manifest,
        output_dir: Path,
        storage: StorageKind,
        generation: int,
        name: str,
        may_publish: Callable[[Permit], None],
        on_done: Callable[[Published | Failure], None],
        *,
        keep: int,
        replace: bool = False,
    ) -> int:
        """Give what was written its name, and remove checkpoints beyond the newest `keep` (0: none).

        `may_publish` is asked as late as possible and answers through what it is given, within 30 s. Asking again for
        what has been published since is answered with success.
        """
        return self.ask(
            "publish",
            lambda parcel: on_done(parcel if isinstance(parcel, Failure) else Published.from_fields(parcel.message)),
            may_publish=may_publish,
            manifest=manifest.to_json(),
            output_dir=str(output_dir),
            storage=storage.value,
            generation=generation,
            name=name,
            keep=keep,
            replace=replace,
        )

    def discard(
        self,
        output_dir: Path,
        storage: StorageKind,
        generation: int,
        name: str,
        on_done: Callable[[Discarded | Failure], None] = lambda outcome: None,
    ) -> int:
        """Remove what was written of a checkpoint that is given up: a full disk gets its room back."""
        return self.ask(
            "discard",
            lambda parcel: on_done(parcel if isinstance(parcel, Failure) else Discarded(Path(parcel.message["path"]))),
            output_dir=str(output_dir),
            storage=storage.value,
            generation=generation,
            name=name,
        )

    def cancel(self, number: int) -> None:
        """The request is not wanted any more. It is answered all the same: perhaps it is done by then."""
        if number in self._requests:
            self._wire.post("cancel", id=number)
            self._flush_later()

    def close(self, bound_s: float = CLOSE_S) -> None:
        """The run is over: nothing is answered any more. One that is stuck in the kernel is left behind, killed."""
        if self._closed:
            return
        self._closed = True
        self._requests.clear()
        self._loop.stop_timer(self._name)
        for bound in (self._name, f"{self._name}: end", f"{self._name}: later"):
            self._loop.set_bound(bound, 0.0, lambda: None, kept=True)
        processes = [*self._dying, *([self._process] if self._process is not None else [])]
        self._dying = processes
        self._drop_channel()  # its end is what the courier ends at
        self._wait_for_the_end_of(processes, bound_s)
        for process in processes:
            if process.poll() is None:
                process.kill()
        self._wait_for_the_end_of(processes, bound_s)

    def ask(
        self,
        kind: str,
        answered: Answered,
        on_progress: OnProgress = lambda progress: None,
        *,
        may_publish: Callable[[Permit], None] | None = None,
        fds: Sequence[int] = (),
        **fields: Any,
    ) -> int:
        """Any request of `launcher/courier/messages.py`. The descriptors are to stay as they are until the answer, and
        those that come with it are the caller's."""
        if self._closed:
            raise RuntimeError(f"{kind} was asked after the end")
        number = next(self._numbers)
        self._requests[number] = _Request(answered, on_progress, may_publish)
        self._wire.post(kind, fds, id=number, **fields)
        self._flush_later()
        return number

    # -- what the courier says -----------------------------------------------------------------------------------------

    def _on_ready(self) -> None:
        wire = self._wire
        wire.flush()
        if not wire.has_unsent:
            self._loop.watch_writing(wire, self._on_ready, on=False)
        self._read(wire)
        process = self._process
        if wire is self._wire and wire.closed and process is not None:
            # Its exit status comes in a moment, and says more; unless it is stuck in the kernel.
            self._loop.unregister(wire)
            process.kill()
            self._loop.set_bound(f"{self._name}: end", _DYING_S, lambda: self._on_no_exit(process), kept=True)

    def _read(self, wire: Wire) -> None:
        while wire is self._wire and (parcels := wire.receive()):
            for parcel in parcels:
                self._handle(parcel)

    def _handle(self, parcel: Parcel) -> None:
        message = parcel.message
        kind, number = message["kind"], message.get("id")
        if kind == "notice":
            self._say(str(message["text"]))
            return
        if kind in self._questions:
            self._reply(parcel)
            return
        request = self._requests.get(number) if isinstance(number, int) else None
        if request is None or number is None:
            close_all(parcel.fds)
            return
        if kind == "done":
            del self._requests[number]
            request.answered(parcel)
        elif kind == "failed":
            del self._requests[number]
            request.answered(Failure(Cause(message["cause"]), str(message["reason"])))
        elif kind == "progress":
            progress = Progress(bool(message["begun"]), int(message["bytes_done"]), int(message["bytes_total"]))
            self._on_progress(request, progress)
        elif kind == "may_publish" and request.may_publish is not None:
            request.may_publish(self._permit(self._wire, int(message["question"])))

    def _on_progress(self, request: _Request, progress: Progress) -> None:
        if not progress.begun or progress.bytes_done != request.bytes_done:
            request.bytes_done = progress.bytes_done
            request.moved_at = time.monotonic()
        request.on_progress(progress)

    def answer_with(self, questions: Mapping[str, Callable[[Parcel], Reply]], on_replaced: Callable[[], None]) -> None:
        """What is said to these questions of the courier, whose descriptors are closed afterwards. `on_replaced`: a new
        courier knows nothing yet."""
        self._questions = dict(questions)
        self._on_replaced = on_replaced

    def later(self, call: Callable[[], None]) -> None:
        """From within `loop.wait()`."""
        self._calls.append(call)
        self._loop.set_bound(f"{self._name}: later", 0.0, self._call, kept=True)

    def _call(self) -> None:
        calls, self._calls = self._calls, []
        for call in calls:
            call()

    def _reply(self, parcel: Parcel) -> None:
        wire = self._wire
        reply = self._questions[parcel.message["kind"]](parcel)
        close_all(parcel.fds)
        if wire is self._wire and not wire.closed:
            wire.post("answer", reply.fds, question=parcel.message["question"], **reply.fields)
            self._flush_later()

    def _permit(self, wire: Wire, question: int) -> Permit:
        """Worth nothing to a later courier."""

        def answer(allowed: bool, reason: str) -> None:
            if wire is self._wire and not wire.closed:
                wire.post("answer", question=question, allowed=allowed, reason=reason)
                self._flush_later()

        return answer

    # -- the process ---------------------------------------------------------------------------------------------------

    def _open(self) -> None:
        """A channel, and soon a courier at its other end. What is asked meanwhile waits in the channel."""
        ours, self._theirs = pair()
        self._wire = Wire(ours)
        self._loop.register(self._wire, self._on_ready)
        pause_s = self._started_at + _RESTART_PAUSE_S - time.monotonic()
        if pause_s > 0:
            self._loop.set_bound(self._name, pause_s, self._start, kept=True)
        else:
            self._start()

    def _start(self) -> None:
        self._started_at = time.monotonic()
        env = {**self._environ, RUN_TOKEN_VARIABLE: self._token, FD_VARIABLE: str(self._theirs.fileno())}
        try:
            self._log_path.parent.mkdir(parents=True, exist_ok=True)
            with self._log_path.open("ab") as log:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "launcher.courier.main"],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=env,
                    pass_fds=(self._theirs.fileno(),),
                    start_new_session=True,
                )
        except OSError as error:
            self._say(f"the courier, which stores checkpoints, could not be started ({error}): tried again")
            self._loop.set_bound(self._name, _RESTART_PAUSE_S, self._start, kept=True)
            return
        self._theirs.close()
        self._pidfd = os.pidfd_open(self._process.pid)
        self._loop.register(self._pidfd, self._on_exit)

    def _on_exit(self) -> None:
        if self._process is None:
            return
        self._read(self._wire)  # what it had said before
        status = self._process.poll()
        how = f"was killed by signal {-status}" if status is not None and status < 0 else f"ended with {status}"
        self._lost(f"the courier {how} ({self._log_path})")

    def _on_no_exit(self, process: subprocess.Popen[bytes]) -> None:
        if process is self._process:
            self._lost("the courier has closed its channel and does not end")

    def _give_up_what_is_stuck(self) -> None:
        now = time.monotonic()
        if self._process is not None and any(now - request.moved_at > STUCK_S for request in self._requests.values()):
            self._process.kill()
            self._lost(f"nothing has moved for {STUCK_S:.0f} s; the storage may not answer", Cause.STUCK)

    def _lost(self, reason: str, cause: Cause = Cause.LOST) -> None:
        """Only the stuck requests fail as STUCK; those beside them may be asked again."""
        now = time.monotonic()
        self._say(f"{reason}: a new one is started")
        requests, self._requests = self._requests, {}
        if self._process is not None:
            self._dying.append(self._process)
        self._drop_channel()
        self._open()
        self._on_replaced()
        for request in requests.values():
            if self._closed:
                return
            stuck = cause is Cause.STUCK and now - request.moved_at > STUCK_S
            request.answered(Failure(Cause.STUCK if stuck else Cause.LOST, reason))

    def _drop_channel(self) -> None:
        self._loop.unregister(self._wire)
        self._wire.close()
        self._theirs.close()
        if self._pidfd >= 0:
            self._loop.unregister(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1
        self._process = None

    @staticmethod
    def _wait_for_the_end_of(processes: Sequence[subprocess.Popen[bytes]], bound_s: float) -> None:
        deadline = time.monotonic() + bound_s
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=max(0.0, deadline - time.monotonic()))

    def _flush_later(self) -> None:
        if self._wire.has_unsent:
            self._loop.watch_writing(self._wire, self._on_ready)
