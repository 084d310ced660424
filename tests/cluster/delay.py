"""Holds every packet of netfilter queue 0 for a fixed time, in each of the given network namespaces.

Run as `python delay.py MS PID...` (a process of each namespace). netem is not in every kernel; NFQUEUE is in most. Only
packet numbers come up here, the packets wait in the kernel, so it is cheap. The order of packets is kept. Message
layouts: <linux/netfilter/nfnetlink_queue.h>.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import os
import select
import signal
import socket
import struct
import sys
import time

CLONE_NEWNET = 0x40000000
NETLINK_NETFILTER, SOL_NETLINK, NETLINK_NO_ENOBUFS = 12, 270, 5
NFNL_SUBSYS_QUEUE = 3 << 8
MSG_PACKET, MSG_CONFIG, MSG_VERDICT_BATCH = NFNL_SUBSYS_QUEUE, NFNL_SUBSYS_QUEUE | 2, NFNL_SUBSYS_QUEUE | 3
CFG_CMD, CFG_PARAMS, CFG_QUEUE_MAXLEN, CFG_MASK, CFG_FLAGS = 1, 2, 3, 4, 5
PACKET_HDR, VERDICT_HDR = 1, 2
BIND, COPY_META, FLAG_GSO, NF_ACCEPT = 1, 1, 4, 1
NLM_F_REQUEST = 1
NFGENMSG = struct.pack("!BBH", socket.AF_UNSPEC, 0, 0)  # family, version, queue number


def attribute(kind: int, payload: bytes) -> bytes:
    return struct.pack("=HH", 4 + len(payload), kind) + payload + b"\0" * (-len(payload) % 4)


def message(kind: int, *attributes: bytes) -> bytes:
    body = NFGENMSG + b"".join(attributes)
    return struct.pack("=IHHII", 16 + len(body), kind, NLM_F_REQUEST, 0, 0) + body


class Queue:
    """Queue 0 of the current network namespace."""

    def __init__(self) -> None:
        self.socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, NETLINK_NETFILTER)
        self.socket.setsockopt(SOL_NETLINK, NETLINK_NO_ENOBUFS, 1)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 20)
        self.socket.bind((0, 0))
        self.socket.send(message(MSG_CONFIG, attribute(CFG_CMD, struct.pack("!BxH", BIND, 0))))
        self.socket.send(message(MSG_CONFIG, attribute(CFG_PARAMS, struct.pack("!IB", 0, COPY_META))))
        self.socket.send(message(MSG_CONFIG, attribute(CFG_QUEUE_MAXLEN, struct.pack("!I", 100_000))))
        gso = struct.pack("!I", FLAG_GSO)
        self.socket.send(message(MSG_CONFIG, attribute(CFG_FLAGS, gso), attribute(CFG_MASK, gso)))
        self.waiting: collections.deque[tuple[float, int]] = collections.deque()  # (when to let go, packet number)

    def receive(self, due: float) -> None:
        while True:
            try:
                data = self.socket.recv(1 << 16, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            while len(data) >= 16:
                length, kind = struct.unpack_from("=IH", data)
                if kind == MSG_PACKET:
                    self._note(data[20:length], due)
                data = data[(length + 3) & ~3 :]

    def _note(self, attributes: bytes, due: float) -> None:
        while len(attributes) >= 4:
            length, kind = struct.unpack_from("=HH", attributes)
            if kind == PACKET_HDR:
                (number,) = struct.unpack_from("!I", attributes, 4)
                self.waiting.append((due, number))
                return
            attributes = attributes[(length + 3) & ~3 :]

    def let_go(self, now: float) -> None:
        """A batch verdict covers every packet up to the given number; numbers grow in order of arrival."""
        last = None
        while self.waiting and self.waiting[0][0] <= now:
            last = self.waiting.popleft()[1]
        if last is not None:
            verdict = struct.pack("!II", NF_ACCEPT, last)
            with contextlib.suppress(FileNotFoundError):  # the packets have left by themselves: link or rule is gone
                self.socket.send(message(MSG_VERDICT_BATCH, attribute(VERDICT_HDR, verdict)))


def open_queue(pid: int) -> Queue:
    descriptor = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY)
    if ctypes.CDLL(None, use_errno=True).setns(descriptor, CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), f"cannot enter the network namespace of process {pid}")
    os.close(descriptor)
    return Queue()


def main() -> None:
    delay_s = float(sys.argv[1]) / 1000
    home = os.open("/proc/self/ns/net", os.O_RDONLY)
    queues = [open_queue(int(pid)) for pid in sys.argv[2:]]
    # Back into its own namespace, so that killing a node's processes does not take the network's delay away.
    ctypes.CDLL(None).setns(home, CLONE_NEWNET)
    by_descriptor = {queue.socket.fileno(): queue for queue in queues}
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    print("ready", flush=True)
    try:
        while True:
            heads = [queue.waiting[0][0] for queue in queues if queue.waiting]
            timeout = max(0.0, min(heads) - time.monotonic()) if heads else None
            readable, _, _ = select.select(list(by_descriptor), [], [], timeout)
            now = time.monotonic()
            for descriptor in readable:
                by_descriptor[descriptor].receive(now + delay_s)
            for queue in queues:
                queue.let_go(now)
    finally:
        for queue in queues:
            queue.receive(0)
            queue.let_go(float("inf"))


if __name__ == "__main__":
    main()
