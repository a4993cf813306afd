"""Connections to the store that workers meet over, wherever it is.

The process that hosts workers opens it, and outlives any of them. Where hosts may be lost, each has one, and all meet
in the first that can be reached; once a generation has begun in one, whoever comes later looks for the others there.
"""

from __future__ import annotations

import datetime
import re
import selectors
import socket
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

import torch.distributed as dist

from hetopt.core.errors import BadInput
from hetopt.trainer.elastic.connections import break_when_deaf, open_sockets
from hetopt.trainer.elastic.rendezvous import begun
from hetopt.trainer.host.agent import MEETING_VARIABLE

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

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
    found: set[str] = set()
    with ExitStack() as open_until_then, selectors.DefaultSelector() as selector:
        waiting = 0
        for meeting in meetings:
            attempt = open_until_then.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
            attempt.setblocking(False)
            attempt.connect_ex(_parsed(meeting))
            selector.register(attempt, selectors.EVENT_WRITE, meeting)
            waiting += 1
        deadline_s = time.monotonic() + _REACHED_WITHIN_S
        while waiting and (left_s := deadline_s - time.monotonic()) > 0:
            for key, _ in selector.select(left_s):
                registered = key.fileobj
                assert isinstance(registered, socket.socket)
                selector.unregister(registered)
                waiting -= 1
                if registered.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0:
                    found.add(key.data)
    return [meeting for meeting in meetings if meeting in found]


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
