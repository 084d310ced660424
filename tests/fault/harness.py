"""Runs the real program on a tiny model, watches its events, hurts its processes, and looks for what is left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
_MARK = "FTLAUNCH_TEST_ID"


def base_config(tiny: Path, output_dir: Path) -> dict[str, Any]:
    """A job that takes about ten seconds of start and a few milliseconds a step."""
    return {
        "output_dir": str(output_dir),
        "model": {"path": str(tiny / "model")},
        "method": "lora",
        "lora": {"r": 4, "dropout": 0.1},
        "data": {"train": str(tiny / "train.jsonl"), "max_length": 32},
        "precision": "fp32",
        "deepspeed": {"stage": 2},
        "training": {"max_steps": 12, "per_device_train_batch_size": 2, "learning_rate": 0.01, "logging_steps": 1},
        "checkpoint": {"every_steps": 3, "keep": 100},
        "cluster": {"nproc_per_node": 2},
        "restart": {"backoff_seconds": 0.1},
    }


def merged(config: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    result = dict(config)
    for key, value in changes.items():
        result[key] = (
            merged(result[key], value) if isinstance(value, dict) and isinstance(result.get(key), dict) else value
        )
    return {key: value for key, value in result.items() if value is not None}


class Job:
    """One output folder and its job.yaml; `start` may be called again and again."""

    def __init__(self, folder: Path, config: dict[str, Any]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / "job.yaml"
        self.output_dir = Path(config["output_dir"])
        self.configure(config)

    def configure(self, config: dict[str, Any]) -> None:
        self.config = config
        self.path.write_text(json.dumps(config, indent=1), "utf-8")  # JSON is YAML

    def start(self, *arguments: str, environ: dict[str, str] | None = None) -> Run:
        return Run(self, arguments, environ or {})

    def run(self, *arguments: str, timeout_s: float = 180, environ: dict[str, str] | None = None) -> Run:
        """Start, wait for the end, and make sure that nothing is left."""
        with self.start(*arguments, environ=environ) as run:
            run.wait(timeout_s)
        return run

    def events(self, name: str | None = None) -> list[dict[str, Any]]:
        path = self.output_dir / "ftlaunch" / "events" / "n0.jsonl"
        try:
            lines = path.read_bytes().splitlines(keepends=True)
        except FileNotFoundError:  # not yet; or just being replaced, on an object mount
            return []
        events = [json.loads(line) for line in lines if line.endswith(b"\n")]
        return [event for event in events if name is None or event["event"] == name]

    def checkpoint(self, step: int) -> Path:
        return self.output_dir / f"checkpoint-{step}"


class Run:
    """One started `ftlaunch`. Everything that it starts carries a mark in its environment, by which leftovers are
    found."""

    def __init__(
        self, job: Job, arguments: tuple[str, ...], environ: dict[str, str], *, prefix: list[str] | None = None
    ) -> None:
        self.job = job
        self.mark = uuid.uuid4().hex
        self._events_before = len(job.events())
        self.log_path = job.path.parent / f"run-{self.mark[:6]}.log"
        env = {**os.environ, "HF_HUB_OFFLINE": "1", _MARK: self.mark, "PYTHONPATH": str(ROOT), **environ}
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen(
                [*(prefix or []), sys.executable, "-m", "launcher", "--config", str(job.path), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=env,
                start_new_session=True,
            )

    # -- watching ------------------------------------------------------------------------------------------------------

    @property
    def log(self) -> str:
        return self.log_path.read_text("utf-8", "replace")

    def events(self, name: str | None = None) -> list[dict[str, Any]]:
        """This start's events."""
        events = self.job.events()[self._events_before :]
        return [event for event in events if name is None or event["event"] == name]

    def until(self, condition: Callable[[], bool], what: str, timeout_s: float = 120) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            if self.process.poll() is not None and not condition():
                raise AssertionError(f"ended with {self.process.returncode} before {what}\n{self.log}")
            if time.monotonic() > deadline:
                raise AssertionError(f"not within {timeout_s:.0f} s: {what}\n{self.log}")
            time.sleep(0.005)

    def until_event(self, name: str, timeout_s: float = 120, **fields: Any) -> None:
        def seen() -> bool:
            return any(all(e.get(k) == v for k, v in fields.items()) for e in self.events(name))

        self.until(seen, f"event {name} {fields}", timeout_s)

    def until_step(self, step: int, timeout_s: float = 120) -> None:
        """Until any rank has finished `step` in this start."""
        path = self.job.output_dir / "ftlaunch" / "samples" / "n0.jsonl"

        def reached() -> bool:
            generations = [e["gen"] for e in self.events("generation_started")]
            if not path.is_file() or not generations:
                return False
            records = [json.loads(line) for line in path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]
            return any(r["step"] >= step and r["gen"] >= min(generations) for r in records)

        self.until(reached, f"step {step}", timeout_s)

    def wait(self, timeout_s: float = 180) -> int:
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {timeout_s:.0f} s\n{self.log}") from None

    # -- hurting -------------------------------------------------------------------------------------------------------

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def rank_pid(self, rank: int) -> int:
        """The pid of a running rank, found by RANK in what the rank calls itself (its log descriptor)."""
        suffix = f"/rank-{rank}.log"
        for pid in self.pids():
            try:
                target = os.readlink(f"/proc/{pid}/fd/1")
                group_leader = os.getpgid(pid) == pid
            except OSError:
                continue
            if target.endswith(suffix) and group_leader:
                return pid
        raise AssertionError(f"no process of rank {rank}\n{self.log}")

    def has_rank(self, rank: int) -> bool:
        try:
            return self.rank_pid(rank) > 0
        except AssertionError:
            return False

    def fork_server_pid(self) -> int:
        for pid in self.pids():
            try:
                target = os.readlink(f"/proc/{pid}/fd/1")
                parent = _parent(pid)
            except OSError:
                continue
            if target.endswith("/fork-server.log") and parent == self.process.pid:
                return pid
        raise AssertionError(f"no fork server\n{self.log}")

    # -- leftovers -----------------------------------------------------------------------------------------------------

    def pids(self) -> list[int]:
        needle = f"{_MARK}={self.mark}".encode()
        return [pid for pid in _all_pids() if needle in _environ(pid)]

    def left_after(self, timeout_s: float = 15) -> list[str]:
        """What of this run is still there after at most `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while (pids := self.pids()) and time.monotonic() < deadline:
            time.sleep(0.02)
        return [f"{pid} {_command(pid)}" for pid in pids]

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *exc: object) -> None:
        """Whatever the test did: nothing of this run survives it."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        left = self.left_after(15)
        for pid in self.pids():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        if exc[0] is None:
            assert not left, f"left behind: {left}\n{self.log}"


def _all_pids() -> Iterator[int]:
    for name in os.listdir("/proc"):
        if name.isdigit():
            yield int(name)


def _environ(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
    except OSError:
        return "?"


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[1])
