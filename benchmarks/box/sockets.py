"""Sockets that live in another network namespace than the process that serves them, and a relay between two."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

_NAMESPACES = Path("/run/netns")
_CLONE_NEWNET = 0x40000000
_CHUNK_BYTES = 1 << 16

T = TypeVar("T")


def inside(namespace: str, do: Callable[[], T]) -> T:
    """Do something inside a network namespace: sockets stay in the one that they were made in.

    A thread of its own enters it and ends there, so that no other thread of this process ever does.

    Raises:
        OSError: the namespace cannot be entered, or what was done failed.
    """
    answer: list[T] = []
    failed: list[OSError] = []

    def work() -> None:
        try:
            _enter(namespace)
            answer.append(do())
        except OSError as error:
            failed.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
    return answer[0]


def _enter(namespace: str) -> None:
    """``setns(2)``, which Python knows only since 3.12."""
    descriptor = os.open(_NAMESPACES / namespace, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if ctypes.CDLL(None, use_errno=True).setns(descriptor, _CLONE_NEWNET) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), namespace)
    finally:
        os.close(descriptor)


def listening(address: tuple[str, int]) -> socket.socket:
    """A socket that listens, in the namespace of the thread that calls."""
    found = socket.create_server(address, backlog=128)
    found.settimeout(None)
    return found


class Relay:
    """Hands connections to a port of this machine on to an address inside a namespace. A context manager."""

    def __init__(self, namespace: str, target: tuple[str, int]) -> None:
        """Listen on a free port of the loopback device."""
        self._namespace, self._target = namespace, target
        self._server = listening(("127.0.0.1", 0))
        self._accepting = threading.Thread(target=self._accept, daemon=True)

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self._server.getsockname()[1])

    def __enter__(self) -> Relay:
        self._accepting.start()
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        self._accepting.join()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._server.accept()
            except OSError:
                return  # it was closed
            threading.Thread(target=self._carry, args=(near,), daemon=True).start()

    def _carry(self, near: socket.socket) -> None:
        with near, contextlib.suppress(OSError):
            far = inside(self._namespace, lambda: socket.create_connection(self._target, timeout=30))
            far.settimeout(None)
            with far:
                _pump(near, far)


def _pump(one: socket.socket, other: socket.socket) -> None:
    """Carry bytes both ways until either side ends."""
    for end in (one, other):
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    while True:
        ready, _, _ = select.select([one, other], [], [])
        for source in ready:
            data = source.recv(_CHUNK_BYTES)
            if not data:
                return
            (other if source is one else one).sendall(data)
