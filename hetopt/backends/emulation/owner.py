"""Who a rehearsal's network belongs to, in the few bytes of text that a network interface can carry."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

ALIAS_BYTES = 255  # IFALIASZ in <linux/if.h>, less the final zero


@dataclass(frozen=True, kw_only=True)
class Owner:
    """The process that made a network, and what for.

    Attributes:
        pid: its number, which another process may have been given since.
        started_ticks: when it started, in clock ticks since boot: with the number it names one process for good, and
            unlike a time of day it does not move when somebody sets the clock.
        purpose: for a person, usually the run's folder.
    """

    pid: int
    started_ticks: int
    purpose: str

    @classmethod
    def this_process(cls, purpose: str) -> Owner:
        """The calling process as an owner, told apart from a later one of the same number by its start."""
        pid = os.getpid()
        started_ticks = _started_ticks(pid)
        if started_ticks is None:
            raise OSError(f"/proc does not know process {pid}")
        return cls(pid=pid, started_ticks=started_ticks, purpose=purpose)

    @classmethod
    def parse(cls, alias: str) -> Owner | None:
        """The owner that `alias` gave; None for any other text."""
        found = re.fullmatch(r"pid (\d+) started (\d+) for (.*)", alias, re.DOTALL)
        return cls(pid=int(found[1]), started_ticks=int(found[2]), purpose=found[3]) if found else None

    @property
    def alias(self) -> str:
        """The owner as text that fits an interface; of a long purpose the end is kept, which tells folders apart."""
        head = f"pid {self.pid} started {self.started_ticks} for "
        printable = re.sub(r"\s+", " ", self.purpose).encode("utf-8", errors="replace")
        room = ALIAS_BYTES - len(head)
        return head + printable[max(0, len(printable) - room) :].decode("utf-8", errors="ignore")

    @property
    def lives(self) -> bool:
        """Whether that process is still running; a zombie is not."""
        return _started_ticks(self.pid) == self.started_ticks


def _started_ticks(pid: int) -> int | None:
    """Field 22 of ``/proc/PID/stat``, counted behind the name in parentheses; None when there is no such process."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    state, started_ticks = fields[0], int(fields[19])
    return None if state in "ZX" else started_ticks
