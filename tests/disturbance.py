"""Whether this machine was ours while something was timed: a virtual machine's cores may be given to others."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

_STAT = Path("/proc/stat")
_NOTE = "stolen"
_IDLE, _WAITING, _STOLEN, _OWN_FIELDS = 3, 4, 7, 8

MOST_STOLEN = 0.02
"""Share of the time asked for that may go to others while a rate or a time is measured to a few percent."""

PATIENCE_S = 900.0
"""How long a test waits for processes that end by themselves in seconds, on a machine whose cores are with others."""


@dataclass(frozen=True)
class CoreTime:
    """Time of all cores since the machine started, in ticks: what was asked of them, and what others got of it."""

    wanted: int = 0
    stolen: int = 0

    @classmethod
    def now(cls) -> CoreTime:
        """Zeros where the system does not tell."""
        try:
            ticks = [int(field) for field in _STAT.read_text().split("\n", 1)[0].split()[1 : 1 + _OWN_FIELDS]]
        except OSError:
            return cls()
        return cls(wanted=sum(ticks) - ticks[_IDLE] - ticks[_WAITING], stolen=ticks[_STOLEN])

    def stolen_since(self, begun: CoreTime) -> float:
        """The share of what was asked for since then that others got."""
        return (self.stolen - begun.stolen) / max(1, self.wanted - begun.wanted)


def note(folder: Path, begun: CoreTime) -> None:
    """Write down beside what was made since then how much of the cores others had: tests of it ask `was_ours`."""
    (folder / _NOTE).write_text(str(CoreTime.now().stolen_since(begun)))


def was_ours(folder: Path) -> bool:
    """Whether this machine was ours while the folder's content was made."""
    return float((folder / _NOTE).read_text()) <= MOST_STOLEN
