"""The fork server: imports the training stack once and forks a rank for every request.

Invariants:
- it never touches CUDA (a forked child could not use it then), and runs a single thread, so that forking is safe;
- a forked rank becomes the *agent's* child (double fork; the agent is a subreaper): the agent gets its exit status,
  and the fork server may die without harm to running ranks;
- every rank asks the kernel for SIGKILL when the agent dies.

Protocol, one SOCK_SEQPACKET socket on descriptor `FTLAUNCH_FORKSERVER_FD`: the agent sends a request (JSON: spec path,
the rank's own environment variables) with descriptors (the rank's end of its link, its log file, and memory that the
agent owns: its progress record, and slots for snapshots, if any); the server answers `{"pid": ...}`. The first thing
that the server sends is `{"ready": ...}`. With `FTLAUNCH_FORKSERVER_TEMPLATE` (path of a spec) it then makes a
template, which has the ranks' inputs as well (`template.py`): notices `{"template": ...}` tell how far that is, and
requests are handed on to it. The answer `{"stale": true}` means that there is another template now, to be asked once it
is ready.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from launcher.process import die_with_parent, let_trace, wait_until_adopted
from launcher.train.late_compile import compile_when_called
from launcher.train.template import Template

if TYPE_CHECKING:
    from launcher.train.inputs import Inputs

FD_VARIABLE = "FTLAUNCH_FORKSERVER_FD"
ONCE_VARIABLE = "FTLAUNCH_FORKSERVER_ONCE"  # become the first rank instead of forking (where CUDA cannot be forked)
TEMPLATE_VARIABLE = "FTLAUNCH_FORKSERVER_TEMPLATE"
_REQUEST_BYTES = 1 << 20
_MAX_DESCRIPTORS = 16
# What DeepSpeed and PEFT import while an engine and an adapter are made: 0.2 s of every rank's start.
_IMPORTED_LATE = (
    "deepspeed.module_inject.auto_ep_layer",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "peft.tuners.lora.bnb",
    "peft.utils.transformers_weight_conversion",
    "torch.utils.serialization.config",
)
_OPTIMIZERS_THAT_COMPILE = ("muon", "bnb", "8bit", "4bit", "ademamix")  # parts of their names
_STALE: dict[str, Any] = {"stale": True}  # a template's answer: the files that it has read are others by now


def main() -> int:
    agent_pid = os.getppid()
    die_with_parent(agent_pid)
    server = socket.socket(fileno=int(os.environ.pop(FD_VARIABLE)))
    # The parent's terminal signals are the agent's business.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    spec_path = os.environ.pop(TEMPLATE_VARIABLE, "")
    started = time.monotonic()
    import_stack(spec_path)
    gc.collect()
    gc.freeze()  # the collector must not touch, and so copy, the pages shared with the ranks
    facts = {
        "ready": True,
        "import_seconds": round(time.monotonic() - started, 3),
        "num_threads": len(os.listdir("/proc/self/task")),
        "cuda_touched": cuda_touched(),
    }
    server.send(json.dumps(facts).encode())
    if os.environ.pop(ONCE_VARIABLE, None):
        for packet, fds in _requests(server):
            server.send(json.dumps({"pid": os.getpid()}).encode())
            server.close()
            _become_rank(json.loads(packet), fds, None)
        return 0
    return _serve(server, agent_pid, "" if facts["cuda_touched"] else spec_path)


def _serve(server: socket.socket, agent_pid: int, spec_path: str) -> int:
    template = _new_template(spec_path, server, agent_pid)
    for packet, fds in _requests(server):
        answer = template.ask(packet, fds) if template else None
        if template is not None and (answer is None or answer == _STALE):
            template.end()
            # One that somebody has killed is not made again: it may have been for its memory.
            template = _new_template(spec_path, server, agent_pid) if answer else None
        if answer is None:
            answer = {"pid": fork_rank(json.loads(packet), fds, agent_pid=agent_pid, ours=(server,))}
        for fd in fds:
            os.close(fd)
        server.send(json.dumps(answer).encode())
    return 0


def _requests(end: socket.socket) -> Iterator[tuple[bytes, list[int]]]:
    """Until the other end is closed."""
    while True:
        try:
            packet, fds, _, _ = socket.recv_fds(end, _REQUEST_BYTES, _MAX_DESCRIPTORS)
        except InterruptedError:
            continue
        if not packet:
            return
        yield packet, fds


def _new_template(spec_path: str, server: socket.socket, agent_pid: int) -> Template | None:
    if not spec_path:
        return None

    def serve(requests: socket.socket, inputs: Inputs) -> NoReturn:
        for packet, fds in _requests(requests):
            answer = _STALE
            if inputs.are_current:
                pid = fork_rank(json.loads(packet), fds, agent_pid=agent_pid, ours=(server, requests), inputs=inputs)
                answer = {"pid": pid}
            for fd in fds:
                os.close(fd)
            requests.send(json.dumps(answer).encode())
        os._exit(0)

    return Template(Path(spec_path), server, serve)


def import_stack(spec_path: str = "") -> None:
    """Everything a rank would import, including what Transformers loads lazily.

    `spec_path`: of the job, where it is known; what its steps compile has to be imported here, and not by each rank.
    """
    with nullcontext() if may_compile(spec_path) else compile_when_called():
        import accelerate  # noqa: F401
        import deepspeed  # noqa: F401
        import peft  # noqa: F401
        from transformers import (  # noqa: F401
            AutoModelForCausalLM,
            AutoTokenizer,
            Trainer,
            TrainingArguments,
        )
        from transformers.models.llama import modeling_llama  # noqa: F401

        for name in _IMPORTED_LATE:
            with suppress(ImportError):  # another version has other modules; it imports them when it needs them
                importlib.import_module(name)

    import launcher.config.models
    import launcher.train.arguments
    import launcher.train.main
    import launcher.train.model
    import launcher.train.program  # noqa: F401


def may_compile(spec_path: str) -> bool:
    """Whether steps may call what DeepSpeed and bitsandbytes have compiled; True where that is not known."""
    if not spec_path:
        return True
    spec = json.loads(Path(spec_path).read_text("utf-8"))
    optimizers = json.dumps([spec["config"].get("training", {}), spec["ds_config"].get("optimizer", {})]).lower()
    return spec["config"].get("method") == "qlora" or any(name in optimizers for name in _OPTIMIZERS_THAT_COMPILE)


def cuda_touched() -> bool:
    """True when this process holds a CUDA context or device: then ranks must not be forked from it."""
    import torch

    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return True
    targets = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            targets.append(os.readlink(f"/proc/self/fd/{fd}"))
        except OSError:
            continue
    return any(target.startswith("/dev/nvidia") and target != "/dev/nvidiactl" for target in targets)


def fork_rank(
    request: dict[str, Any],
    fds: Sequence[int],
    *,
    agent_pid: int,
    ours: Sequence[socket.socket],
    inputs: Inputs | None = None,
) -> int:
    """Fork twice, so that the rank is adopted by the agent; the rank's pid. `ours`: what a rank is not to hold."""
    read_end, write_end = os.pipe()
    server_pid = os.getpid()
    middle = os.fork()
    if middle == 0:
        die_with_parent(server_pid)  # once the agent has ended the server, nothing is forked any more
        os.close(read_end)
        os.setsid()
        rank = os.fork()
        if rank:
            os.write(write_end, str(rank).encode())
            os._exit(0)
        os.close(write_end)
        for end in ours:
            end.close()
        wait_until_adopted(agent_pid)
        die_with_parent(agent_pid)
        os.setpgid(0, 0)  # its own process group, so that its workers can be ended with it
        _become_rank(request, fds, inputs)
    os.close(write_end)
    with os.fdopen(read_end) as pipe:
        pid = int(pipe.read())
    os.waitpid(middle, 0)
    return pid


def _become_rank(request: dict[str, Any], fds: Sequence[int], inputs: Inputs | None) -> NoReturn:
    """Take over environment, link, log and memory, run, and leave without the server's exit handlers."""
    link_fd, log_fd, *memory = fds
    os.dup2(log_fd, 1)
    os.dup2(log_fd, 2)
    os.environ.update(request["environ"])
    status = 1
    try:
        status = run(Path(request["spec"]), link_fd, memory, inputs)
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else 1
    except BaseException as error:  # noqa: BLE001 - the process's edge: the traceback is the evidence for the agent
        from launcher.train.main import write_traceback

        with suppress(OSError):
            write_traceback(error)
    finally:
        with suppress(OSError):  # the log is on a full disk
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def run(spec_path: Path, link_fd: int, memory: Sequence[int], inputs: Inputs | None) -> int:
    """One rank, with SIGTERM turned into a notice for the agent."""
    from launcher.link import STOP_SIGNALS, Link
    from launcher.plan.spec import RankSpec
    from launcher.train.main import run_rank

    end = socket.socket(fileno=link_fd)
    end.setblocking(False)
    link = Link(end)
    # From C, so that it works while the interpreter waits in a collective: the agent hears of the signal, the rank
    # trains on
    # until the agreed step.
    for number in STOP_SIGNALS:
        signal.signal(number, lambda *_: None)
    signal.set_wakeup_fd(end.fileno(), warn_on_full_buffer=False)
    os.register_at_fork(after_in_child=_forget_parent_signals)
    let_trace(os.getppid())
    link.send("hello", pid=os.getpid())
    return run_rank(RankSpec.from_json(spec_path.read_text("utf-8")), link, memory, inputs)


def _forget_parent_signals() -> None:
    """DataLoader workers and other children of a rank die of these signals as usual."""
    from launcher.link import STOP_SIGNALS

    signal.set_wakeup_fd(-1)
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_DFL)


if __name__ == "__main__":
    raise SystemExit(main())
