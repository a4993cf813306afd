"""Keeps workers alive: a process with everything imported that becomes a new worker when one of them is killed.

Importing torch takes seconds, and a fork of a process that has imported it milliseconds. The warden has no thread and
no process group, so that a fork of it is a fresh worker.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from types import FrameType
from typing import NoReturn

_ENDING = (signal.SIGTERM, signal.SIGINT)

Ended = Callable[[int, int, int], None]
"""Told of a worker's end: its place, the signal that ended it, and how many times it may still be replaced."""


def keep(works: Mapping[int, Callable[[], int]], *, replacements: int, tell: Ended) -> int:
    """Have workers do their work, and another one in the place of any that a signal kills.

    Returns the exit code of the first that failed, or 0, once all have ended. When a signal kills one once too often
    this process ends by the same signal, so that whoever watches sees why.

    Args:
        works: by place; each is done in a process of its own, and gives its exit code.
        replacements: of each worker that is killed, at most.
        tell: hears of each.
    """
    left = dict.fromkeys(works, replacements)
    asked_to_end: list[int] = []
    children: dict[int, int] = {}

    def hand_on(number: int, frame: FrameType | None) -> None:
        asked_to_end.append(number)
        for child in children:
            with suppress(ProcessLookupError):
                os.kill(child, number)

    def start(place: int) -> None:
        child = _fork(works[place])
        children[child] = place
        if asked_to_end:
            os.kill(child, asked_to_end[-1])

    before = {number: signal.signal(number, hand_on) for number in _ENDING}
    failed = 0
    try:
        for place in works:
            start(place)
        while children:
            child, status = os.wait()
            if child not in children:
                continue  # not a worker
            place, code = children.pop(child), os.waitstatus_to_exitcode(status)
            if code >= 0:
                failed = failed or code
                continue
            if asked_to_end or left[place] == 0:
                _end_by(-code)
            tell(place, -code, left[place])
            left[place] -= 1
            start(place)
        return failed
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _fork(work: Callable[[], int]) -> int:
    # What is sent to the worker before it hears for itself waits, instead of going to this process's listener in it.
    earlier = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)
    try:
        child = os.fork()
        if child == 0:
            _leave(work, earlier)
        return child
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, earlier)


def _leave(work: Callable[[], int], mask: Iterable[int]) -> NoReturn:
    """Be the worker; whatever happens, this process does not go on as a second warden."""
    code = 1
    try:
        for number in _ENDING:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        code = work()
    finally:
        os._exit(code)


def _end_by(number: int) -> NoReturn:
    signal.signal(number, signal.SIG_DFL) if number != signal.SIGKILL else None
    os.kill(os.getpid(), number)
    signal.pause()
    raise AssertionError("unreachable")
