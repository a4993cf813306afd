"""Makes a worker as slow as a weaker machine would be: after computing, it waits in proportion to what it computed.

Inequality becomes real without renting anything: a pace of 2 makes every step's compute take twice as long.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

import torch


class Pace(Protocol):
    """Stretches the computation between two calls."""

    def begin(self) -> None:
        """Computation starts."""
        ...

    def end(self) -> None:
        """Computation is over: wait for as long as the pace demands."""
        ...


class FullPace:
    """As fast as the device can."""

    def begin(self) -> None:
        """Nothing to remember."""

    def end(self) -> None:
        """No wait."""


class Stretched:
    """Waits ``(factor - 1)`` times the time used.

    Args:
        factor: how many times longer computing takes, at least 1.
        used_s: a clock of the time used; only differences count.
        sleep: waits for so many seconds: `time.sleep`, or `busy` where the worker has a core to itself.
    """

    def __init__(self, factor: float, used_s: Callable[[], float], sleep: Callable[[float], None] = time.sleep) -> None:
        if factor < 1:
            raise ValueError(f"a pace is at least 1, not {factor}")
        self._factor = factor
        self._used_s = used_s
        self._sleep = sleep
        self._begun_s = 0.0

    def begin(self) -> None:
        """Remember how much time was used so far."""
        self._begun_s = self._used_s()

    def end(self) -> None:
        """Wait."""
        self._sleep((self._factor - 1) * max(0.0, self._used_s() - self._begun_s))


def busy(seconds: float) -> None:
    """Wait without letting go of the core.

    A weaker machine computes all the while. Where a paced worker sleeps instead, its core falls idle and its caches
    cool, and waking up for the exchange costs milliseconds that no weaker machine would have paid.
    """
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        pass


def make_pace(factor: float, device: torch.device, *, own_core: bool) -> Pace:
    """The pace of a worker on a device.

    On a CPU the time used is that of this thread on a core (it drives forward and backward, whatever number of
    threads help it). Elapsed time would not do: paced workers often share the cores of one machine, and a stretch
    would multiply the time that a worker merely waited for a core. Where they do share (``own_core`` is false), a
    worker sleeps through its stretch, so that it takes nothing from the others.
    """
    if factor == 1:
        return FullPace()
    if device.type == "cpu":
        return Stretched(factor, time.thread_time, busy if own_core else time.sleep)

    def elapsed_s() -> float:
        torch.cuda.synchronize(device)
        return time.perf_counter()

    return Stretched(factor, elapsed_s)
