"""How much of a host's processors other programs than the run's use: its owner may be back.

    busy = seconds of processor time of all processes but ours between two looks / seconds between them

A process that begins and ends between two looks is not seen. Linux's ``/proc`` alone is read.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

LOOK_EVERY_S = 5.0
MEAN_OVER_S = 60.0
"""As the shortest of the system's own load averages."""
BACK_BELOW = 0.5
"""Of the limit that a host left at: so that it does not come and go with every breath of its owner's programs."""


@dataclass(frozen=True)
class Process:
    """What one has used so far, seconds of processor time, and who started it."""

    parent: int
    used_s: float


def is_taken(was: bool, busy_cpus: float, limit: float) -> bool:
    """Whether others have a host for themselves: from above the limit until below a part of it."""
    return busy_cpus > (BACK_BELOW * limit if was else limit)


def used_by_others_s(before: Mapping[int, Process], now: Mapping[int, Process], own: int) -> float:
    """Seconds of processor time that processes have used between two looks, without one and its descendants."""
    mine = {own}
    grew = True
    while grew:
        more = {pid for pid, process in now.items() if process.parent in mine} - mine
        mine |= more
        grew = bool(more)
    return sum(
        max(0.0, process.used_s - (before[pid].used_s if pid in before else 0.0))
        for pid, process in now.items()
        if pid not in mine
    )


def processes() -> dict[int, Process]:
    """All that can be seen, by their numbers; see proc_pid_stat(5)."""
    tick_s = 1 / os.sysconf("SC_CLK_TCK")
    found = {}
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                words = file.read().rpartition(b")")[2].split()
        except OSError:
            continue  # it has ended
        found[int(name)] = Process(parent=int(words[1]), used_s=tick_s * (int(words[11]) + int(words[12])))
    return found


@dataclass(kw_only=True)
class Others:
    """The mean of the last minute.

    Attributes:
        own: number of the process that is ours, with its descendants.
        look: what is there.
        clock: seconds.
    """

    own: int
    look: Callable[[], Mapping[int, Process]] = processes
    clock: Callable[[], float] = time.monotonic
    _last: Mapping[int, Process] | None = None
    _looks: deque[tuple[float, float]] = field(default_factory=deque)

    def busy_cpus(self) -> float | None:
        """Look once more; CPUs that others kept busy, or None before a minute has been seen."""
        now_s, now = self.clock(), self.look()
        used_s = 0.0 if self._last is None else used_by_others_s(self._last, now, self.own)
        self._last = now
        self._looks.append((now_s, used_s))
        while len(self._looks) > 2 and now_s - self._looks[1][0] >= MEAN_OVER_S:
            self._looks.popleft()
        spent_s = now_s - self._looks[0][0]
        if spent_s < MEAN_OVER_S:
            return None
        return sum(used for _, used in list(self._looks)[1:]) / spent_s
