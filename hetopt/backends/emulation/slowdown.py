"""How much slower a miniature must run so that the real computation fits into the declared time."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from hetopt.core.events.records import LogEvent, StepsLogged

_PERIODS = 3
"""Judged by their median: a first step, or a moment in which the machine was busy, must not count for good."""
_ROOM = 1.15


@dataclass(kw_only=True)
class FitWatch:
    """Follows ``pace_use`` of the run's ``step`` events: real computation over declared time, of each worker.

    Attributes:
        slowdown: the present one, at least 1.
        since_s: when it began to hold; periods that began earlier say nothing about it.
    """

    slowdown: float = 1.0
    since_s: float = 0.0
    _use: deque[Sequence[float]] = field(default_factory=lambda: deque(maxlen=_PERIODS))

    def look(self, event: LogEvent, now_s: float) -> int | None:
        """Take in one event; the rank whose computation does not fit is returned, after `slowdown` was raised."""
        if not isinstance(event, StepsLogged) or not event.pace_use:
            return None
        use = event.pace_use
        # A step more than the period has: what was measured may lag behind by one.
        if event.time_s - (event.steps + 1) * event.step_time_s < self.since_s:
            return None
        if self._use and len(self._use[-1]) != len(use):
            self._use.clear()  # others train
        self._use.append(use)
        if len(self._use) < _PERIODS:
            return None
        medians = [statistics.median(worker) for worker in zip(*self._use, strict=True)]
        if max(medians) <= 1:
            return None
        self.slowdown = two_digits_up(self.slowdown * max(medians) * _ROOM)
        self.since_s = now_s
        self._use.clear()
        return medians.index(max(medians))


def two_digits_up(value: float) -> float:
    """The least number of two significant digits that is not below ``value``."""
    exponent = math.floor(math.log10(value)) - 1
    scaled = value / 10.0**exponent
    return float(f"{math.ceil(scaled - 1e-9)}e{exponent}")
