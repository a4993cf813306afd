"""Small programs that tests run on rehearsed hosts, and what they measure."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from math import inf

from hetopt.backends.emulation.namespaces import EmulatedNetwork
from tests.disturbance import PATIENCE_S

RECEIVE = """
import socket
listening = socket.create_server(("0.0.0.0", 5000))
print("listening", flush=True)
while True:
    connection, _ = listening.accept()
    while connection.recv(1 << 20):
        pass
    connection.sendall(b".")
    connection.close()
"""
SEND = """
import socket, sys, time
connection = socket.create_connection((sys.argv[1], 5000), timeout=10)
connection.settimeout(None)
data = bytes(int(sys.argv[2]))
print("sending", flush=True)
begun = time.perf_counter()
connection.sendall(data)
connection.shutdown(socket.SHUT_WR)
connection.recv(1)
print(time.perf_counter() - begun, flush=True)
"""


@dataclass(frozen=True)
class Transfer:
    """Bytes on their way from one host to another."""

    process: subprocess.Popen[bytes]

    def wait_s(self) -> float:
        """How long they took until the other host had them all."""
        # Read from the stream: it may hold the last line already, which `communicate` would pass over.
        with self.process.stdout as stream:
            assert self.process.wait(PATIENCE_S) == 0
            return float(stream.read())


def least_s(measure_s: Callable[[], float], enough_s: float) -> float:
    """The least of up to five tries, or the first that is enough: a busy machine delays a transfer, none hastens it."""
    least = inf
    for _ in range(5):
        least = min(least, measure_s())
        if least < enough_s:
            break
    return least


def receive(network: EmulatedNetwork, place: int) -> None:
    """Let a host take in whatever it is sent, until its network is removed."""
    process = network.popen(place, [sys.executable, "-c", RECEIVE], stdout=subprocess.PIPE)
    with process.stdout:
        assert process.stdout.readline() == b"listening\n"


def send(network: EmulatedNetwork, place: int, to: int, size: int) -> Transfer:
    """Send so many bytes; returns when they begin to flow."""
    arguments = [sys.executable, "-c", SEND, network.address(to), str(size)]
    process = network.popen(place, arguments, stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"sending\n"
    return Transfer(process)
