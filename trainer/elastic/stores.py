"""Connections to the store that workers meet over; the process that hosts them opens it, and outlives any of them."""

from __future__ import annotations

import datetime
from typing import TYPE_CHECKING

import torch.distributed as dist

from hetopt.profiler.errors import BadInput
from hetopt.trainer.launch.host import MEETING_VARIABLE

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

_PATIENCE = datetime.timedelta(seconds=30)


def connect(meeting: str) -> TCPStore:
    """A connection of its own to the store at ``address:port``.

    Raises:
        BadInput: that is no address.
        DistNetworkError: nobody is there.
    """
    address, _, port = meeting.rpartition(":")
    if not address or not port.isdigit():
        raise BadInput(f"{MEETING_VARIABLE}={meeting!r} is no address.", hint="give ADDRESS:PORT")
    store: TCPStore = dist.TCPStore(address, int(port), is_master=False, timeout=_PATIENCE)  # type: ignore[attr-defined]  # torch's gap
    return store


class TcpMeetingStore:
    """A connection as a `MeetingStore`.

    Args:
        store: the connection.
        attempt: of torchrun to start the run; those that share a store know nothing of each other.
    """

    def __init__(self, store: TCPStore, attempt: str = "") -> None:
        self._store = store
        self._attempt = attempt

    def get(self, key: str) -> str:
        """The value (see `MeetingStore`)."""
        name = self._attempt + key
        return self._store.get(name).decode() if self._store.check([name]) else ""

    def set(self, key: str, value: str) -> None:
        """Write a value (see `MeetingStore`)."""
        self._store.set(self._attempt + key, value)

    def compare_set(self, key: str, expected: str, value: str) -> str:
        """Write a value where nobody else has (see `MeetingStore`)."""
        written: bytes = self._store.compare_set(self._attempt + key, expected, value)
        return written.decode()
