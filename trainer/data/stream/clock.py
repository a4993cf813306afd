"""The time by which samples arrive: the real one in runs, one that only sleeping moves in tests and simulations."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Tells the time and waits."""

    def now_s(self) -> float:
        """Seconds since some moment."""
        ...

    def sleep_s(self, duration_s: float) -> None:
        """Come back so much later."""
        ...


class RealClock:
    """The machine's monotonic clock."""

    def now_s(self) -> float:
        """See `Clock`."""
        return time.monotonic()

    def sleep_s(self, duration_s: float) -> None:
        """See `Clock`."""
        time.sleep(duration_s)


class VirtualClock:
    """Stands still but where somebody sleeps."""

    def __init__(self) -> None:
        self._now_s = 0.0

    def now_s(self) -> float:
        """See `Clock`."""
        return self._now_s

    def sleep_s(self, duration_s: float) -> None:
        """See `Clock`."""
        if duration_s < 0:
            raise ValueError(f"time does not go back by {-duration_s} s")
        self._now_s += duration_s
