"""`ftlaunch check` on every node of a job: they meet at the first one, which leads them through what only several can
find out, and each gets all that was found.

Invariant: everything has a bound; a node that does not come, or goes, is left out and named. Nothing of a run is
touched: the meeting place is the agents' port, which is taken while a run is going on.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from launcher.host.net_speed import PairSpeed, SpeedAddress, measure, speed_server, why_unreachable
from launcher.host.storage import nearest_existing
from launcher.preflight.check_cluster import best_of_each, pairings
from launcher.preflight.cluster_facts import ClusterFacts, NodeReport

MEET_WITHIN_S = 10.0
ANSWER_WITHIN_S = 10.0  # of one command; the longest is a test of speed in two directions
SEEN_WITHIN_S = 5.0
SPEED_SECONDS = 1.0  # of each direction, in each of the two rounds
SUM_SECONDS, SUM_WITHIN_S = 2.0, 12.0  # of all-reduce; with the imports before it
MARK_PREFIX = ".ftlaunch-check-"
_CLOCK_ROUNDS = 7
_RETRY_S = 0.1
_MAX_MESSAGE_BYTES = 4 << 20
_PROTOCOL = "ftlaunch check 1"


@dataclass(frozen=True)
class Together:
    """One node's part. `leader`: (host, port) of the first node, where every other one knocks; this node is the leader
    where `is_leader`. `token`: keeps strangers out, "" where the run has none yet. `has_speed`: `check.speed`."""

    report: NodeReport
    leader: tuple[str, int]
    is_leader: bool
    host_ip: str
    num_wanted: int
    output_dir: Path
    token: str
    has_speed: bool = True
    backend_device: str = ""  # "cuda" or "cpu": all-reduce is tried there; "" where the training stack is not installed
    interface: str = ""  # for gloo
    meet_within_s: float = MEET_WITHIN_S
    speed_seconds: float = SPEED_SECONDS

    @property
    def key(self) -> bytes:
        return hashlib.sha256(f"{_PROTOCOL}\0{self.token}\0{self.output_dir}".encode()).digest()


def check_together(part: Together) -> ClusterFacts:
    """Never raises for what other nodes do: who cannot be met is missing from `nodes`."""
    began = time.monotonic()
    with speed_server(part.host_ip) as address:
        try:
            facts = _lead(part, address) if part.is_leader else _follow(part, address)
        except OSError:  # the port is taken (`net.agent_port` says by whom), or the leader is not there
            facts = ClusterFacts(part.num_wanted, (part.report,))
    return replace(facts, seconds=round(time.monotonic() - began, 2))


class _Line:
    """Messages of one connection: JSON with a seal, one a line."""

    def __init__(self, connection: socket.socket, key: bytes) -> None:
        self._connection, self._key = connection, key
        self._stream = connection.makefile("rb")

    def send(self, **message: Any) -> None:
        text = json.dumps(message).encode()
        self._connection.sendall(self._seal(text) + b" " + text + b"\n")

    def receive(self, timeout_s: float) -> dict[str, Any]:
        """Raises OSError: no message in time, a stranger, or the end."""
        self._connection.settimeout(timeout_s)
        line = self._stream.readline(_MAX_MESSAGE_BYTES)
        seal, _, text = line.rstrip(b"\n").partition(b" ")
        if not line.endswith(b"\n") or not hmac.compare_digest(seal, self._seal(text)):
            raise ConnectionError("no message of this job")
        message = json.loads(text)
        if not isinstance(message, dict):
            raise ConnectionError("no message of this job")
        return message

    def ask(self, timeout_s: float = ANSWER_WITHIN_S, **message: Any) -> dict[str, Any]:
        self.send(**message)
        return self.receive(timeout_s)

    def close(self) -> None:
        self._stream.close()
        self._connection.close()

    def _seal(self, text: bytes) -> bytes:
        return hmac.digest(self._key, text, "sha256").hex().encode()


# the first node


@dataclass
class _Peer:
    """A node as the leader sees it; `line` is None for the leader itself and for one that has gone."""

    report: NodeReport
    address: SpeedAddress
    line: _Line | None


def _lead(part: Together, address: SpeedAddress) -> ClusterFacts:
    peers = {part.report.name: _Peer(part.report, address, None)}
    with ExitStack() as stack:
        for name, peer in _gather(part, stack).items():
            peers.setdefault(name, peer)
        facts = _find_out(part, peers) if len(peers) > 1 else ClusterFacts(part.num_wanted, (part.report,))
        for peer in peers.values():
            if peer.line is not None:
                with suppress(OSError):
                    peer.line.send(command="end", facts=facts.to_json())
    return facts


def _gather(part: Together, stack: ExitStack) -> dict[str, _Peer]:
    deadline = time.monotonic() + part.meet_within_s
    peers: dict[str, _Peer] = {}
    listener = stack.enter_context(closing(socket.create_server(("", part.leader[1]), backlog=256)))
    while len(peers) < part.num_wanted - 1 and (left_s := deadline - time.monotonic()) > 0:
        listener.settimeout(left_s)
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            break
        line = _Line(connection, part.key)
        stack.callback(line.close)
        with suppress(OSError, ValueError, KeyError, TypeError):  # a stranger: it gets no answer
            hello = line.receive(min(left_s, 2.0))
            report = _report(hello["report"])
            peers[report.name] = _Peer(report, SpeedAddress(**hello["address"]), line)
    return peers


def _find_out(part: Together, peers: dict[str, _Peer]) -> ClusterFacts:
    everyone = {name: asdict(peer.address) for name, peer in peers.items()}
    reports = [_with_clock(peer) for peer in peers.values()]
    reached = _ask_all(peers, lambda name: {"command": "reach", "others": everyone}, part)
    unreachable = tuple(
        (name, other, why) for name, answer in reached.items() for other, why in answer.get("why", {}).items() if why
    )
    unseen, seen_after_s = _visibility(part, peers)
    speeds = _speeds(part, peers, {(source, target) for source, target, _ in unreachable}) if part.has_speed else ()
    summed = _all_reduce(part, peers) if part.has_speed and part.backend_device and not unreachable else None
    return ClusterFacts(part.num_wanted, tuple(reports), unreachable, unseen, seen_after_s, speeds, summed)


def _with_clock(peer: _Peer) -> NodeReport:
    """The round with the quickest answer tells best."""
    if peer.line is None:
        return peer.report
    best_s, offset_s = float("inf"), 0.0
    try:
        for _ in range(_CLOCK_ROUNDS):
            before = time.time()
            theirs = float(peer.line.ask(command="clock")["time"])
            after = time.time()
            if after - before < best_s:
                best_s, offset_s = after - before, theirs - (before + after) / 2
    except (OSError, ValueError, KeyError, TypeError):
        peer.line = None
        return peer.report
    return replace(peer.report, clock_offset_s=round(offset_s, 4), clock_error_s=round(best_s / 2, 4))


def _visibility(part: Together, peers: dict[str, _Peer]) -> tuple[dict[str, str], dict[str, float]]:
    """Whether, and how late, the others see a small file that this node makes and removes again."""
    folder = nearest_existing(part.output_dir)
    mark, content = folder / (MARK_PREFIX + secrets.token_hex(6)), secrets.token_hex(16)
    others = {name: peer for name, peer in peers.items() if peer.line is not None}
    try:
        mark.write_text(content, "ascii")
    except OSError:
        return {}, {}  # `disk.writable` says it
    try:
        answers = _ask_all(others, lambda name: {"command": "look", "mark": str(mark), "content": content}, part)
    finally:
        mark.unlink(missing_ok=True)
    unseen = {name: str(answer["why"]) for name, answer in answers.items() if answer.get("why")}
    seen = {name: float(answer["after_s"]) for name, answer in answers.items() if "after_s" in answer}
    return unseen, seen


def _speeds(part: Together, peers: dict[str, _Peer], closed: set[tuple[str, str]]) -> tuple[PairSpeed, ...]:
    """Two rounds; in each all pairs are at work at once, one direction after the other."""
    speeds: list[PairSpeed] = []
    names = list(peers)
    for number in range(2):
        known = best_of_each(speeds) if number else None
        if number and (len(names) == 2 or known is None or not all(name in known for name in names)):
            break
        pairs = pairings(names, known)
        for ways in (pairs, [(target, source) for source, target in pairs]):
            target_of = {source: target for source, target in ways if (source, target) not in closed}

            def command(name: str, targets: Mapping[str, str] = target_of) -> dict[str, Any]:
                target = targets[name]
                address = asdict(peers[target].address)
                return {"command": "speed", "target": target, "address": address, "seconds": part.speed_seconds}

            senders = {name: peer for name, peer in peers.items() if name in target_of}
            answers = _ask_all(senders, command, part)
            speeds += [PairSpeed(**answer["speed"]) for answer in answers.values() if "speed" in answer]
    return tuple(speeds)


def _all_reduce(part: Together, peers: dict[str, _Peer]) -> float | None:
    """Algorithm bandwidth of one rank a node in bytes a second; None where one of them could not take part."""
    with closing(socket.create_server((part.host_ip, 0))) as free:
        port = free.getsockname()[1]
    ranks = {name: rank for rank, name in enumerate(peers)}  # this node is the first

    def command(name: str) -> dict[str, Any]:
        place = {"rank": ranks[name], "world_size": len(ranks), "master": part.host_ip, "port": port}
        return {"command": "sum", "request": {**place, "seconds": SUM_SECONDS}}

    answers = _ask_all(peers, command, part)
    found = [answer.get("bytes_per_s") for answer in answers.values()]
    return min((float(speed) for speed in found if speed), default=None) if all(found) else None


def _sum(request: Mapping[str, Any], part: Together) -> dict[str, Any]:
    """This node's rank of the test, in a process of its own, which is gone when this returns."""
    if not part.backend_device:
        return {}
    environ = dict(os.environ)
    if part.interface:
        environ.setdefault("GLOO_SOCKET_IFNAME", part.interface)
        environ.setdefault("NCCL_SOCKET_IFNAME", part.interface)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "launcher.train.allreduce_probe"],
            input=json.dumps({**request, "device": part.backend_device}).encode(),
            env=environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=SUM_WITHIN_S,
            check=True,
        )
        answer = json.loads(done.stdout.splitlines()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return {}  # without it the forecast is made from the pairs
    return answer if isinstance(answer, dict) else {}


def _ask_all(
    peers: Mapping[str, _Peer], command: Callable[[str], dict[str, Any]], part: Together
) -> dict[str, dict[str, Any]]:
    """All at the same time. Who does not answer in time, or not in order, is not asked again."""

    def ask(name: str) -> dict[str, Any]:
        peer, message = peers[name], command(name)
        if peer.report.name == part.report.name:
            return _obey(message, part)
        if peer.line is None:
            return {}
        try:
            return peer.line.ask(SUM_WITHIN_S + SEEN_WITHIN_S, **message)
        except (OSError, ValueError):
            peer.line = None
            return {}

    if not peers:
        return {}
    with ThreadPoolExecutor(len(peers)) as pool:
        return dict(zip(peers, pool.map(ask, peers), strict=True))


# every other node


def _follow(part: Together, address: SpeedAddress) -> ClusterFacts:
    with closing(_knock(part)) as line:
        line.send(report=asdict(part.report), address=asdict(address))
        while True:
            message = line.receive(part.meet_within_s + SUM_WITHIN_S + 4 * ANSWER_WITHIN_S)
            if message.get("command") == "end":
                return ClusterFacts.from_json(message["facts"])
            line.send(**_obey(message, part))


def _knock(part: Together) -> _Line:
    deadline = time.monotonic() + part.meet_within_s
    while True:
        try:
            return _Line(socket.create_connection(part.leader, timeout=1.0), part.key)
        except OSError:  # it has not started yet, or its name is not known yet
            if time.monotonic() > deadline:
                raise
            time.sleep(_RETRY_S)


def _obey(message: Mapping[str, Any], part: Together) -> dict[str, Any]:
    command = message.get("command")
    if command == "clock":
        return {"time": time.time()}
    if command == "reach":
        others = {name: SpeedAddress(**raw) for name, raw in message["others"].items() if name != part.report.name}
        with ThreadPoolExecutor(max(1, len(others))) as pool:
            return {"why": dict(zip(others, pool.map(why_unreachable, others.values()), strict=True))}
    if command == "look":
        return _look(Path(str(message["mark"])), str(message["content"]), part.output_dir)
    if command == "speed":
        target = str(message["target"])
        seconds = min(float(message["seconds"]), SPEED_SECONDS * 5)
        try:
            speed = measure(part.report.name, target, SpeedAddress(**message["address"]), seconds)
        except OSError:
            return {}
        return {"speed": asdict(speed)}
    if command == "sum":
        return _sum(message["request"], part)
    return {}


def _look(mark: Path, content: str, output_dir: Path) -> dict[str, Any]:
    """A mark is beside or in output_dir and has its prefix: nothing else is read for anybody."""
    if not mark.name.startswith(MARK_PREFIX) or mark.parent not in (output_dir, *output_dir.parents):
        return {"why": f"output_dir is {output_dir} here, the first node wrote to {mark.parent}"}
    began = time.monotonic()
    while True:
        try:
            found = mark.read_text("ascii")
        except OSError as error:
            found, why = "", error.strerror or str(error)
        else:
            why = "another content"
        after_s = time.monotonic() - began
        if found == content:
            return {"after_s": round(after_s, 3)}
        if after_s > SEEN_WITHIN_S:
            return {"why": f"not there after {SEEN_WITHIN_S:g} s ({why})"}
        time.sleep(0.02)


def _report(raw: Mapping[str, Any]) -> NodeReport:
    return NodeReport(**{**raw, "findings": tuple(tuple(finding) for finding in raw["findings"])})
