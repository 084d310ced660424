"""A network between two couriers that can be cut, stall, change what passes, and tell what has passed."""

from __future__ import annotations

import socket
import threading
from types import TracebackType


class Relay:
    """Passes connections on to `target`, until `limit_bytes` of one connection have gone towards it."""

    def __init__(self, target: int) -> None:
        self.passed = bytearray()  # of all connections, towards the target
        self.limit_bytes: int | None = None
        self.at_limit = "cut"  # or "stall", "flip" (one bit of the next byte)
        self.num_connections = 0
        self.reached = threading.Event()
        self._target = target
        self._ended = threading.Event()
        self._server = socket.create_server(("127.0.0.1", 0))
        self._sockets: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._server.getsockname()[1]}"

    def __enter__(self) -> Relay:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._ended.set()
        self._server.shutdown(socket.SHUT_RDWR)
        for end in (self._server, *self._sockets):
            end.close()

    def _accept(self) -> None:
        while not self._ended.is_set():
            try:
                near, _ = self._server.accept()
                far = socket.create_connection(("127.0.0.1", self._target))
            except OSError:
                return
            self.num_connections += 1
            self._sockets += [near, far]
            for source, sink, there in ((near, far, True), (far, near, False)):
                threading.Thread(target=self._pass, args=(source, sink, there), daemon=True).start()

    def _pass(self, source: socket.socket, sink: socket.socket, there: bool) -> None:
        num_bytes = 0
        try:
            while data := source.recv(65536):
                if there and self.limit_bytes is not None and num_bytes + len(data) > self.limit_bytes:
                    self.reached.set()
                    if self.at_limit == "stall":
                        self._ended.wait()
                        return
                    if self.at_limit == "cut":
                        break
                    at = max(0, self.limit_bytes - num_bytes)
                    data = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
                    self.limit_bytes = None
                num_bytes += len(data)
                if there:
                    self.passed += data
                sink.sendall(data)
        except OSError:
            pass
        for end in (source, sink):
            try:
                end.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue
