"""A machine that loses its power: whatever had not reached the disk is gone, in any order.

What survives such a loss is what was synced. strace shows, from outside, that everything was when a checkpoint got its
name; what a write that was lost leaves of a file is in test_disk_damage.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.fault.harness import Job, Run
from tests.fault.trouble import with_strace

MakeJob = Callable[..., Job]
_WRITES = "write,pwrite64,writev,pwritev,pwritev2,ftruncate,fallocate,copy_file_range,sendfile,splice"
_SYNCS = "fsync,fdatasync"
_NAMES = "rename,renameat,renameat2"
_CALL = re.compile(r"\d+ +(?P<name>\w+)\((?P<arguments>.*)\) += (?P<result>-?\d+)")
_RESUMED = re.compile(r"\d+ +<\.\.\. \w+ resumed>(?P<rest>.*)")
_DESCRIPTOR = re.compile(r"\d+<(/[^>]*)>")
_PATHS = re.compile(r'"([^"]*)"')


@dataclass
class Trace:
    """The calls of a run in the order in which they ended. `renames`: (index, old path, new path)."""

    last_write: dict[str, int] = field(default_factory=dict)
    syncs: dict[str, list[int]] = field(default_factory=dict)
    renames: list[tuple[int, str, str]] = field(default_factory=list)

    @staticmethod
    def read(path: Path) -> Trace:
        trace = Trace()
        for index, (name, arguments) in enumerate(_calls(path)):
            if name in _NAMES.split(","):
                old, new = _PATHS.findall(arguments)
                trace._rename(index, old, new)
            elif name in _SYNCS.split(","):
                for file in _DESCRIPTOR.findall(arguments)[:1]:
                    trace.syncs.setdefault(file, []).append(index)
            else:
                # copy_file_range has the target second, sendfile first; to count both as written is only stricter.
                for file in _DESCRIPTOR.findall(arguments):
                    trace.last_write[file] = index
        return trace

    def _rename(self, index: int, old: str, new: str) -> None:
        self.renames.append((index, old, new))
        if old in self.last_write:  # a temporary name: its content goes with it
            self.last_write[new] = self.last_write.pop(old)
            self.syncs[new] = self.syncs.pop(old, [])

    def was_synced(self, path: str, before: int) -> bool:
        """After its last write, and before the call of this index."""
        return any(self.last_write.get(path, -1) < sync < before for sync in self.syncs.get(path, []))


def _calls(path: Path) -> Iterator[tuple[str, str]]:
    """(name, arguments) of each call that succeeded."""
    begun: dict[str, str] = {}
    for line in path.read_text("utf-8", "replace").splitlines():
        pid = line.split(" ", 1)[0]
        if line.endswith("<unfinished ...>"):
            begun[pid] = line.removesuffix("<unfinished ...>").rstrip()
            continue
        resumed = _RESUMED.match(line)
        call = _CALL.match(begun.pop(pid, "") + resumed["rest"] if resumed else line)
        if call and int(call["result"]) >= 0:
            yield call["name"], call["arguments"]


def test_everything_is_on_disk_before_a_checkpoint_gets_its_name(make_job: MakeJob, tmp_path: Path) -> None:
    job = make_job(training={"max_steps": 4}, checkpoint={"every_steps": 2})
    log = tmp_path / "trace"
    calls = f"trace={_WRITES},{_SYNCS},{_NAMES}"
    with Run(job, (), {}, prefix=with_strace("-y", "-s", "0", "-o", log, "--seccomp-bpf", "-e", calls)) as run:
        assert run.wait(180) == 0, run.log
    trace = Trace.read(log)
    for name in ("checkpoint-2", "checkpoint-4", "final"):
        folder = job.output_dir / name
        ((index, staged, _),) = [entry for entry in trace.renames if entry[2] == str(folder)]
        below = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))
        assert "MANIFEST.json" in below
        unsynced = [path for path in below if not trace.was_synced(f"{staged}/{path}", before=index)]
        assert unsynced == [], f"{name}: not synced before the rename"
        manifest_at = next(at for at, _, new in trace.renames if new == f"{staged}/MANIFEST.json")
        assert any(manifest_at < sync < index for sync in trace.syncs.get(staged, [])), "the manifest's own name"
        assert any(sync > index for sync in trace.syncs.get(str(job.output_dir), [])), "the checkpoint's name"
