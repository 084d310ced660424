"""The outside world of detection: files, names of this machine, DNS, scontrol. Every call is bounded."""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from launcher.host.nics import read_nics
from launcher.platforms.place import Outside

RESOLVE_S = 3.0
_LOOK_UPS = 32  # at a time
SCONTROL_S = 10.0


def real_outside() -> Outside:
    return Outside(_own_names(), _read_text, resolve_names, _scontrol, _why_unreadable)


def _own_names() -> frozenset[str]:
    return frozenset({socket.gethostname(), *(address for nic in read_nics() for address in nic.addresses)})


def _read_text(path: str) -> str | None:
    try:
        return Path(path).read_text("utf-8")
    except (OSError, UnicodeDecodeError):
        return None


def _why_unreadable(path: str) -> str:
    try:
        Path(path).read_text("utf-8")
    except OSError as error:
        return (error.strerror or type(error).__name__).lower()
    except UnicodeDecodeError as error:
        return f"it is no text in UTF-8 (byte {error.start})"
    return "it can be read now; try again"


def resolve_names(names: Sequence[str]) -> Mapping[str, frozenset[str]]:
    """All names at once: a resolver that does not answer costs `RESOLVE_S` in all, not for each name."""
    found: dict[str, frozenset[str]] = {}

    def look_up(some: Sequence[str]) -> None:
        for name in some:
            with contextlib.suppress(OSError, UnicodeError):
                found[name] = frozenset(str(info[4][0]) for info in socket.getaddrinfo(name, None))

    threads = [
        threading.Thread(target=look_up, args=(names[start::_LOOK_UPS],), name="look-up of hosts", daemon=True)
        for start in range(min(_LOOK_UPS, len(names)))
    ]
    deadline = time.monotonic() + RESOLVE_S
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return dict(found)


def _scontrol(nodelist: str) -> str | None:
    program = shutil.which("scontrol")
    if program is None:
        return None
    try:
        done = subprocess.run(
            [program, "show", "hostnames", nodelist],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=SCONTROL_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout
