"""A start on a machine whose agent somebody else has started: it shows that agent's output, and its end is its own."""

from __future__ import annotations

import contextlib
import socket
import sys
from collections.abc import Callable

from launcher.errors import RunsHereAlready
from launcher.fanout import frames


def view(connection: socket.socket, marker: str, say: Callable[[str], None]) -> int | None:
    """The agent's exit code (negative: a signal); None when the connection ends before the agent does.

    Raises RunsHereAlready where it is another start on this machine that runs the agent.
    """
    connection.settimeout(None)  # the end of the agent, of whoever holds it, or of the machine ends this
    with connection.makefile("rb") as lines:
        for line in lines:
            found = frames.parse_frame(marker, line)
            if found is None:
                with contextlib.suppress(OSError):  # a terminal that has gone is no reason to end
                    sys.stderr.buffer.write(line)
                    sys.stderr.flush()
            elif found["kind"] == frames.ATTACHED:
                by = f", started by {found['by']}" if found["by"] else ""
                say(f"this node's agent runs already (pid {found['pid']}{by}); from here on its output")
            elif found["kind"] == frames.ENDED:
                return int(found["code"])
            elif found["kind"] == frames.BUSY:
                raise RunsHereAlready(f"this node's agent runs already, under {found['by']}")
    say("the connection to this node's agent is lost; it may still run")
    return None
