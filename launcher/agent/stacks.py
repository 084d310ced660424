"""Where every rank is in its program, taken before ranks that hang are killed: by py-spy, and NCCL's flight recorder.

Everything here is bounded, by some 3 s together, because the ranks stand still meanwhile. What cannot be had is
said in the place where it would have been.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from launcher.agent.generation import RankProcess
from launcher.host.local_folder import local_folder

PYTHON_WITHIN_S = 1.5
NATIVE_WITHIN_S = 1.5
_NUM_FRAMES = 4
_FLIGHT_WITHIN_S = 1.2  # NCCL's monitor looks at its pipe once a second

_PROCESS = re.compile(r"^Process (\d+):")
_PYTHON_FRAME = re.compile(r"^\s+(.+ \((?:.*/)?[^()/]+\.py:\d+\))$")

_FLIGHT_NAME = "nccl-rank-"
FLIGHT_FILE_VARIABLE = "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"
FLIGHT_PIPE_VARIABLE = "TORCH_NCCL_DEBUG_INFO_PIPE_FILE"
_OF_THE_USER = {FLIGHT_FILE_VARIABLE, FLIGHT_PIPE_VARIABLE, "TORCH_FR_DUMP_TEMP_FILE"}


def find_py_spy() -> str | None:
    beside = Path(sys.executable).with_name("py-spy")
    return str(beside) if os.access(beside, os.X_OK) else shutil.which("py-spy")


def take_stacks(pids: Mapping[int, int]) -> dict[int, str]:
    """The Python stacks of these ranks' processes, all at once, without pausing any. Never raises for a rank that
    cannot be looked into."""
    program = find_py_spy()
    if program is None:
        return dict.fromkeys(pids, "no stack: py-spy is not installed (pip install py-spy)\n")
    return {rank: said for rank, (_, said) in _dump(program, pids, ["--nonblocking"], PYTHON_WITHIN_S).items()}


def with_native_frames(stacks: Mapping[int, str], pids: Mapping[int, int]) -> dict[int, str]:
    """The same with native frames where they are to be had in time. `pids`: of ranks whose process may be paused for
    it: not of those that are stopped already."""
    program = find_py_spy()
    if program is None:
        return dict(stacks)
    taken = _dump(program, pids, ["--native"], NATIVE_WITHIN_S)
    return {**stacks, **{rank: said for rank, (is_whole, said) in taken.items() if is_whole}}


def _dump(program: str, pids: Mapping[int, int], options: list[str], within_s: float) -> dict[int, tuple[bool, str]]:
    deadline = time.monotonic() + within_s
    started = {
        rank: subprocess.Popen(
            [program, "dump", "--pid", str(pid), *options],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        for rank, pid in pids.items()
    }
    dumps = {}
    for rank, process in started.items():
        try:
            said, _ = process.communicate(timeout=max(0.01, deadline - time.monotonic()))
            dumps[rank] = (process.returncode == 0, said)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            dumps[rank] = (False, f"no stack: py-spy did not answer within {within_s:.1f} s\n")
    return dumps


def innermost_frames(stack: str) -> str:
    """The Python functions, files and lines that the main thread is in, from the innermost outwards; "" where the stack
    does not say. A few: the innermost one is often a wait of the standard library."""
    process = _PROCESS.match(stack)
    main = f"Thread {process[1]} " if process else ""
    inside = False
    frames = []
    for line in stack.splitlines():
        if line.startswith("Thread "):
            inside = '"MainThread"' in line or (bool(main) and line.startswith(main))
        elif inside and (found := _PYTHON_FRAME.match(line)):
            frames.append(found[1])
    return " < ".join(frames[:_NUM_FRAMES])


class FlightRecorder:
    """NCCL's record of its latest collectives, on the GPUs of this node. What the user has set stays as it is."""

    def __init__(self, logs: Path, pipes: Path, environ: Mapping[str, str]) -> None:
        """`pipes`: a folder on a disk of this machine, made when it is needed."""
        self._logs, self._pipes, self._environ = logs, pipes, environ

    def variables(self, generation: int) -> dict[str, str]:
        """For the ranks of a generation."""
        if self._environ.keys() & _OF_THE_USER:
            return {}
        folder = self._logs / f"gen-{generation}"
        for made in (folder, self._pipes):
            made.mkdir(parents=True, exist_ok=True)
        return {FLIGHT_FILE_VARIABLE: str(folder / _FLIGHT_NAME), FLIGHT_PIPE_VARIABLE: str(self._pipes / "rank-")}

    def ask(self, ranks: range) -> None:
        """Have every rank write its dump; returns when there was time for it."""
        asked = False
        for rank in ranks:
            with suppress(OSError):  # no NCCL, or not yet: nobody reads there
                fd = os.open(self._pipes / f"rank-{rank}.pipe", os.O_WRONLY | os.O_NONBLOCK)
                try:
                    os.write(fd, b"1\n")
                finally:
                    os.close(fd)
                asked = True
        if asked:
            time.sleep(_FLIGHT_WITHIN_S)

    def close(self) -> None:
        shutil.rmtree(self._pipes, ignore_errors=True)


def flight_recorder(output_dir: Path, logs: Path, environ: Mapping[str, str], node: str) -> FlightRecorder | None:
    """None where this user has no folder for the pipes; then NCCL writes where it does by itself."""
    try:
        return FlightRecorder(logs, local_folder(output_dir) / f"nccl-{node}", environ)
    except OSError:
        return None


def flight_dumps_beside(ranks: Sequence[RankProcess]) -> list[Path]:
    """What NCCL has written for these ranks, when asked or by itself."""
    beside = (process.log_path.with_name(f"{_FLIGHT_NAME}{process.rank}") for process in ranks)
    return [path for path in beside if path.is_file()]
