"""The ranks of one generation and the fork server that makes them: started, told, killed and collected as a whole.

Invariant: whatever was started is either watched here or a descendant of this process, which is a subreaper, so it can
be found and ended. Until `end`, every wait goes through the event loop: other nodes hear from the agent meanwhile.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from launcher import link as channel
from launcher.agent.console import Console
from launcher.agent.crew import Turn
from launcher.agent.forkserver_client import ForkServer, ForkServerError, Readiness, TemplateState
from launcher.agent.generation import RankProcess, contract
from launcher.agent.lifecycle import KILLED_WITHIN_S, RankExit
from launcher.agent.warden import Warden
from launcher.event_loop import TICK_S, EventLoop
from launcher.link import Link, Message
from launcher.process import carriers_of, descendants, kill_all, sessions_of

_IMPORT_BOUND_S = 600.0  # a cold network file system needs minutes for torch; then it is said and counted as a fault
_TEMPLATE_BOUND_S = 3600.0  # data of many gigabytes is encoded in it
_FORK_BOUND_S = 30.0
_LATE_FORK_S = 2.0  # how long an abandoned fork is waited for: mostly the fork server lives, and is worth keeping
_DYING_S = 2.0  # between the end of a fork server's socket and its exit status
_KILL_BOUND_S = 10.0
_SERVER_PAUSE_S = 10.0
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.005, 0.1
_IMPORTS_SAID_AFTER_S = 2.0


class RankGroup:
    """`on_message(process, message)` and `on_exit(process, exit)` are called from within `loop.wait()`."""

    def __init__(
        self,
        loop: EventLoop,
        console: Console,
        environ: Mapping[str, str],
        token: str,
        log_root: Path,
        *,
        fork: bool,
        template: Path | None = None,
        server: ForkServer | None = None,
        spared: Callable[[], list[int]] = list,
        tell_phase: Callable[[str], None] = lambda name: None,
    ) -> None:
        """`template`: a spec, whose inputs are prepared for all ranks. `server`: the fork server that imports
        already. `spared`: processes of this start that are not the group's to end, with what they have started.
        `tell_phase` hears what the first rank waits for."""
        self.processes: list[RankProcess] = []
        self._loop = loop
        self._console = console
        self._environ = environ
        self._token = token
        self._log_root = log_root
        self._fork = fork
        self._template = template
        self._spared = spared
        self._tell_phase = tell_phase
        # An entrypoint script may have started processes before it became this one (`tensorboard & exec ftlaunch ...`).
        # They and theirs keep the sessions they have now; everything of ours gets a session of its own.
        self._foreign_pids = descendants(os.getpid(), without=[server.pid] if server else [])
        self._foreign_sessions = sessions_of([os.getpid(), *self._foreign_pids])
        self._warden = Warden(token)
        # One that forks every rank; or, where forking is not possible, one for each rank that is still to be started.
        self._servers: list[ForkServer] = [server or self._new_server()]
        self._dropped: list[ForkServer] = []  # killed, but perhaps not dead yet
        self._forking = False  # a rank may be there whose pid is not known yet
        self._server_started_at = time.monotonic()

    # -- starting ------------------------------------------------------------------------------------------------------

    def start(
        self,
        turn: Turn,
        spec_path: Path,
        master_port: int,
        *,
        memory_of: Callable[[int], Sequence[int]],
        variables: Mapping[str, str] = MappingProxyType({}),
        abandoned: Callable[[], bool],
        on_message: Callable[[RankProcess, Message], None],
        on_exit: Callable[[RankProcess, RankExit], None],
    ) -> bool:
        """False when the attempt was `abandoned` (a stop, a dead rank) before all ranks were started: those that were
        are the caller's to kill.

        `memory_of`: descriptors of this process's memory for a rank: its progress record, and slots for its snapshots.
        `variables`: of this attempt, in the environment of its ranks.

        Raises ForkServerError.
        """
        for rank in turn.ranks:
            server = self._ready_server(abandoned, turn.ranks.stop - rank)
            if server is None or abandoned():
                return False
            environ = {**variables, **contract(turn, rank, master_port)}
            process = self._start_rank(server, turn, rank, environ, spec_path, memory_of(rank), abandoned)
            if process is None:
                return False
            self._watch(process, on_message, on_exit)
        return not abandoned()  # while the last one was forked; who ended the others did not know of it yet

    def _start_rank(
        self,
        server: ForkServer,
        turn: Turn,
        rank: int,
        environ: Mapping[str, str],
        spec_path: Path,
        memory: Sequence[int],
        abandoned: Callable[[], bool],
    ) -> RankProcess | None:
        """None when the attempt was abandoned and the fork server does not answer."""
        log_path = self._log_root / f"gen-{turn.number}" / f"rank-{rank}.log"
        ours, theirs = channel.pair()
        # A rank that ends before its pid is known is not to be collected as an orphan.
        self._forking = True
        try:
            pid = self._fork_rank(
                server,
                partial(server.ask_for_rank, spec_path, environ, theirs, log_path, memory),
                abandoned,
            )
            if pid is None:
                ours.close()
                return None
            if not self._fork:
                server.hand_over()
                self._servers.remove(server)
            process = RankProcess(rank, pid, os.pidfd_open(pid), Link(ours), log_path)
            self.processes.append(process)
        except BaseException:
            ours.close()
            raise
        finally:
            self._forking = False
            theirs.close()
        return process

    def _fork_rank(self, server: ForkServer, ask: Callable[[], bool], abandoned: Callable[[], bool]) -> int | None:
        """The new rank's pid; None when the attempt was abandoned and the fork server does not answer.

        Without its answer a fork server is of no use any more: it may still fork, and say so to the next who asks. It
        is ended here; a rank that it has forked all the same is a left-over like any other.
        """
        if not ask():
            raise self._died(server)
        answer = self._answer(server, _FORK_BOUND_S, abandoned, late_s=_LATE_FORK_S)
        said = json.loads(answer) if answer else {}
        if said.get("stale"):
            server.template = TemplateState("working")
            return self._fork_rank(server, ask, abandoned) if self._wait_for_template(server, abandoned) else None
        if answer:
            return int(said["pid"])
        if answer is None and abandoned():
            self._console.say(f"the fork server does not answer, and is ended; a new one imports ({server.log_path})")
            self._drop(server)
            return None
        if answer is not None:
            raise self._died(server)
        self._drop(server)
        raise ForkServerError(f"no answer of the fork server within {_FORK_BOUND_S:.0f} s", server.log_path, None)

    def _answer(
        self, server: ForkServer, bound_s: float, abandoned: Callable[[], bool], *, late_s: float = 0.0
    ) -> bytes | None:
        """What the fork server says next (nothing: it has died). None at the bound, or `late_s` after the attempt was
        abandoned."""
        deadline = time.monotonic() + bound_s
        is_abandoned = False
        with self._hearing(server) as said:
            while not said:
                if not is_abandoned and abandoned():
                    is_abandoned, deadline = True, min(deadline, time.monotonic() + late_s)
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    return None
                self._loop.wait(min(TICK_S, left_s))
        return said[0]

    @contextlib.contextmanager
    def _hearing(self, server: ForkServer) -> Iterator[list[bytes]]:
        """What it says while this lasts, without its notices."""
        said: list[bytes] = []

        def hear() -> None:
            packet = server.receive()
            if not server.heed(packet):
                said.append(packet)

        self._loop.register(server, hear)
        try:
            yield said
        finally:
            self._loop.unregister(server)

    def _died(self, server: ForkServer) -> ForkServerError:
        """To be raised."""
        self._wait_for_the_end_of(server, _DYING_S)
        exit_code = server.process.poll()
        self._drop(server)
        return ForkServerError("the fork server died", server.log_path, exit_code)

    def _drop(self, server: ForkServer) -> None:
        """End it; it is never asked again."""
        if server in self._servers:
            self._servers.remove(server)
        self._dropped.append(server)
        server.kill()
        self._wait_for_the_end_of(server, _KILL_BOUND_S)

    def _wait_for_the_end_of(self, server: ForkServer, bound_s: float) -> None:
        deadline = time.monotonic() + bound_s
        pause_s = _SHORTEST_PAUSE_S
        while server.alive() and time.monotonic() < deadline:
            self._loop.wait(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _watch(
        self,
        process: RankProcess,
        on_message: Callable[[RankProcess, Message], None],
        on_exit: Callable[[RankProcess, RankExit], None],
    ) -> None:
        def read() -> None:
            for message in process.link.poll():
                on_message(process, message)
            if process.link.closed:
                self._loop.unregister(process.link)

        def ended() -> None:
            read()  # what the rank said before it died comes first
            exit_ = process.reap()
            if exit_ is not None:
                self._loop.unregister(process.pidfd)
                self._loop.unregister(process.link)
                on_exit(process, exit_)

        self._loop.register(process.link, read)
        self._loop.register(process.pidfd, ended)

    def _new_server(self) -> ForkServer:
        self._server_started_at = time.monotonic()
        log_path = self._log_root / "fork-server.log"
        return ForkServer(self._environ, self._token, log_path, once=not self._fork, template=self._template)

    def _ready_server(self, abandoned: Callable[[], bool], num_wanted: int) -> ForkServer | None:
        """A fork server that has imported everything; None when the attempt was abandoned meanwhile.

        Where ranks cannot be forked, `num_wanted` processes import side by side, one for each rank to come.
        """
        self._servers = [server for server in self._servers if server.alive()]
        while len(self._servers) < (1 if self._fork else num_wanted):
            self._servers.append(self._new_server())
        server = self._servers[0]
        readiness = server.readiness or self._wait_for_imports(server, abandoned)
        if readiness is None:
            return None
        if self._fork and readiness.cuda_touched:
            self._console.say("CUDA was touched while importing, so ranks cannot be forked; each imports by itself")
            self._fork = False
            self._drop(server)
            return self._ready_server(abandoned, num_wanted)
        return server if self._wait_for_template(server, abandoned) else None

    def _wait_for_template(self, server: ForkServer, abandoned: Callable[[], bool]) -> bool:
        """False when the attempt was abandoned meanwhile. Raises ForkServerError."""
        told: TemplateState | None = None
        deadline = time.monotonic() + _TEMPLATE_BOUND_S
        with self._hearing(server) as said:
            while (now := server.template) is not None and now.state == "working":
                if told is None or now.phase != told.phase:
                    self._tell_phase(now.phase or "preparing inputs")
                elif now.done != told.done:
                    self._console.long_work(f"{now.phase}: {now.done}")
                told = now
                if abandoned():
                    return False  # it goes on, for the next attempt
                if said:
                    raise self._died(server)
                if time.monotonic() > deadline:
                    self._template = None
                    self._drop(server)
                    bound = (
                        f"preparing the ranks' inputs took longer than {_TEMPLATE_BOUND_S:.0f} s; each makes its own"
                    )
                    raise ForkServerError(bound, server.log_path, None)
                self._loop.wait(TICK_S)
        if told is not None and now is not None and now.state == "failed":
            self._console.say(f"each rank makes its own inputs: {now.reason} ({server.log_path})")
        return True

    def _wait_for_imports(self, server: ForkServer, abandoned: Callable[[], bool]) -> Readiness | None:
        self._loop.set_bound("imports", _IMPORTS_SAID_AFTER_S, lambda: self._say_loading(server))
        answer = self._answer(server, _IMPORT_BOUND_S, abandoned)
        if answer:
            server.readiness = Readiness.from_json(answer)
            return server.readiness
        if answer is None and abandoned():
            return None  # it imports on, for the next attempt
        if answer is not None:
            raise self._died(server)
        self._drop(server)
        raise ForkServerError(f"imports took longer than {_IMPORT_BOUND_S:.0f} s", server.log_path, None)

    def _say_loading(self, server: ForkServer) -> None:
        if server.readiness is None and server.alive():
            self._console.say("loading the training stack (torch, deepspeed, transformers) ...")

    # -- while they run ------------------------------------------------------------------------------------------------

    def tell(self, kind: str, **fields: Any) -> None:
        for process in self.processes:
            if process.exit is None:
                process.link.send(kind, **fields)

    def look_after(self) -> None:
        """Called often: show the first rank's output, replace helpers that somebody has killed, collect orphans."""
        if self.processes:
            first = self.processes[0]
            self._console.mirror(first.log_path, f"rank {first.rank}", ended=first.exit is not None)
        if self._warden.ensure_running():
            self._console.say("the warden process was killed; a new one watches")
        # Not at once after the last one: what kills it (memory, a person) would only be fed.
        rested = time.monotonic() - self._server_started_at > _SERVER_PAUSE_S
        if self._fork and self.processes and rested and self._servers and not self._servers[0].alive():
            self._console.say("the fork server was killed; the ranks run on, a new one imports for the next attempt")
            self._servers[0] = self._new_server()
        self._dropped = [server for server in self._dropped if server.alive()]
        self._reap_adopted()

    # -- ending --------------------------------------------------------------------------------------------------------

    @property
    def runs(self) -> bool:
        """Whether a rank has not ended yet."""
        return any(process.exit is None for process in self.processes)

    def kill(self) -> bool:
        """SIGKILL for every rank that still runs; True when there was one."""
        running = [process for process in self.processes if process.exit is None]
        for process in running:
            process.kill()
        return bool(running)

    def wait_for_the_killed(self) -> None:
        """After `kill`, for ranks of a generation that never got going: until they have ended, or are said to be
        stuck."""
        deadline = time.monotonic() + KILLED_WITHIN_S
        while running := [process.pid for process in self.processes if process.exit is None]:
            self._loop.wait()
            if time.monotonic() > deadline:
                raise OSError(f"processes {running} do not die of SIGKILL (stuck in a driver or on a dead file system)")

    def close(self) -> None:
        """After the last rank has ended: end its left-over children and forget the generation."""
        self._kill_leftovers(self._loop.wait)
        first = self.processes[0].exit if self.processes else None
        self._console.forget_mirrors(drop_held=first is not None and not first.clean)
        for process in self.processes:
            self._loop.unregister(process.pidfd)
            self._loop.unregister(process.link)
            process.close()
        self.processes = []

    def end(self) -> None:
        """Leave nothing behind: ranks, fork server, their descendants, warden. This waits outside the event loop: the
        run is over here, and nobody is to be told anything any more."""
        self.kill()
        for server in self._servers:
            server.kill()
        for server in (*self._servers, *self._dropped):
            with contextlib.suppress(subprocess.TimeoutExpired):  # stuck in the kernel: nothing more can be done here
                server.process.wait(timeout=_KILL_BOUND_S)
        self._servers = []
        self._dropped = []
        self._kill_leftovers(time.sleep)
        self._warden.release()

    def _helper_pids(self) -> list[int]:
        return [self._warden.process.pid, *(s.pid for s in (*self._servers, *self._dropped)), *self._spared()]

    def _kill_leftovers(self, pause: Callable[[float], None]) -> None:
        """Children of ranks (DataLoader workers, compilers) that outlived them: this process has adopted them."""
        deadline = time.monotonic() + _KILL_BOUND_S
        pause_s = _SHORTEST_PAUSE_S
        while left := self._leftovers():
            kill_all(left)
            self._reap_adopted()
            if time.monotonic() > deadline:
                self._console.say(f"processes that do not die of SIGKILL (stuck in the kernel): {left}")
                return
            pause(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _leftovers(self) -> list[int]:
        below = descendants(os.getpid(), without=[*self._helper_pids(), *self._foreign_pids])
        marked = set(carriers_of(self._token))
        return [pid for pid in below if pid in marked or not sessions_of([pid]) & self._foreign_sessions]

    def _reap_adopted(self) -> None:
        """Collect ended orphans that this process has inherited (as PID 1 or subreaper); ranks and helpers are
        collected where they are watched."""
        if self._forking:
            return
        watched = {*self._helper_pids(), *(process.pid for process in self.processes if process.exit is None)}
        while True:
            try:
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if ended is None or ended.si_pid in watched:
                return
            os.waitpid(ended.si_pid, os.WNOHANG)
