"""How one agent leads many: joining, then heartbeats. Real membership, real transport, real sockets.

    python scripts/bench_scale.py [--agents 1000] [--seconds 60] [--heartbeat 0.5] [--vote 1.0] [--seeds all|master]

One process is the coordinator: the agent that all follow, exactly as it runs on node 0, with its memory written and
fsynced. Another process holds all the other agents, each with its own membership, its own port and its own connections;
they start no ranks and keep their memory in memory. Phase 1: all listen, nobody has said a word. Phase 2, the one with
the bound: from the first word until the last agent has entered the first generation. Phase 3: heartbeats. The
coordinator's CPU is its process's own time (user and system), not the other's.
"""

from __future__ import annotations

import argparse
import heapq
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from launcher.cluster.codec import to_json
from launcher.cluster.effects import AskClaim, Effect, Enter, GiveUp, Persist, Quit, Say, Send
from launcher.cluster.membership import Membership
from launcher.cluster.model import Durable, Identity, Node, Timing, Wanted
from launcher.event_loop import EventLoop
from launcher.transport.transport import Transport

BOUND_S = 60.0
VERSIONS = {
    "torch": "2.13.0",
    "deepspeed": "0.19.8",
    "transformers": "5.24.0",
    "peft": "0.21.2",
    "accelerate": "1.15.0",
}
CONTRACT = {
    "device": "cuda",
    "precision": "bf16",
    "zero stage": "2",
    "method": "lora",
    "ranks": "8000",
    "folder": "0f" * 16,
}


class Agent:
    """One node without ranks. memory: where it keeps what it must not forget; None: nowhere."""

    def __init__(self, loop: EventLoop, name: str, memory: Path | None, say: bool) -> None:
        self.entered_at: dict[int, float] = {}
        self.quits: list[str] = []
        self.given_up = ""
        self._say_at = 0.0
        self._memory, self._says = memory, say
        self._membership: Membership | None = None
        self.transport = Transport(
            loop,
            token="0123456789abcdef0123456789abcdef",
            run_id="scale",
            host="127.0.0.1",
            port=0,
            on_message=lambda message: self._do(self._core.on_message(message, time.monotonic())),
            on_unreachable=lambda address: self._do(self._core.on_unreachable(address, time.monotonic())),
            say=self._say,
        )
        self.node = Node(name, f"127.0.0.1:{self.transport.port}", 8, os.urandom(16).hex())

    @property
    def _core(self) -> Membership:
        assert self._membership is not None
        return self._membership

    def prepare(self, seeds: list[str], wanted: Wanted, timing: Timing) -> None:
        self._membership = Membership(
            self.node,
            seeds=seeds,
            wanted=wanted,
            timing=timing,
            identity=Identity("5b" * 32, VERSIONS, CONTRACT),
            rng=random.Random(self.node.name),
            free_port=lambda: 29500,
        )

    def begin(self) -> None:
        self._do(self._core.on_start(time.monotonic()))

    def tick(self) -> None:
        if self._membership:
            self._do(self._core.on_tick(time.monotonic()))
        self.transport.tick()

    def _say(self, text: str) -> None:
        if self._says and time.monotonic() >= self._say_at:
            self._say_at = time.monotonic() + 1.0
            print(f"{self.node.name}: {text[:160]}", file=sys.stderr)

    def _do(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Send(address, message):
                    self.transport.send(address, message)
                case Persist(durable):
                    self._persist(durable)
                case AskClaim(base, value):
                    self._do(self._core.on_claim(base, value, time.monotonic()))
                case Enter(generation):
                    self.entered_at[generation.number] = time.monotonic()
                case Quit(_, reason):
                    self.quits.append(reason)
                case GiveUp(_, reason):
                    self.given_up = reason
                case Say(text):
                    self._say(text)

    def _persist(self, durable: Durable) -> None:
        if self._memory:
            temporary = self._memory.with_suffix(".tmp")
            with temporary.open("w", encoding="utf-8") as file:
                json.dump(to_json(durable), file)
                file.flush()
                os.fsync(file.fileno())
            temporary.rename(self._memory)


class Ticks:
    """Each agent's tick once a heartbeat, all at times of their own."""

    def __init__(self, agents: list[Agent], heartbeat_s: float) -> None:
        self.loop = EventLoop(self._run)
        self._agents, self._heartbeat_s = agents, heartbeat_s
        self._due: list[tuple[float, int]] = []

    def begin(self) -> None:
        now, rng = time.monotonic(), random.Random(0)
        self._due = sorted((now + rng.uniform(0, self._heartbeat_s), index) for index in range(len(self._agents)))

    def _run(self) -> None:
        now = time.monotonic()
        while self._due and self._due[0][0] <= now:
            at, index = heapq.heappop(self._due)
            self._agents[index].tick()
            heapq.heappush(self._due, (max(at + self._heartbeat_s, now), index))
        if self._due:
            self.loop.set_bound("tick", max(0.0, self._due[0][0] - now), lambda: None)


def play(num_agents: int, first: int, heartbeat_s: float, seconds: float, memory: Path | None) -> None:
    """One process's part: says its addresses, is told all, begins at the moment it is told, and reports."""
    agents: list[Agent] = []
    ticks = Ticks(agents, heartbeat_s)
    agents += [Agent(ticks.loop, f"n{first + i}", memory, say=first == 0) for i in range(num_agents)]
    tell(addresses=[agent.node.address for agent in agents])
    told = json.loads(sys.stdin.readline())
    for agent in agents:
        agent.prepare(told["seeds"], Wanted(told["num_nodes"], told["num_nodes"]), Timing(**told["timing"]))
    tell(ready=True)
    begin_at = json.loads(sys.stdin.readline())["begin_at"]
    time.sleep(max(0.0, begin_at - time.monotonic()))
    cpu = time.process_time()
    for agent in agents:
        agent.begin()
    ticks.begin()
    while not all(agent.entered_at for agent in agents) and time.monotonic() < begin_at + BOUND_S:
        ticks.loop.wait()
    num_in = sum(bool(agent.entered_at) for agent in agents)
    last = max((max(agent.entered_at.values(), default=0.0) for agent in agents), default=0.0)
    generations = sorted({number for agent in agents for number in agent.entered_at})
    tell(entered=num_in, generations=generations, last_at=last, cpu_s=time.process_time() - cpu)
    settled = time.monotonic() + 3.0
    while time.monotonic() < settled:
        ticks.loop.wait()
    cpu, start = time.process_time(), time.monotonic()
    while time.monotonic() < start + seconds:
        ticks.loop.wait()
    cpu_s, wall_s = time.process_time() - cpu, time.monotonic() - start
    reasons = sorted({reason for agent in agents for reason in [*agent.quits, agent.given_up] if reason})
    running = sum(agent._core.running is not None for agent in agents)
    tell(cpu_s=cpu_s, wall_s=wall_s, running=running, reasons=reasons[:3])
    sys.stdin.readline()  # all have measured


def tell(**values: Any) -> None:
    print(json.dumps(values), flush=True)


class Player:
    """One of the two processes, seen from here."""

    def __init__(self, *arguments: str) -> None:
        command = [sys.executable, __file__, *arguments]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def hear(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("a process of the benchmark has died")
        heard: dict[str, Any] = json.loads(line)
        return heard

    def tell(self, **values: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(values) + "\n")
        self._process.stdin.flush()

    def end(self) -> None:
        self._process.kill()
        self._process.wait()


def measure(
    num_agents: int, seconds: float, heartbeat_s: float, vote_s: float, seeds: str, folder: Path
) -> dict[str, Any]:
    common = ("--seconds", str(seconds), "--heartbeat", str(heartbeat_s))
    leader = Player("--play", "1", "--first", "0", "--memory", str(folder / "n0.json"), *common)
    others = Player("--play", str(num_agents), "--first", "1", *common)
    try:
        addresses = leader.hear()["addresses"] + others.hear()["addresses"]
        known = addresses if seeds == "all" else addresses[:1]
        timing = {"heartbeat_s": heartbeat_s, "vote_s": vote_s}
        for player in (leader, others):
            player.tell(num_nodes=len(addresses), seeds=known, timing=timing)
        for player in (leader, others):
            player.hear()
        begin_at = time.monotonic() + 0.2
        for player in (leader, others):
            player.tell(begin_at=begin_at)
        joined = [leader.hear(), others.hear()]
        beaten = [leader.hear(), others.hear()]
    finally:
        leader.end()
        others.end()
    return {
        "agents": num_agents,
        "seeds": seeds,
        "entered": joined[0]["entered"] + joined[1]["entered"],
        "joined_s": round(max(joined[0]["last_at"], joined[1]["last_at"]) - begin_at, 2),
        "generations": joined[0]["generations"],
        "joining_cpu_s": {"coordinator": round(joined[0]["cpu_s"], 2), "others": round(joined[1]["cpu_s"], 2)},
        "heartbeat_s": heartbeat_s,
        "vote_s": vote_s,
        "coordinator_cpu_percent": round(100 * beaten[0]["cpu_s"] / beaten[0]["wall_s"], 1),
        "others_cpu_percent": round(100 * beaten[1]["cpu_s"] / beaten[1]["wall_s"], 1),
        "still_running": beaten[0]["running"] + beaten[1]["running"],
        "reasons": beaten[0]["reasons"] + beaten[1]["reasons"],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--agents", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=60.0, help="of heartbeats")
    parser.add_argument("--heartbeat", type=float, help="seconds; default: what a run of this size has")
    parser.add_argument("--vote", type=float, help="how long the answers to a question may take; default: as above")
    parser.add_argument("--seeds", choices=("all", "master"), default="all", help="addresses that every agent is given")
    for hidden in ("--play", "--first"):
        parser.add_argument(hidden, type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--memory", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.play:
        play(asked.play, asked.first, asked.heartbeat, asked.seconds, asked.memory)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        usual = Timing().of_size(asked.agents)
        heartbeat_s, vote_s = asked.heartbeat or usual.heartbeat_s, asked.vote or usual.vote_s
        figures = measure(asked.agents, asked.seconds, heartbeat_s, vote_s, asked.seeds, Path(folder))
    print(json.dumps(figures, indent=2))
    return 0 if figures["entered"] == figures["still_running"] == asked.agents + 1 else 1


if __name__ == "__main__":
    raise SystemExit(main())
