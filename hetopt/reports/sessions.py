"""One clock and one list of workers for all that tells of a run, whatever its sessions and its workers are.

A run is stopped and goes on, loses workers and gets others. Its own time leaves out what passed while nothing of it
ran; each worker that ever trained keeps one place in every table, whoever else is there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from hetopt.core.events.parts import StartedWorker
from hetopt.core.events.records import ClockJumped, LogEvent, RunStarted, StepsLogged, TrainingFinished


@dataclass(kw_only=True)
class RunClock:
    """The time of a run, from when it was launched: a session goes on where the one before ended.

    Attributes:
        starts: when it was launched and went on, as far as that is known, in order; seconds since the epoch.
        now_s: of the newest event, in the run's own time.
        sessions: begun so far.
        idle_s: time between sessions, which is no part of ``now_s``.
    """

    starts: tuple[float, ...] = ()
    now_s: float = 0.0
    sessions: int = 0
    idle_s: float = 0.0
    _left_out_s: float = 0.0
    _newest_s: float = 0.0
    _next: int = 0
    _is_over: bool = False
    _is_plain: bool = False

    def take(self, event: LogEvent) -> bool:
        """Go on to an event; True: a session begins with it. The clock never goes back, whatever the log says."""
        time_s = event.time_s
        if self._is_plain and isinstance(event, StepsLogged):  # nearly all of a long log
            if time_s > self._newest_s:
                self._newest_s = time_s
                self.now_s = max(self.now_s, time_s - self._left_out_s)
            return False
        begins = False
        if self._is_over or not self.sessions or self._next < len(self.starts):
            began_s = self._begun(event)
            if began_s is not None:
                begins = True
                if self.sessions:
                    gap_s = max(0.0, began_s - self._newest_s)
                    self.idle_s += gap_s
                    self._left_out_s += gap_s
                else:
                    self._left_out_s = began_s
                self.sessions += 1
                self._is_over = False
        if isinstance(event, ClockJumped):
            self._left_out_s += event.by_s
            self._newest_s += event.by_s
        elif isinstance(event, TrainingFinished):
            self._is_over = True
        self._is_plain = bool(self.sessions) and not self._is_over and self._next >= len(self.starts)
        self._newest_s = max(self._newest_s, time_s)
        self.now_s = max(self.now_s, time_s - self._left_out_s)
        return begins

    def _begun(self, event: LogEvent) -> float | None:
        """When the session began that this event is the first of, if it is."""
        began_s: float | None = None
        # A session's last event may be as late as the next one's start; its first event is later.
        latest_s = event.time_s if self.sessions else math.nextafter(event.time_s, math.inf)
        while self._next < len(self.starts) and self.starts[self._next] < latest_s:
            start_s, self._next = self.starts[self._next], self._next + 1
            # A start that left no event is followed by the one that did.
            if not self.sessions or start_s >= self._newest_s:
                began_s = start_s
        if began_s is not None:
            return began_s
        # Of runs of older versions, only the last start is known.
        return event.time_s if not self.sessions or (self._is_over and isinstance(event, RunStarted)) else None


@dataclass(kw_only=True)
class Roster:
    """All workers that ever trained, in the order in which they came; the rows of every table.

    Attributes:
        workers: all of them, as they were last announced.
        present: of the workers that train now, in rank order: their places in ``workers``.
    """

    workers: list[StartedWorker] = field(default_factory=list)
    present: tuple[int, ...] = ()

    def take(self, event: RunStarted) -> None:
        """Others train from here on; a worker that is announced anew is the one of the same host."""
        found: list[int] = []
        for worker in event.workers:
            place = self._place(worker, found)
            if place is None:
                place = len(self.workers)
                self.workers.append(worker)
            else:
                self.workers[place] = worker
            found.append(place)
        self.present = tuple(found)

    def places(self, count: int) -> tuple[int, ...]:
        """Of the workers of a step; workers that were never announced get a place as well."""
        if count == len(self.present):
            return self.present
        while len(self.workers) < count:
            self.workers.append(StartedWorker(host=f"worker {len(self.workers)}"))
        return tuple(range(count))

    def host(self, rank: int) -> str:
        """Where a worker is that trains now."""
        return self.workers[self.present[rank]].host if rank < len(self.present) else f"worker {rank}"

    @property
    def hosts(self) -> tuple[str, ...]:
        """The host of every worker that ever took part, in the order in which they first came."""
        return tuple(worker.host for worker in self.workers)

    def _place(self, worker: StartedWorker, taken: Sequence[int]) -> int | None:
        for place, known in enumerate(self.workers):
            if place not in taken and known.host == worker.host:
                return place
        return None
