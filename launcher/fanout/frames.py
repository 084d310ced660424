"""What the two ends of a connection to a node say besides the agent's output.

From the node: lines that begin with the order's marker, then JSON. To the node: `alive` now and then, `stop SIGTERM`.
"""

from __future__ import annotations

import json
from typing import Any

ALIVE_EVERY_S = 5.0
OWNER_SILENT_S = 20.0  # a head that has not been heard for so long is gone: another one may take over

ALIVE = b"alive\n"

RUNS_ALREADY = 75  # exit code of an agent under orders (EX_TEMPFAIL) where this node's agent lives already

# Kinds of frames
STARTED = "started"  # pid: an agent was started
ATTACHED = "attached"  # pid: one that runs already; begins, unheard: see AgentHost._accept
BUSY = "busy"  # by: somebody else has this node's agent
NONE = "none"  # none runs, and none was to be started
FAILED = "failed"  # why: none could be started
REFUSED = "refused"  # why, code: none can be started, however often it is tried
ENDED = "ended"  # code: of the agent, negative for a signal


def frame(marker: str, kind: str, **fields: Any) -> bytes:
    return f"{marker} {json.dumps({'kind': kind, **fields})}\n".encode()


def parse_frame(marker: str, line: bytes) -> dict[str, Any] | None:
    """None for a line of output."""
    prefix = f"{marker} ".encode()
    if not line.startswith(prefix):
        return None
    try:
        found = json.loads(line[len(prefix) :])
    except ValueError:
        return None
    return found if isinstance(found, dict) and "kind" in found else None


def stop_line(signal_name: str) -> bytes:
    return f"stop {signal_name}\n".encode()
