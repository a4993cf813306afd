"""The named network namespaces of this machine, and the processes in them."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from hetopt.core.errors import RunFailed

_FOLDER = Path("/run/netns")  # where `ip` keeps them
_KILL_PATIENCE_S = 10.0


def file_of(name: str) -> Path:
    """The file that stands for a namespace."""
    return _FOLDER / name


def namespaces() -> list[str]:
    """The names of all of them."""
    try:
        return sorted(os.listdir(_FOLDER))
    except FileNotFoundError:
        return []


def pids_in(names: Iterable[str]) -> list[int]:
    """The processes in these namespaces: those whose own namespace is the same file."""
    inodes: set[tuple[int, int]] = set()
    for name in names:
        with contextlib.suppress(OSError):
            status = (_FOLDER / name).stat()
            inodes.add((status.st_dev, status.st_ino))
    pids: list[int] = []
    for entry in os.listdir("/proc") if inodes else ():
        if entry.isdigit():
            with contextlib.suppress(OSError):  # gone since, a zombie, or not ours to look at
                status = os.stat(f"/proc/{entry}/ns/net")
                if (status.st_dev, status.st_ino) in inodes:
                    pids.append(int(entry))
    return pids


def kill_in(names: Sequence[str]) -> None:
    """Kill every process in these namespaces, and wait until they are gone.

    Raises:
        RunFailed: one of them cannot be killed.
    """
    deadline = time.monotonic() + _KILL_PATIENCE_S
    while pids := pids_in(names):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > deadline:
            raise RunFailed(
                f"process {pids[0]} in a rehearsal's network cannot be killed.", hint="look at it with `ps`"
            )
        time.sleep(0.005)
