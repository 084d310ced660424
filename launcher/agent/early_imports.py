"""The fork server of a start begins to import before anything else is done: preflight and the wait for other nodes cost
nothing then."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from launcher.agent.forkserver_client import ForkServer
from launcher.agent.run_settings import RunSettings

_KILL_BOUND_S = 10.0


@dataclass(frozen=True)
class EarlyImports:
    """`server`: None where ranks are not forked. `template`: the spec whose inputs it prepares, or None."""

    server: ForkServer | None
    template: Path | None


@contextmanager
def imports_begun(settings: RunSettings) -> Iterator[EarlyImports]:
    """Whoever takes the server over may end it; it has ended afterwards in any case, and nothing of it is left."""
    server = None
    template = None
    try:
        if settings.fork:
            if settings.template is not None:
                template = settings.work_folder.write_spec(settings.template, settings.spec.to_json())
            server = ForkServer(settings.environ, settings.token, settings.fork_server_log, template=template)
        yield EarlyImports(server, template)
    finally:
        if server is not None:
            server.kill()
            with suppress(subprocess.TimeoutExpired):  # stuck in the kernel: nothing more can be done here
                server.process.wait(timeout=_KILL_BOUND_S)
        settings.scratch.close()
