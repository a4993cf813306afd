"""Keeps a worker alive: a process with everything imported that becomes a new worker when the old one is killed.

Importing torch takes seconds, and a fork of a process that has imported it milliseconds. The warden has no thread and
no process group, so that a fork of it is a fresh worker.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from types import FrameType
from typing import NoReturn

Ended = Callable[[int, int], None]
"""Told of a worker's end by a signal: its number, and how many times a worker may still be replaced."""


def keep(work: Callable[[], int], *, replacements: int, tell: Ended) -> int:
    """Have a worker do its work, and another one in its place whenever a signal kills it.

    Returns its exit code. When a signal kills it once too often this process ends by the same signal, so that whoever
    watches sees why.

    Args:
        work: in a process of its own; gives its exit code.
        replacements: of killed workers, at most.
        tell: hears of each.
    """
    while True:
        child = os.fork()
        if child == 0:
            _leave(work)
        code = _await(child)
        if code >= 0:
            return code
        if _asked_to_end or replacements == 0:
            _end_by(-code)
        tell(-code, replacements)
        replacements -= 1


_asked_to_end: list[int] = []


def _await(child: int) -> int:
    """The exit code of the worker, negative for a signal; what asks this process to end is handed on to it."""

    def hand_on(number: int, frame: FrameType | None) -> None:
        _asked_to_end.append(number)
        os.kill(child, number)

    before = {number: signal.signal(number, hand_on) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        _, status = os.waitpid(child, 0)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return os.waitstatus_to_exitcode(status)


def _leave(work: Callable[[], int]) -> NoReturn:
    """Be the worker; whatever happens, this process does not go on as a second warden."""
    code = 1
    try:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        code = work()
    finally:
        os._exit(code)


def _end_by(number: int) -> NoReturn:
    signal.signal(number, signal.SIG_DFL) if number != signal.SIGKILL else None
    os.kill(os.getpid(), number)
    signal.pause()
    raise AssertionError("unreachable")
