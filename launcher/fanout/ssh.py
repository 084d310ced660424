"""The `ssh` commands of a head. The user's own configuration decides wherever it says something.

Invariant: nothing ever asks (BatchMode), host keys are checked as the user has configured it, and no argument is
secret.
"""

from __future__ import annotations

import shlex
import site
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import launcher

CONNECT_S = 10
_ALIVE_EVERY_S, _ALIVE_COUNT = 5, 3  # a machine that falls silent is noticed after 15 s
_LOOK_S = 5.0

# A configuration made for people at a terminal must not get in the way of a command.
_FIXED = {
    "BatchMode": "yes",
    "RequestTTY": "no",
    "RemoteCommand": "none",
    "ForwardX11": "no",
    "ClearAllForwardings": "yes",
    "ControlMaster": "no",  # one that is there is used; ours would outlive its host's agent
}


def ssh_options(own: Mapping[str, str]) -> list[str]:
    """`own`: what the user's configuration says about this host, see `own_settings`."""
    options = dict(_FIXED)
    if own.get("serveraliveinterval", "0") in ("0", "300"):  # 300: Debian's default where BatchMode is set
        options |= {"ServerAliveInterval": str(_ALIVE_EVERY_S), "ServerAliveCountMax": str(_ALIVE_COUNT)}
    if own.get("connecttimeout", "none") in ("none", "0"):
        options["ConnectTimeout"] = str(CONNECT_S)
    return [part for name, value in options.items() for part in ("-o", f"{name}={value}")]


def node_argv(host: str, own: Mapping[str, str], environ: Mapping[str, str]) -> list[str]:
    """Starts the near end of the agent on `host`; it waits for the order on standard input."""
    return ["ssh", *ssh_options(own), "--", host, f"exec {_python(environ)} -m launcher.fanout.node"]


def try_argv(host: str, own: Mapping[str, str], environ: Mapping[str, str]) -> list[str]:
    """For a person: succeeds where `node_argv` does, and does nothing."""
    words = f"{_python(environ)} -c 'import launcher; print(launcher.__version__)'"
    return ["ssh", *ssh_options(own), "--", host, words]


def _python(environ: Mapping[str, str]) -> str:
    """The same interpreter, which must find the same package: from a checkout only PYTHONPATH leads there."""
    root = str(Path(launcher.__file__).absolute().parents[1])
    installed = root in (*site.getsitepackages(), site.getusersitepackages())
    path = [part for part in environ.get("PYTHONPATH", "").split(":") if part]
    if not installed and root not in path:
        path.insert(0, root)
    before = f"env PYTHONPATH={shlex.quote(':'.join(path))} " if path else ""
    return before + shlex.quote(sys.executable)


def own_settings(hosts: Sequence[str]) -> dict[str, dict[str, str]]:
    """`ssh -G` of each host: its effective settings by lower-case name; empty where ssh does not say."""
    from concurrent.futures import ThreadPoolExecutor  # a start on one machine does not need it

    with ThreadPoolExecutor(min(16, len(hosts) or 1)) as pool:
        return dict(zip(hosts, pool.map(_settings, hosts), strict=True))


def _settings(host: str) -> dict[str, str]:
    try:
        done = subprocess.run(
            ["ssh", "-G", "--", host],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_LOOK_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return {}
    pairs = (line.partition(" ") for line in done.stdout.splitlines())
    return {name: value for name, _, value in pairs}
