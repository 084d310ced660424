"""Small traffic between nodes, to see what the network between them does. Standard library only; starts in 20 ms.

traffic.py connect IP PORT TIMEOUT_S     exit 0: connected or refused (something answers); 1: nothing came back
traffic.py receive PORT                  one TCP transfer; prints Mbit/s as the receiver sees it
traffic.py send IP PORT BYTES
traffic.py echo PORT                     UDP echo, until killed
traffic.py ask IP PORT NUM               NUM datagrams; prints how many answers came back and the median ms they took
"""

from __future__ import annotations

import socket
import statistics
import sys
import time
from collections.abc import Callable


def connect(address: str, port: str, timeout_s: str) -> None:
    try:
        socket.create_connection((address, int(port)), float(timeout_s)).close()
    except ConnectionRefusedError:
        pass
    except OSError as error:
        sys.exit(f"{address} does not answer: {error}")


def receive(port: str) -> None:
    with socket.create_server(("0.0.0.0", int(port))) as server:
        print("ready", flush=True)
        connection, _ = server.accept()
        start, size = time.monotonic(), 0
        while chunk := connection.recv(1 << 16):
            size += len(chunk)
        print(size * 8 / 1e6 / (time.monotonic() - start), flush=True)


def send(address: str, port: str, size: str) -> None:
    with socket.create_connection((address, int(port)), 5) as connection:
        connection.settimeout(60)
        connection.sendall(bytes(int(size)))


def echo(port: str) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
        server.bind(("0.0.0.0", int(port)))
        print("ready", flush=True)
        while True:
            data, sender = server.recvfrom(2048)
            server.sendto(data, sender)


def ask(address: str, port: str, num: str) -> None:
    """Questions are sent at a steady pace, then answers are awaited until a second passes without one."""
    client = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    client.connect((address, int(port)))
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 20)
    sent: list[float] = []
    took_ms: list[float] = []

    def collect(timeout_s: float) -> None:
        client.settimeout(timeout_s)
        try:
            while True:
                index = int(client.recv(2048))
                took_ms.append((time.monotonic() - sent[index]) * 1000)
        except TimeoutError:
            pass

    for index in range(int(num)):
        sent.append(time.monotonic())
        client.send(str(index).encode())
        collect(0.0005)
    collect(1.0)
    print(len(took_ms), statistics.median(took_ms) if took_ms else "none")


if __name__ == "__main__":
    verbs: dict[str, Callable[..., None]] = {
        "connect": connect,
        "receive": receive,
        "send": send,
        "echo": echo,
        "ask": ask,
    }
    verbs[sys.argv[1]](*sys.argv[2:])
