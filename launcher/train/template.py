"""The template: a fork of the fork server that has made the ranks' inputs, too, and forks ranks in its place.

A rank that comes from it has tokenizer, data and (where all ranks have the same) the model at once, and shares their
pages with the others until somebody writes to them.

Invariant: it is held to what the fork server is held to (a single thread, no CUDA). Where it is not, or where making
the inputs fails, it ends, and ranks come from the fork server and make their own: they say what is wrong.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from launcher.process import die_with_parent

_ANSWER_BYTES = 65536
_TELL_EVERY_S = 5.0
_NO_LOADER_THREADS = "HF_DEACTIVATE_ASYNC_LOAD"  # of Transformers


class Template:
    """The fork server's end of a template."""

    def __init__(self, spec_path: Path, agent: socket.socket, serve: Callable[[socket.socket, Any], NoReturn]) -> None:
        """`agent`: where the template tells how far it is; `serve(requests, inputs)` is called in it when it is
        ready."""
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        server_pid = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            die_with_parent(server_pid)
            self._socket.close()
            _live(spec_path, agent, theirs, serve)
        theirs.close()

    def ask(self, packet: bytes, fds: Sequence[int]) -> dict[str, Any] | None:
        """Its answer to a request; None when it has ended before. Raises EOFError when it ends in the middle: nobody
        knows then whether there is a rank."""
        try:
            socket.send_fds(self._socket, [packet], list(fds))
        except OSError:
            return None
        try:
            answer = self._socket.recv(_ANSWER_BYTES)
        except ConnectionResetError:  # it ended with the request unread
            return None
        if not answer:
            raise EOFError("the template ended while it forked a rank")
        found: dict[str, Any] = json.loads(answer)
        return found

    def end(self) -> None:
        """Without its socket it ends by itself; it is collected here."""
        self._socket.close()
        os.waitpid(self.pid, 0)


def _live(
    spec_path: Path, agent: socket.socket, requests: socket.socket, serve: Callable[[socket.socket, Any], NoReturn]
) -> NoReturn:
    try:
        inputs = _make(spec_path, agent)
    except BaseException as error:  # noqa: BLE001 - the process's edge: ranks meet the same, and report it
        _tell(agent, state="failed", reason=f"{type(error).__name__}: {error}"[:500])
        os._exit(1)
    _tell(agent, state="ready")
    try:
        serve(requests, inputs)
    except BaseException:  # noqa: BLE001 - the process's edge
        traceback.print_exc()
    os._exit(1)


def _make(spec_path: Path, agent: socket.socket) -> Any:
    import torch
    import tqdm

    from launcher.config.models import JobConfig
    from launcher.plan.spec import RankSpec
    from launcher.train.forkserver import cuda_touched
    from launcher.train.inputs import make_inputs

    spec = RankSpec.from_json(spec_path.read_text("utf-8"))
    told_at_s, phase = time.monotonic(), ""

    def enter(name: str) -> None:
        nonlocal phase
        phase = name
        _tell(agent, state="working", phase=name)

    def tell_records(count: int) -> None:
        nonlocal told_at_s
        if time.monotonic() - told_at_s > _TELL_EVERY_S:
            told_at_s = time.monotonic()
            _tell(agent, state="working", phase=phase, done=f"{count} records")

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    # Threads of a loader or of OpenMP would not be there in a forked rank, but what they had locked would.
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    os.environ[_NO_LOADER_THREADS] = "1"
    tqdm.tqdm.monitor_interval = 0
    inputs = make_inputs(spec, JobConfig.model_validate(spec.config), enter, tell_records)
    del os.environ[_NO_LOADER_THREADS]
    torch.set_num_threads(num_threads)
    threads = len(os.listdir("/proc/self/task"))
    if threads > 1:
        raise RuntimeError(f"{threads - 1} threads are left of loading the inputs")
    if cuda_touched():
        raise RuntimeError("loading the inputs has touched CUDA")
    gc.collect()
    gc.freeze()
    sys.stdout.flush()
    return inputs


def _tell(agent: socket.socket, **fields: str) -> None:
    agent.send(json.dumps({"template": fields}).encode())
