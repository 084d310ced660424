"""One agent of a node on a machine: whoever runs it holds a socket, and others of the same user reach it there.

The name is in Linux's abstract namespace: it leaves no file, the kernel frees it when its last holder dies, and
machines and network namespaces do not share it. Who stands behind a connection is read from the kernel, not from what
it says.
"""

from __future__ import annotations

import errno
import hashlib
import os
import socket
import struct

_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid: struct ucred of unix(7)


def run_key(output_dir: str, name: str) -> str:
    """Names node `name` of the run in `output_dir`, as this user."""
    return hashlib.sha256(f"{output_dir}\0{name}".encode("utf-8", "surrogateescape")).hexdigest()[:24]


def _address(key: str) -> str:
    return f"\0ftlaunch/{os.getuid()}/{key}"


def claim(key: str) -> socket.socket | None:
    """A listening socket; None where somebody on this machine has it."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(_address(key))
        listener.listen(16)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            return None
        raise
    listener.setblocking(False)
    return listener


def reach(key: str) -> socket.socket | None:
    """A connection to the holder; None where there is none any more, or it is another user's."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(5.0)  # a holder whose queue is full does not answer either
    try:
        connection.connect(_address(key))
    except OSError:
        connection.close()
        return None
    if not is_ours(connection):
        connection.close()
        return None
    return connection


def is_ours(connection: socket.socket) -> bool:
    """Whether the process at the other end is this user's, or root's."""
    _, uid, _ = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return uid in (os.getuid(), 0)
