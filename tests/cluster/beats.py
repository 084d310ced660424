"""Two agents' transports on a bad network: `beats.py MY_IP SECONDS [LEADER_IP]`.

With a leader it sends a heartbeat every half second; without, it answers each. Then a line of JSON: the longest time
between two messages from the other, in seconds, how many came, how often the other was said to be unreachable.
"""

from __future__ import annotations

import json
import sys
import time
from itertools import pairwise

from launcher.cluster.messages import Beat, Message
from launcher.cluster.model import Node
from launcher.event_loop import EventLoop
from launcher.transport.transport import Transport

PORT = 29430
HEARTBEAT_S = 0.5


def main(ip: str, seconds: float, leader: str | None) -> None:
    heard: list[float] = []
    unreachable: list[str] = []
    beat = Beat(Node(ip, f"{ip}:{PORT}", 1, "aa"), 1, 1)

    def hear(message: Message) -> None:
        heard.append(time.monotonic())
        if leader is None:
            transport.send(message.sender.address, beat)

    loop = EventLoop(lambda: transport.tick())  # noqa: PLW0108 - it is made in the next line
    transport = Transport(
        loop,
        token="token",
        run_id="run",
        host=ip,
        port=PORT,
        on_message=hear,
        on_unreachable=unreachable.append,
        say=lambda text: print(text, file=sys.stderr),
    )
    print("ready", flush=True)
    end, due = time.monotonic() + seconds, 0.0
    while time.monotonic() < end:
        if leader and time.monotonic() >= due:
            due = time.monotonic() + HEARTBEAT_S
            transport.send(f"{leader}:{PORT}", beat)
        loop.set_bound("beat", min(HEARTBEAT_S, max(0.0, due - time.monotonic())) or HEARTBEAT_S, lambda: None)
        loop.wait()
    gaps = [after - before for before, after in pairwise(heard)]
    print(json.dumps({"longest": max(gaps, default=seconds), "heard": len(heard), "unreachable": len(unreachable)}))
    transport.close(0)


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), sys.argv[3] if len(sys.argv) > 3 else None)
