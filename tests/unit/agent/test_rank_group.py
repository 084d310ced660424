"""The real fork server (its imports are stand-ins) and real ranks: while the agent waits for them, its loop goes on."""

from __future__ import annotations

import ctypes
import io
import os
import secrets
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import pytest

from launcher.agent import rank_group
from launcher.agent.console import Console
from launcher.agent.crew import Seat, Turn
from launcher.agent.forkserver_client import ForkServerError
from launcher.agent.lifecycle import RankExit
from launcher.agent.rank_group import RankGroup
from launcher.event_loop import EventLoop
from launcher.link import Message
from launcher.plan.spec import RankSpec
from launcher.process import become_subreaper, carriers_of, descendants

REPOSITORY = Path(__file__).parents[3]
BEAT_S = 0.02
MOMENT_S = 0.5  # the longest gap between two beats that passes for "goes on"; other nodes allow 3 s

# In the fork server: modules of the training stack are empty, a rank does what `run_id` says, and while the file
# "late" exists an answer comes so many seconds after the fork. With "late.middle" the first of the two forks hangs.
STAND_INS = """
import importlib.machinery, os, sys, time
HEAVY = ("accelerate", "deepspeed", "peft", "torch", "transformers",
         "launcher.train.arguments", "launcher.train.main", "launcher.train.model", "launcher.train.program")

def run_rank(spec, link, memory, inputs):
    exec(spec.run_id, {"link": link})
    return 0

class Stack:
    def find_spec(self, name, path=None, target=None):
        if name.startswith(HEAVY):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        return None

    def exec_module(self, module):
        module.__getattr__ = lambda name: None
        if module.__name__ == "torch":
            module.cuda = type("cuda", (), {"is_initialized": lambda: os.path.exists("LATE.cuda")})
        if module.__name__ == "launcher.train.main":
            module.run_rank = run_rank

sys.meta_path.insert(0, Stack())
waitpid = os.waitpid

def late(pid, options):
    if os.path.exists("LATE"):
        time.sleep(float(open("LATE").read()))
    return waitpid(pid, options)

os.waitpid = late
setsid = os.setsid

def hang():
    if os.path.exists("LATE.middle"):
        time.sleep(300)
    return setsid()

os.setsid = hang
"""


@dataclass
class Scene:
    group: RankGroup
    loop: EventLoop
    token: str
    folder: Path
    screen: io.StringIO
    beats: list[float]
    messages: list[Message] = field(default_factory=list)
    exits: list[RankExit] = field(default_factory=list)
    generation: int = 0

    def start(self, does: str, num_ranks: int = 1, abandoned: Callable[[], bool] = lambda: False) -> bool:
        self.generation += 1
        spec = RankSpec("", does, self.generation, {}, "", "cpu", "fp32", 0, False, None, {}, {}, 1)
        spec_path = self.folder / "spec.json"
        spec_path.write_text(spec.to_json())
        turn = Turn(self.generation, "test", (Seat("n0", "127.0.0.1", num_ranks),), 0)
        return self.group.start(
            turn,
            spec_path,
            20000,
            memory_of=lambda rank: (),
            abandoned=abandoned,
            on_message=lambda _process, message: self.messages.append(message),
            on_exit=lambda _process, exit_: self.exits.append(exit_),
        )

    def wait_until(self, holds: Callable[[], bool], bound_s: float = 10.0) -> None:
        deadline = time.monotonic() + bound_s
        while not holds():
            assert time.monotonic() < deadline
            self.loop.wait(0.02)

    def make_ready(self) -> int:
        """The pid of the fork server, once it has forked a rank; that rank is gone."""
        self.start("pass")
        self.wait_until(lambda: len(self.exits) == 1)
        assert self.exits.pop().clean
        self.group.close()
        return self.server_pid()

    def server_pid(self) -> int:
        return next(pid for pid in carriers_of(self.token) if b"forkserver" in _command(pid))

    def longest_gap_s(self, since: float) -> float:
        times = [since, *(at for at in self.beats if at > since), time.monotonic()]
        return max(after - before for before, after in pairwise(times))


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def _is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


@pytest.fixture
def late(tmp_path: Path) -> Path:
    return tmp_path / "late"


@pytest.fixture
def make_scene(tmp_path: Path, late: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Scene]]:
    monkeypatch.chdir(REPOSITORY)
    (tmp_path / "sitecustomize.py").write_text(STAND_INS.replace("LATE", str(late)))
    become_subreaper()
    before = set(descendants(os.getpid()))
    scenes: list[Scene] = []

    def make(*, fork: bool = True) -> Scene:
        loop, screen, beats, token = EventLoop(), io.StringIO(), list[float](), secrets.token_hex(16)
        environ = {"PATH": os.environ["PATH"], "PYTHONPATH": f"{tmp_path}:{REPOSITORY}"}
        group = RankGroup(loop, Console(screen), environ, token, tmp_path / "logs", fork=fork)
        loop.every("beat", BEAT_S, lambda: beats.append(time.monotonic()))
        loop.on_tick = group.look_after
        scenes.append(Scene(group, loop, token, tmp_path, screen, beats))
        return scenes[-1]

    yield make
    left = []
    for scene in scenes:
        for pid in carriers_of(scene.token):
            try:
                os.kill(pid, signal.SIGCONT)
            except ProcessLookupError:
                continue
        scene.group.end()
        scene.loop.close()
        left += carriers_of(scene.token)
    ctypes.CDLL(None).prctl(36, 0, 0, 0, 0)  # no subreaper any more
    assert left == []
    assert set(descendants(os.getpid())) <= before


@pytest.fixture
def scene(make_scene: Callable[..., Scene]) -> Scene:
    return make_scene()


@pytest.mark.parametrize("fork", [True, False])
def test_ranks_start_speak_and_end(make_scene: Callable[..., Scene], fork: bool) -> None:
    scene = make_scene(fork=fork)
    assert scene.start("import os; link.send('rank', number=os.environ['RANK'])", 3)
    assert [process.rank for process in scene.group.processes] == [0, 1, 2]
    scene.wait_until(lambda: len(scene.exits) == 3)
    assert sorted(m["number"] for m in scene.messages if m["kind"] == "rank") == ["0", "1", "2"]
    assert all(exit_.clean for exit_ in scene.exits)
    scene.group.close()


def test_where_imports_touch_cuda_each_rank_imports_by_itself(scene: Scene, tmp_path: Path) -> None:
    (tmp_path / "late.cuda").touch()
    began = time.monotonic()
    assert scene.start("pass", 2)
    scene.wait_until(lambda: len(scene.exits) == 2)
    assert all(exit_.clean for exit_ in scene.exits)
    assert "CUDA was touched" in scene.screen.getvalue()
    assert scene.longest_gap_s(began) < MOMENT_S
    scene.group.close()


def test_a_rank_that_ends_before_its_pid_is_known_is_no_orphan(scene: Scene, late: Path) -> None:
    scene.make_ready()
    late.write_text("0.4")
    assert scene.start("raise SystemExit(7)")
    scene.wait_until(lambda: bool(scene.exits))
    assert scene.exits[0].code == 7
    scene.group.close()


def test_while_a_fork_server_does_not_answer_the_loop_goes_on(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    pid = scene.make_ready()
    os.kill(pid, signal.SIGSTOP)
    monkeypatch.setattr(rank_group, "_FORK_BOUND_S", 0.8)
    began = time.monotonic()
    with pytest.raises(ForkServerError, match=r"no answer of the fork server within") as raised:
        scene.start("pass")
    assert raised.value.exit_code is None, "our SIGKILL is no evidence"
    assert 0.7 < time.monotonic() - began < 4
    assert scene.longest_gap_s(began) < MOMENT_S
    assert _is_gone(pid)


def test_a_fork_server_that_answered_too_late_is_not_asked_again_and_its_rank_is_ended(
    scene: Scene, late: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = scene.make_ready()
    late.write_text("1.0")
    monkeypatch.setattr(rank_group, "_FORK_BOUND_S", 0.5)
    pid_file = scene.folder / "late-rank"
    forked = f"import os, time; open({str(pid_file)!r}, 'w').write(str(os.getpid())); time.sleep(300)"
    with pytest.raises(ForkServerError):
        scene.start(forked)
    scene.wait_until(lambda: pid_file.exists() and bool(pid_file.read_text()))
    late_rank = int(pid_file.read_text())
    assert scene.group.processes == []
    assert not _is_gone(late_rank)
    scene.group.close()
    assert _is_gone(late_rank)
    late.unlink()
    monkeypatch.undo()
    os.chdir(REPOSITORY)
    assert scene.start("import os; link.send('rank', pid=os.getpid())", 2)
    scene.wait_until(lambda: len(scene.exits) == 2)
    said = [message["pid"] for message in scene.messages if message["kind"] == "rank"]
    assert sorted(said) == sorted(process.pid for process in scene.group.processes)
    assert scene.server_pid() != first
    scene.group.close()


def test_who_is_ended_while_it_forks_leaves_no_rank(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever between two forks the fork server is when it is ended."""
    monkeypatch.setattr(rank_group, "_LATE_FORK_S", 0.0)
    for number in range(5):
        scene.make_ready()
        deadline = time.monotonic() + number * 0.0015
        scene.start("import time; time.sleep(300)", abandoned=lambda at=deadline: time.monotonic() > at)  # type: ignore[misc]
        scene.group.kill()
        scene.group.wait_for_the_killed()
        scene.group.close()
        scene.exits.clear()
        ours = [pid for pid in carriers_of(scene.token) if b"forkserver" not in _command(pid)]
        assert ours == []
        assert len([pid for pid in carriers_of(scene.token) if b"forkserver" in _command(pid)]) <= 1


def test_with_the_fork_server_goes_who_is_about_to_fork(
    scene: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene.make_ready()
    (tmp_path / "late.middle").touch()
    monkeypatch.setattr(rank_group, "_LATE_FORK_S", 0.0)
    asked_until = time.monotonic() + 0.2
    assert not scene.start("pass", abandoned=lambda: time.monotonic() > asked_until)
    scene.wait_until(lambda: carriers_of(scene.token) == [], bound_s=3)  # before any left-overs are looked for
    scene.group.close()


@pytest.mark.parametrize("stopped", [True, False], ids=["the fork server hangs", "the fork server is slow"])
def test_an_abandoned_start_ends_soon(scene: Scene, late: Path, monkeypatch: pytest.MonkeyPatch, stopped: bool) -> None:
    pid = scene.make_ready()
    monkeypatch.setattr(rank_group, "_LATE_FORK_S", 0.7)
    if stopped:
        os.kill(pid, signal.SIGSTOP)
    late.write_text("0.4")
    began = time.monotonic()
    assert not scene.start("import time; time.sleep(300)", 2, abandoned=lambda: time.monotonic() > began + 0.1)
    assert time.monotonic() - began < 2.5
    assert scene.longest_gap_s(began) < MOMENT_S
    assert _is_gone(pid) == stopped, "it costs imports to replace one that only took its time"
    assert len(scene.group.processes) == (0 if stopped else 1)
    scene.group.kill()
    scene.group.wait_for_the_killed()
    scene.group.close()


def test_a_rank_that_dies_while_the_last_one_is_forked_leaves_none_waiting_for_it(scene: Scene, late: Path) -> None:
    """The others that run are killed in that moment; the last one was not among them and waited for the first."""
    scene.make_ready()
    late.write_text("0.5")
    does = "import os, time; os.environ['RANK'] == '0' and os.kill(os.getpid(), 9); time.sleep(300)"
    assert not scene.start(does, 2, abandoned=lambda: bool(scene.exits)), "the caller is told, and kills what is there"
    assert [exit_.signal for exit_ in scene.exits] == [signal.SIGKILL]
    assert scene.group.kill()
    scene.group.wait_for_the_killed()
    assert len(scene.exits) == 2
    scene.group.close()


def test_a_fork_server_that_dies_when_asked_is_evidence(scene: Scene) -> None:
    pid = scene.make_ready()
    os.kill(pid, signal.SIGSTOP)
    scene.loop.every("kill", 0.3, lambda: (os.kill(pid, signal.SIGKILL), scene.loop.stop_timer("kill"))[1])
    with pytest.raises(ForkServerError, match="the fork server died") as raised:
        scene.start("pass")
    assert raised.value.exit_code == -signal.SIGKILL
    assert scene.start("pass"), "the next attempt has a new one"
    scene.wait_until(lambda: bool(scene.exits))
    scene.group.close()


def test_while_left_over_children_are_ended_the_loop_goes_on(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """A child that is stuck in the kernel; here, one that comes back."""
    scene.make_ready()
    monkeypatch.setattr(rank_group, "_KILL_BOUND_S", 0.8)
    assert scene.start("import subprocess; subprocess.Popen(['sleep', '300'], start_new_session=True)")
    scene.wait_until(lambda: bool(scene.exits))
    monkeypatch.setattr(rank_group, "kill_all", lambda pids: None)
    began = time.monotonic()
    scene.group.close()
    assert time.monotonic() - began > 0.7
    assert "do not die of SIGKILL" in scene.screen.getvalue()
    assert scene.longest_gap_s(began) < MOMENT_S
    monkeypatch.undo()
    os.chdir(REPOSITORY)
    scene.group.close()
    assert [pid for pid in carriers_of(scene.token) if b"sleep" in _command(pid)] == []


def test_a_rank_that_the_group_kills_is_told_from_one_that_dies(scene: Scene) -> None:
    assert scene.start("import time; time.sleep(300)")
    (process,) = scene.group.processes
    assert not process.killed_by_us
    assert scene.group.kill()
    scene.group.wait_for_the_killed()
    assert scene.exits[0].signal == signal.SIGKILL
    assert scene.exits[0].killed_by_us
    scene.group.close()
