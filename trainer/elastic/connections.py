"""Breaks connections that a group of workers holds open, so that nobody waits in them any longer.

gloo's operations end when a connection breaks or time is up, and by no other means: a worker whose neighbour has left
the group without dying would wait for its whole time. Only Linux tells which connections a process has; elsewhere
nothing is broken, and time must be up.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_OPEN = Path("/proc/self/fd")

DEAF_S = 10
"""A connection whose other end has not answered for so long is broken: a cut link says nothing by itself, and a crowded
one may lose some packets in a row."""
_PROBES = 5


def open_sockets() -> frozenset[str]:
    """Names of the sockets that this process has open."""
    return frozenset(_sockets())


def break_all_but(known: frozenset[str]) -> int:
    """Break every TCP connection of this process that was opened since `open_sockets` gave ``known``; how many."""
    broken = 0
    for connection in _opened_since(known):
        with suppress(OSError):  # it went by itself
            connection.shutdown(socket.SHUT_RDWR)
            broken += 1
    return broken


def break_when_deaf(known: frozenset[str]) -> None:
    """Have the kernel break every TCP connection that was opened since, once its other end has gone without a word.

    Without this, whoever waits for the answer of a host that is cut off waits for a quarter of an hour.

    Args:
        known: what `open_sockets` gave before.
    """
    for connection in _opened_since(known):
        with suppress(OSError):
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, DEAF_S // _PROBES)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, DEAF_S // _PROBES)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _PROBES)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * DEAF_S)


def _opened_since(known: frozenset[str]) -> Iterator[socket.socket]:
    """Connections of this process that were opened since, each by a descriptor of its own."""
    for name, descriptor in _sockets().items():
        if name not in known:
            with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
                if _is_connected(connection):
                    yield connection


def _is_connected(connection: socket.socket) -> bool:
    """A listening socket stays: gloo ends the process where one is shut down."""
    is_tcp = connection.family in (socket.AF_INET, socket.AF_INET6) and connection.type == socket.SOCK_STREAM
    return is_tcp and not connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)


def _sockets() -> dict[str, int]:
    """Descriptors by the socket's name."""
    found: dict[str, int] = {}
    if sys.platform != "linux":
        return found
    for entry in os.listdir(_OPEN):
        try:
            name = os.readlink(_OPEN / entry)
        except OSError:
            continue
        if name.startswith("socket:"):
            found[name] = int(entry)
    return found
