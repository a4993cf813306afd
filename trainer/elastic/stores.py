"""Connections to the store that workers meet over, wherever it is.

The process that hosts workers opens it, and outlives any of them. Where hosts may be lost, each has one, and all meet
in the first that can be reached; once a generation has begun in one, whoever comes later looks for the others there.

Breaks connections that a group of workers holds open, so that nobody waits in them any longer.

gloo's operations end when a connection breaks or time is up, and by no other means: a worker whose neighbour has left
the group without dying would wait for its whole time. Only Linux tells which connections a process has; elsewhere
nothing is broken, and time must be up.
"""

from __future__ import annotations

import datetime
import os
import re
import socket
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist

from hetopt.core.errors import BadInput
from hetopt.trainer.elastic.rendezvous import begun
from hetopt.trainer.host.agent import MEETING_VARIABLE

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore


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


_PATIENCE = datetime.timedelta(seconds=30)
_REACHED_WITHIN_S = 0.5


def connect(meeting: str) -> TCPStore:
    """A connection of its own to the store at ``address:port``, which breaks when its host is cut off.

    Raises:
        BadInput: that is no address.
        DistNetworkError: nobody is there.
    """
    address, port = _parsed(meeting)
    known = open_sockets()
    store: TCPStore = dist.TCPStore(address, port, is_master=False, timeout=_PATIENCE)  # type: ignore[attr-defined]  # torch's gap
    break_when_deaf(known)
    return store


def _parsed(meeting: str) -> tuple[str, int]:
    address, _, port = meeting.rpartition(":")
    if not address or not port.isdigit():
        raise BadInput(f"{MEETING_VARIABLE} must be ADDRESS:PORT, got {meeting!r}.", hint="for example 10.0.0.1:29400")
    return address, int(port)


def reachable(meetings: Sequence[str]) -> list[str]:
    """Those of the addresses where somebody listens, in their order.

    Raises:
        BadInput: one is no address.
    """
    addresses = [_parsed(meeting) for meeting in meetings]
    with ThreadPoolExecutor(max(1, len(addresses))) as pool:
        return [meeting for meeting, there in zip(meetings, pool.map(_answers, addresses), strict=True) if there]


def _answers(address: tuple[str, int]) -> bool:
    try:
        socket.create_connection(address, timeout=_REACHED_WITHIN_S).close()
        return True
    except OSError:
        return False


def where_to_meet(meetings: Sequence[str], attempt: str) -> str | None:
    """Where the others are: of the stores that can be reached the one with the newest generation, or else the first.

    Raises:
        RuntimeError: a store was lost while it was asked.
    """
    there = reachable(meetings)
    if len(there) < 2:
        return there[0] if there else None
    newest = [begun(TcpRendezvousStore(connect(meeting), attempt)) for meeting in there]
    return there[newest.index(max(newest))]


class TcpRendezvousStore:
    """A connection as a `RendezvousStore`.

    Args:
        store: the connection.
        attempt: of torchrun to start the run; those that share a store know nothing of each other.
    """

    def __init__(self, store: TCPStore, attempt: str = "") -> None:
        self._store = store
        self._attempt = attempt

    def get(self, key: str) -> str:
        """The value (see `RendezvousStore`)."""
        name = self._attempt + key
        return self._store.get(name).decode() if self._store.check([name]) else ""

    def set(self, key: str, value: str) -> None:
        """Write a value (see `RendezvousStore`)."""
        self._store.set(self._attempt + key, value)

    def compare_set(self, key: str, expected: str, value: str) -> str:
        """Write a value where nobody else has (see `RendezvousStore`)."""
        written: bytes = self._store.compare_set(self._attempt + key, expected, value)
        return written.decode()

    def forget_before(self, number: int) -> None:
        """Remove what generations before this one have left; whoever still looks for them finds a newer one wanted.

        A run that workers leave and join for weeks would fill the memory of the process that holds the store.
        """
        own = re.compile(re.escape(self._attempt) + r"(?:group/)?(\d+)/")
        for key in self._store.list_keys():
            found = own.match(key)
            if found is not None and int(found[1]) < number:
                self._store.delete_key(key)
