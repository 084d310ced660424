"""What the agents of a run on many nodes keep in the output folder they share, `ftlaunch/cluster/`.

An epoch is the time during which at least one agent of the run lives. Each holds `ftlaunch/lock` shared; whoever gets
it alone knows that nobody lives, and begins the next epoch: a folder with no claims and no memory in it. The text of
the lock is the epoch's number. It names a whole folder at any time, whenever an agent is killed.

Invariants:
- while an agent lives, no other epoch than its own begins, and the folder of its own stays;
- a memory has one owner: the process that holds the lock of `agents/<seat>`. Its text is in that file, too: written
  before the memory is read, and read again after each write of the memory. So where a lock was lost, or does not reach
  other machines, of two owners the first is stopped before its next vote leaves it, or the second has read that vote;
- a claim never changes once it is there.
"""

from __future__ import annotations

import errno
import fcntl
import json
import re
import secrets
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from launcher.agent.durable_file import fsync_folder, replace_file, write_once
from launcher.agent.run_lock import (
    AGENTS_NAME,
    CLUSTER_NAME,
    LockFile,
    LockWait,
    epoch_in,
    epoch_text,
    holder_text,
    lives_here,
)
from launcher.cluster.codec import from_json, to_json
from launcher.cluster.model import Durable, Generation
from launcher.errors import ExitCode, RunsHereAlready, UserError

_NO_LOCKS = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL})
_SEAT_WAIT_S = 1.0  # a killed agent may still be on its way out
_LOOK_EVERY_S = 0.05
_NUMBERS_BEGIN_AFTER = "numbers-begin-after"


@dataclass(frozen=True)
class _Seat:
    """A node's place in the epoch: the lock on `agents/<name>`, and with it `memory/<name>.json`."""

    name: str
    file: LockFile


class ClusterFolder:
    """A context manager: from entering to leaving, this agent lives. Its attributes are there once it is entered.

    name: the node's, "n<rank>".
    first_voted: gives the highest number of a generation that the caller knows earlier starts to have used; called
        before what they have left is removed. With what earlier epochs know, it is where this epoch's numbers begin:
        they grow over epochs, whatever was lost.
    locks_stay_here: why other machines may not see this one's locks (`host.storage.why_locks_stay_here`), or "".

    Entering raises RunsHereAlready where this node's agent is alive on this machine, UserError where a run on one node
    is, LockedElsewhere where the folder stays locked from elsewhere, OSError where the storage fails.
    """

    epoch: int
    is_new_epoch: bool
    folder_id: str
    incarnation: str
    durable: Durable

    def __init__(
        self,
        output_dir: Path,
        name: str,
        *,
        first_voted: Callable[[], int],
        locks_stay_here: str = "",
        say: Callable[[str], None] = lambda _: None,
        stopped: Callable[[], bool] = lambda: False,
        stop_exit_code: ExitCode = ExitCode.STOPPED,
    ) -> None:
        self.name = name
        self.is_new_epoch = False
        self._output_dir = output_dir
        self._cluster = output_dir / "ftlaunch" / CLUSTER_NAME
        self._first_voted = first_voted
        self._locks_stay_here = locks_stay_here
        self._say = say
        self._wait = LockWait(say, stopped, stop_exit_code)
        self._lock: LockFile | None = None
        self._seat: _Seat | None = None
        self._holder = ""
        self._begun = -1
        self._claims: dict[int, Generation] = {}

    def __enter__(self) -> ClusterFolder:
        self._cluster.mkdir(parents=True, exist_ok=True)
        self._lock = lock = LockFile(self._output_dir / "ftlaunch" / "lock")
        try:
            self._wait.until(self._output_dir, lambda: self._come_alive(lock), lambda: _alone(lock.read()))
            if self.is_new_epoch and not self._locks_stay_here:
                self._remove_older_epochs()
            self._seat = self._sit_down()
            self.folder_id = self._read_or_draw("id")
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    # ---- what membership asks for ----

    def persist(self, durable: Durable) -> None:
        """Durable when it returns; then this node may tell others what it has voted.

        Raises OSError where it is not, and where this agent has lost its place to another: it must not vote any more.
        """
        if self._locks_stay_here:
            self.check()  # else the memory of one who has taken over might be overwritten
        try:
            replace_file(self._memory_path(self._current_seat().name), json.dumps(to_json(durable)).encode())
        except FileNotFoundError as error:
            raise OSError(errno.ESTALE, f"{self._epoch_folder} has been removed while this agent lives") from error
        self.check()
        self.durable = durable

    def claim(self, base: int, value: Generation) -> Generation:
        """The claim for `base`: `value`, if nobody was first. Raises OSError where that cannot be known now."""
        if base not in self._claims:
            path = self._epoch_folder / "claims" / f"{base}.json"
            there = write_once(path, json.dumps(to_json(value)).encode(), writer=self._current_seat().name)
            try:
                self._claims[base] = from_json(Generation, json.loads(there))
            except ValueError as error:
                raise OSError(errno.EIO, f"{path} is no claim: {error}") from error
        return self._claims[base]

    def drawn_token(self) -> str:
        """The token of a run that was given none: drawn by the first agent that asks, the same for all, for ever."""
        return self._read_or_draw("token", mode=0o600)

    def check(self) -> None:
        """Raises OSError if this agent has lost its place: its locks went (a file server gives those of a machine that
        it has not heard of for long to others), and another has taken its seat or begun another epoch."""
        seat = self._current_seat()
        if not self._locks_stay_here:
            text = _read(self._output_dir / "ftlaunch" / "lock")
            if epoch_in(text) != self.epoch:
                raise OSError(errno.ESTALE, f"this agent's lock is lost, {self._output_dir} belongs to {text}")
        text = _read(self._epoch_folder / AGENTS_NAME / seat.name)
        if text != self._holder:
            raise OSError(errno.ESTALE, f"another agent has taken the place of {self.name}: {text or 'an unknown one'}")

    # ---- the epoch ----

    @property
    def _epoch_folder(self) -> Path:
        return self._cluster / f"epoch-{self.epoch}"

    def _come_alive(self, lock: LockFile) -> bool:
        """True when the lock is held and `epoch` is the one that everybody who lives is in."""
        if self._locks_stay_here:
            return self._come_alive_alone(lock)
        try:
            if lock.take(fcntl.LOCK_EX):
                self._begin_epoch(lock)
            if not lock.take(fcntl.LOCK_SH):
                lock.release()
                return False
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            self._locks_stay_here = f"no locks there: {error.strerror}"
            return self._come_alive_alone(lock)
        # Only now: the lock was nobody's for a moment, and another may have begun a later epoch.
        number = epoch_in(lock.read())
        if number is None or not (self._cluster / f"epoch-{number}").is_dir():
            lock.release()  # a run on one node was here last: nobody lives, or somebody is about to say so
            return False
        self.epoch, self.is_new_epoch = number, number == self._begun
        return True

    def _begin_epoch(self, lock: LockFile) -> None:
        """The lock's text comes last. Whatever is left by a kill before it is no epoch's, and the next start skips it.

        Only called while the lock is held alone. A listing may be old (NFS caches folders), a name that is there
        cannot be made again.
        """
        for left in self._cluster.glob(".*.????????????????"):  # of `write_once`
            left.unlink(missing_ok=True)
        number = max([epoch_in(lock.read()) or 0, *self._epochs()]) + 1
        while not self._make_epoch(number):
            number += 1
        self._numbers_begin_after(number)
        lock.write(epoch_text(number))
        self._begun = number

    def _make_epoch(self, number: int) -> bool:
        """False where the folder was there already. What is missing in it is made."""
        folder = self._cluster / f"epoch-{number}"
        is_new = True
        try:
            folder.mkdir()
        except FileExistsError:
            is_new = False
        for name in (AGENTS_NAME, "claims", "memory"):
            (folder / name).mkdir(exist_ok=True)
        for changed in (folder, self._cluster, self._cluster.parent):
            fsync_folder(changed)
        return is_new

    def _numbers_begin_after(self, epoch: int) -> int:
        """The highest number of a generation before this epoch: written before anything of earlier ones is removed."""
        path = self._cluster / f"epoch-{epoch}" / _NUMBERS_BEGIN_AFTER
        try:
            there = path.read_bytes()
        except FileNotFoundError:
            earlier = [highest_number(self._cluster / f"epoch-{number}") for number in self._epochs()]
            highest = max(self._first_voted(), *earlier)
            there = write_once(path, str(highest).encode(), writer=self.name)
        if not re.fullmatch(rb"\d{1,18}", there):
            raise OSError(errno.EIO, f"{path} is no number: {there[:40]!r}")
        return int(there)

    def _epochs(self) -> list[int]:
        found = (re.fullmatch(r"epoch-(\d{1,18})", path.name) for path in self._cluster.iterdir())
        return sorted(int(match[1]) for match in found if match)

    def _remove_older_epochs(self) -> None:
        """Only their own agents have used them, and they are gone: else this epoch had not begun."""
        for number in self._epochs():
            if number < self.epoch:
                shutil.rmtree(self._cluster / f"epoch-{number}", ignore_errors=True)

    def _come_alive_alone(self, lock: LockFile) -> bool:
        """Where nobody can know that all others are gone: the epoch that is there goes on for ever."""
        try:
            if not lock.take(fcntl.LOCK_SH):  # a run on one node, on this machine
                return False
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
        self.epoch = max([1, *self._epochs()])
        self.is_new_epoch = self._make_epoch(self.epoch)
        began_before = any((self._epoch_folder / "claims").iterdir())
        self._say(
            f"warning: locks on {self._output_dir} do not reach other machines ({self._locks_stay_here}): no node can "
            "know whether the others are gone. Never start one node twice. "
            + ("This start goes on with what the nodes of an earlier one have agreed on. " if began_before else "")
            + "If it waits for nodes that are gone for good, end all agents of this run on all machines, remove "
            f"{self._epoch_folder}, and start again."
        )
        return True

    # ---- the seat ----

    def _sit_down(self) -> _Seat:
        """Take the best memory of this node that no other process has; else begin one, as somebody new."""
        own = re.compile(re.escape(self.name) + r"(-[0-9a-f]{16})?")
        names = {path.name for path in (self._epoch_folder / AGENTS_NAME).iterdir() if own.fullmatch(path.name)}
        free: list[_Seat] = []
        try:
            for name in sorted(names | {self.name}):
                free += self._try_seat(name)
            self.incarnation = secrets.token_hex(8)
            known = {seat.name: self._remembered(seat) for seat in free}
            free.sort(key=lambda seat: _worth(known[seat.name]), reverse=True)
            free = free or self._try_seat(f"{self.name}-{self.incarnation}")
            seat = free.pop(0)
        finally:
            for other in free:
                other.file.close()
        try:
            self._holder = f"{holder_text()} {self.incarnation}"
            seat.file.write(self._holder)  # from here on an earlier owner is stopped; what it has voted is read now
            durable = self._remembered(seat)
        except BaseException:
            seat.file.close()
            raise
        self.durable = durable or Durable(self.incarnation, voted=self._first_number())
        self.incarnation = self.durable.incarnation
        return seat

    def _first_number(self) -> int:
        begin = self._numbers_begin_after(self.epoch)
        return begin if self.is_new_epoch else max(begin, self._first_voted())  # the epoch has gone on since

    def _try_seat(self, name: str) -> list[_Seat]:
        """Empty where a living agent, or the lock of a lost machine, is on it."""
        file = LockFile(self._epoch_folder / AGENTS_NAME / name)
        if self._wait_until_free(file):
            return [_Seat(name, file)]
        holder = file.read()
        file.close()
        if lives_here(holder):
            raise RunsHereAlready(
                f"{self.name} of the run in {self._output_dir} is alive on this machine already ({holder}): stop that "
                "one first"
            )
        self._say(f"{self.name} was or is elsewhere ({holder or 'an unknown process'}): its memory stays there")
        return []

    def _wait_until_free(self, file: LockFile) -> bool:
        deadline = time.monotonic() + _SEAT_WAIT_S
        while not self._is_free(file):
            if time.monotonic() > deadline:
                return False
            time.sleep(_LOOK_EVERY_S)
        return True

    def _is_free(self, file: LockFile) -> bool:
        try:
            free = file.take(fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            free = True
        return free and not (self._locks_stay_here and lives_here(file.read()))

    def _memory_path(self, seat_name: str) -> Path:
        return self._epoch_folder / "memory" / f"{seat_name}.json"

    def _remembered(self, seat: _Seat) -> Durable | None:
        path = self._memory_path(seat.name)
        try:
            return from_json(Durable, json.loads(path.read_bytes()))
        except FileNotFoundError:
            return None
        except ValueError as error:  # CodecError, too
            aside = path.with_name(f"{path.name}.unreadable")
            path.replace(aside)
            self._say(f"{path} cannot be read ({error}); kept as {aside.name}. {self.name} goes on without its memory")
            return None

    def _current_seat(self) -> _Seat:
        if self._seat is None:
            raise RuntimeError("the cluster folder is not entered")
        return self._seat

    # ---- the rest ----

    def _read_or_draw(self, name: str, mode: int = 0o644) -> str:
        path = self._cluster / name
        there = write_once(path, secrets.token_hex(16).encode(), writer=self._current_seat().name, mode=mode)
        if not re.fullmatch(rb"[0-9a-f]{32}", there):
            raise UserError(f"{path} is not what ftlaunch has written: end all agents of this run and remove the file")
        return there.decode()

    def _close(self) -> None:
        if self._seat is not None:
            self._seat.file.close()
            self._seat = None
        if self._lock is not None:
            self._lock.close()
            self._lock = None


def highest_number(epoch_folder: Path) -> int:
    """The highest number of a generation that an epoch knows, from its memories, its claims and where it began; or 0.

    What cannot be read is no reason not to start: the events and the staging folders tell of generations, too.
    """
    highest = 0
    with suppress(ValueError, FileNotFoundError):  # an epoch may end before it has a memory
        highest = int((epoch_folder / _NUMBERS_BEGIN_AFTER).read_bytes())
    for path in epoch_folder.glob("memory/*.json"):
        with suppress(ValueError, FileNotFoundError):
            memory = from_json(Durable, json.loads(path.read_bytes()))
            accepted = (memory.accepted.ballot, memory.accepted.generation.number) if memory.accepted else ()
            highest = max(highest, memory.voted, memory.committed.number, *accepted)
    for path in epoch_folder.glob("claims/*.json"):
        with suppress(ValueError, FileNotFoundError):
            highest = max(highest, from_json(Generation, json.loads(path.read_bytes())).number)
    return highest


def _alone(text: str) -> list[str]:
    """Who holds the lock alone. Agents like this one do so for a moment, and are no reason to be refused."""
    return [] if epoch_in(text) is not None else [text]


def _read(path: Path) -> str:
    """Opened anew: a client of NFS asks the server then."""
    try:
        return path.read_bytes().decode("utf-8", "replace").strip()
    except FileNotFoundError:
        return ""


def _worth(durable: Durable | None) -> tuple[int, int]:
    return (durable.committed.number, durable.voted) if durable else (-1, -1)
