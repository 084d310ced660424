"""Turns what ranks say into the run's records: events, samples, progress, and lines for a person."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from launcher.agent.console import Console
from launcher.agent.events import EventLog, Lines
from launcher.agent.ledger import Progress
from launcher.agent.lifecycle import RankExit, signal_name
from launcher.link import Message
from launcher.policy.save_interval import summarize

_SNAPSHOTS_OF_AN_EVENT = 500
_QUIET_PHASES = ("training", "saving")  # steps and saved checkpoints speak for these
_DRILL_PLACES = {
    "step_end": "after step {step}",
    "micro_batch": "in step {step}, before micro-batch {batch}",
    "save": "in the save of step {step}",
    "evaluation": "in the evaluation after step {step}, before batch {batch}",
}


class RunRecorder:
    """Records one start. `attempt_begins` before each generation; `decided_at_s` is when it was decided on."""

    def __init__(self, events: EventLog, samples: Lines, console: Console, progress: Progress) -> None:
        self.events = events
        self.console = console
        self.progress = progress
        self.input_error: str | None = None
        self.fired_drills: set[int] = set()
        self.snapshots = SnapshotFigures()
        self._samples = samples
        self._trouble = ""
        self._first_step_seen = False
        self._decided_at_s = 0.0
        self._phase_name, self._phase_since_s = "", 0.0
        self._speaker = 0
        self._handlers: Mapping[str, Callable[[int, Message], None]] = {
            "step": self._step,
            "phase": self._phase,
            "log": self._log,
            "evaluated": self._evaluated,
            "answered": self._answered,
            "resumed": self._resumed,
            "checkpoint_saved": self._checkpoint_saved,
            "snapshot": self._snapshot,
            "stalled": self._stalled,
            "memory_interval": self._memory_interval,
            "drill": self._drill,
            "user_error": self._user_error,
            "alive": self._alive,
        }

    def attempt_ends(self) -> None:
        self._tell_snapshots()

    def attempt_begins(self, decided_at_s: float, ranks: range) -> None:
        """`ranks` are this node's; the first of them speaks for all of them."""
        self._speaker = ranks.start
        self.console.is_echo = ranks.start > 0
        self.input_error = None
        self.progress.attempt_begins()
        self._first_step_seen = False
        self._decided_at_s = decided_at_s
        self._phase_name, self._phase_since_s = "starting", time.monotonic()

    def message(self, rank: int, message: Message) -> None:
        handler = self._handlers.get(message["kind"])
        if handler is not None:
            handler(rank, message)
        self._say_trouble()

    def rank_exited(self, rank: int, pid: int, exit_: RankExit, last_step: int) -> None:
        self.events.emit(
            "worker_exited",
            rank=rank,
            pid=pid,
            exit_code=exit_.code,
            signal=signal_name(exit_.signal) if exit_.signal else None,
            last_step=last_step or None,
            killed_by_us=exit_.killed_by_us,
        )

    def _say_trouble(self) -> None:
        """Records that cannot be written are kept and written later; the training does not stop for them."""
        trouble = self.events.trouble or self._samples.trouble
        if trouble != self._trouble:
            self._trouble = trouble
            if trouble:
                self.console.say(f"records cannot be written ({trouble}); they are kept until they can")
            else:
                self.console.say("records are written again")

    def close(self) -> None:
        num_lost = self._samples.close()
        if num_lost:
            self.console.say(f"{num_lost} sample records could not be written: {self._samples.path}")

    def _step(self, rank: int, message: Message) -> None:
        step = int(message["step"])
        self._samples.append({"gen": self.events.generation, "rank": rank, "step": step, "ids": message["samples"]})
        if rank != self._speaker:
            return
        now = time.monotonic()
        if not self._first_step_seen:
            self.phase("training")  # what was before is over; with a step that ended it was the first step
            self._first_step_seen = True
            self.events.emit("first_step", step=step, seconds=round(now - self._decided_at_s, 3))
        self.progress.step(step, now)
        self.console.progress(step, self.progress.max_steps, self.progress.last_loss, self.progress.seconds_per_step())

    def _phase(self, rank: int, message: Message) -> None:
        if rank != self._speaker:
            return
        if "max_steps" in message:
            self.progress.max_steps = int(message["max_steps"])
            self.progress.steps_per_epoch = int(message["steps_per_epoch"])
        self.phase(message["name"])

    def phase(self, name: str) -> None:
        """This is what the attempt waits for now, as far as its first rank is concerned."""
        now = time.monotonic()
        if self._phase_name and not self._first_step_seen:
            self.events.emit("phase", name=self._phase_name, seconds=round(now - self._phase_since_s, 3))
        self._phase_name, self._phase_since_s = name, now
        if name not in _QUIET_PHASES and not self.console.is_echo:
            self.console.say(f"{name} ...")

    def _alive(self, rank: int, message: Message) -> None:
        """Something long goes forward (encoding, evaluation, a long step): the ranks count, so a standstill is
        silent."""
        if rank == self._speaker:
            self.console.long_work(f"{message['what']}: {message['done']}")

    def _log(self, rank: int, message: Message) -> None:
        self.progress.log(float(message["loss"]))

    def _evaluated(self, rank: int, message: Message) -> None:
        self.progress.evaluations[int(message["step"])] = float(message["loss"])
        self.events.emit("evaluated", **_fields(message))
        self.console.say(f"evaluation loss at step {message['step']}: {message['loss']:.4f}")

    def _answered(self, rank: int, message: Message) -> None:
        self.progress.answers.setdefault(message["model"], []).append((message["question"], message["answer"]))
        self.events.emit("answered", **_fields(message))

    def _resumed(self, rank: int, message: Message) -> None:
        if rank == self._speaker:
            self.events.emit("resumed", **_fields(message))

    def _checkpoint_saved(self, rank: int, message: Message) -> None:
        self.checkpoint_saved(_fields(message))

    def checkpoint_saved(self, fields: Mapping[str, Any]) -> None:
        self.events.emit("checkpoint_saved", **fields)
        durable_s, stall_s = float(fields["durable_seconds"]), float(fields["stall_seconds"])
        beside = f"; the training waited {stall_s * 1000:.0f} ms" if stall_s < durable_s else ""
        self.console.say(f"checkpoint of step {fields['step']} saved in {durable_s:.1f} s{beside}")

    def _snapshot(self, rank: int, message: Message) -> None:
        self.snapshots.sealed(int(message["step"]), int(message["bytes"]), float(message["seconds"]))

    def _stalled(self, rank: int, message: Message) -> None:
        """Of this node's ranks the slowest counts, so each is counted; one event for many snapshots."""
        if not message["for_disk"]:
            self.snapshots.stalled(float(message["seconds"]))
        if self.snapshots.are_many:
            self._tell_snapshots()

    def _tell_snapshots(self) -> None:
        fields = self.snapshots.take()
        if fields:
            self.events.emit("memory_saves", **fields)

    def _memory_interval(self, rank: int, message: Message) -> None:
        self.events.emit("memory_interval", **_fields(message))

    def _drill(self, rank: int, message: Message) -> None:
        self.fired_drills.add(int(message["number"]))
        self.events.emit("drill", rank=rank, **_fields(message))
        where = _DRILL_PLACES[message["at"]].format(**message)
        what = f"gets {message['signal']}" if message["signal"] else f"hangs ({message['hang']})"
        self.console.say(f"drill: rank {rank} {what} {where}")

    def _user_error(self, rank: int, message: Message) -> None:
        self.input_error = self.input_error or str(message["message"])


class SnapshotFigures:
    """What snapshots in memory have cost, over many of them."""

    def __init__(self) -> None:
        self._clear()

    def _clear(self) -> None:
        self._step = self._num_bytes = 0
        self._seals_s: list[float] = []
        self._stalls_s: list[float] = []

    def sealed(self, step: int, num_bytes: int, seconds: float) -> None:
        self._step, self._num_bytes = step, max(self._num_bytes, num_bytes)
        self._seals_s.append(seconds)

    def stalled(self, seconds: float) -> None:
        self._stalls_s.append(seconds)

    @property
    def are_many(self) -> bool:
        return len(self._stalls_s) >= _SNAPSHOTS_OF_AN_EVENT

    def take(self) -> dict[str, Any] | None:
        """Fields of the event `memory_saves`; begins anew. None where there were none."""
        stall, seal = summarize(self._stalls_s), summarize(self._seals_s)
        if stall is None or seal is None:
            return None
        fields = {
            "step": self._step,
            "num": stall.num,
            "bytes": self._num_bytes,
            "stall_seconds_median": stall.median_s,
            "stall_seconds_p99": stall.p99_s,
            "seal_seconds_median": seal.median_s,
        }
        self._clear()
        return fields


def _fields(message: Message) -> dict[str, Any]:
    return {key: value for key, value in message.items() if key != "kind"}
