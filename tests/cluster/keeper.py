"""Removes a test cluster when its owner says so, or when its owner is gone.

Run as `python -m tests.cluster.keeper FOLDER`, in a session of its own, so that neither Ctrl-C nor SIGTERM nor SIGKILL
of the test run leaves anything behind. It reads lines from standard input: the PID of each process that holds a
namespace, then `end`. On `end`, on end of file, or on the owner's death it kills every process of these namespaces and
removes FOLDER.
Links, qdiscs, rules and mounts live in the namespaces and go with them.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import sys
from pathlib import Path

from tests.cluster.processes import kill_in


def main() -> None:
    folder = Path(sys.argv[1])
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    os.chdir("/")
    held: list[int] = []  # file descriptors: a namespace that is open here keeps its inode number
    owner = os.pidfd_open(os.getppid())
    pending = b""
    print("ready", flush=True)
    while True:
        readable, _, _ = select.select([0, owner], [], [])
        chunk = os.read(0, 4096) if 0 in readable else b""
        *lines, pending = (pending + chunk).split(b"\n")
        for line in lines:
            if line.isdigit():
                try:
                    held.append(os.open(f"/proc/{int(line)}/ns/net", os.O_RDONLY))
                except OSError:
                    continue  # the holder is gone, and its namespace with it
        if not chunk or b"end" in lines:
            break
    kill_in({os.fstat(descriptor).st_ino for descriptor in held}, within_s=30)
    shutil.rmtree(folder, ignore_errors=True)
    if folder.exists():
        sys.exit(f"could not remove {folder}")


if __name__ == "__main__":
    main()
