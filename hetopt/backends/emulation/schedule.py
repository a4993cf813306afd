"""What a rehearsal's conductor decides by: when changes are due, what a host is like after them, how slow all must be.

Nothing here does anything.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from hetopt.backends.prediction.processor_sharing import rounded_up
from hetopt.core.events.records import ConditionChanged, LogEvent, StepsLogged
from hetopt.core.scaled_emulation import EVERY_HOST, Change, EmulatedHost

CONDITION_CHANGED = "condition_changed"


@dataclass(frozen=True, kw_only=True)
class HostNow:
    """What a host is like at the moment, in the units of its description."""

    name: str
    speed: float
    rate_bits_per_s: float | None
    alive: bool = True
    leaving: bool = False
    cut: bool = False

    @classmethod
    def as_described(cls, host: EmulatedHost) -> HostNow:
        """The host before anything happened to it."""
        return cls(name=host.name, speed=host.speed, rate_bits_per_s=host.rate_bits_per_s)

    def after(self, change: Change) -> HostNow:
        """The host after a change that names it, or all; to the dead nothing happens but that they return."""
        if change.host not in (self.name, EVERY_HOST):
            return self
        if not self.alive:
            return replace(self, alive=True) if change.returns else self
        return replace(
            self,
            speed=self.speed if change.speed is None else change.speed,
            rate_bits_per_s=self.rate_bits_per_s if change.rate_bits_per_s is None else change.rate_bits_per_s,
            alive=not change.dies,
            leaving=(self.leaving or change.notice) and not change.dies,
            cut=(self.cut or change.cut) and not (change.heals or change.dies),
        )


@dataclass(frozen=True, kw_only=True)
class Moment:
    """How far training has come. ``training_s`` is None until it begins."""

    training_s: float | None = None
    step: int = 0

    def reaches(self, change: Change) -> bool:
        """Whether the change is due."""
        if change.at_step is not None:
            return self.training_s is not None and self.step >= change.at_step
        if change.at_s is not None:
            return self.training_s is not None and self.training_s >= change.at_s
        return True


def split(pending: Sequence[Change], moment: Moment) -> tuple[list[Change], list[Change]]:
    """The changes that are due, in the order of their moments, and those that are not yet."""
    due = [change for change in pending if moment.reaches(change)]
    due.sort(key=lambda change: (change.at_s or 0.0, change.at_step or 0))  # several may be due when a run is resumed
    return due, [change for change in pending if not moment.reaches(change)]


def still_to_come(scheduled: Iterable[Change], earlier: Iterable[LogEvent]) -> list[Change]:
    """The schedule of a resumed run: whoever died before has been replaced, and does not die of the same again."""
    dead = {event.host for event in earlier if isinstance(event, ConditionChanged) and event.dies}
    return [
        change
        for change in scheduled
        if not (change.dies and (change.host in dead or (change.host == EVERY_HOST and dead)))
    ]


_PERIODS = 3
"""Judged by their median: a first step, or a moment in which the machine was busy, must not count for good."""
_ROOM = 1.15


@dataclass(kw_only=True)
class FitWatch:
    """How much slower a miniature must run so that the real computation fits into the declared time.

    Follows ``pace_use`` of the run's ``step`` events: real computation over declared time, of each worker.

    Attributes:
        slowdown: the present one, at least 1.
        since_s: when it began to hold; periods that began earlier say nothing about it.
    """

    slowdown: float = 1.0
    since_s: float = -math.inf
    _use: deque[Sequence[float]] = field(default_factory=lambda: deque(maxlen=_PERIODS))

    def look(self, event: LogEvent, now_s: float) -> int | None:
        """Take in one event, now; the rank whose computation does not fit is returned, after `slowdown` was raised."""
        if not isinstance(event, StepsLogged) or not event.pace_use:
            return None
        use = event.pace_use
        # A step more than the period has: what was measured may lag behind by one.
        if now_s - (event.steps + 1) * event.step_time_s < self.since_s:
            return None
        if self._use and len(self._use[-1]) != len(use):
            self._use.clear()  # others train
        self._use.append(use)
        if len(self._use) < _PERIODS:
            return None
        medians = [statistics.median(worker) for worker in zip(*self._use, strict=True)]
        if max(medians) <= 1:
            return None
        self.slowdown = rounded_up(self.slowdown * max(medians) * _ROOM)
        self.since_s = now_s
        self._use.clear()
        return medians.index(max(medians))
