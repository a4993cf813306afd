"""Which hosts of a run are there, told to its workers by whoever starts and ends them: one small file in its folder.

A worker that does not answer may be dead or cut off, and the others must not go on as if they knew. Who ends a machine
does know. So a host that is started again has another number, and all workers of lower numbers are dead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import NonNegativeInt

from hetopt.core.artifact import Record, ReplacedRecord, write_atomically

PRESENCE_FILE = "hosts.json"
INCARNATION_VARIABLE = "HETOPT_INCARNATION"
"""How often the host of a worker was started before; in its environment."""


class HostThere(Record):
    """A host that is there.

    Attributes:
        incarnation: how often it was started before.
        leaving: it will be taken away soon.
    """

    incarnation: NonNegativeInt = 0
    leaving: bool = False


class Hosts(Record):
    """The hosts that are there, by name."""

    there: dict[str, HostThere]


def write_presence(run_dir: Path, hosts: Mapping[str, HostThere]) -> None:
    """Tell the workers; a reader sees the old state or the new one."""
    write_atomically(run_dir / PRESENCE_FILE, Hosts(there=dict(hosts)).model_dump_json() + "\n")


def life_of(environment: Mapping[str, str], pid: int) -> str:
    """What tells a worker from those that had its place before."""
    return f"{environment.get(INCARNATION_VARIABLE, '0')}.{pid}"


class KnownPresence:
    """Presence as the file tells it; without one nothing is known. A look costs one system call."""

    def __init__(self, run_dir: Path, hosts: Sequence[str]) -> None:
        self._file = ReplacedRecord(Hosts, run_dir / PRESENCE_FILE)
        self._hosts = tuple(hosts)

    def is_away(self, place: int) -> bool:
        """Whether there is no host that a worker could come from."""
        there = self._now()
        return there is not None and self._hosts[place] not in there

    def is_dead(self, place: int, life: str) -> bool:
        """Whether a worker ended with its host."""
        there = self._now()
        if there is None:
            return False
        host = there.get(self._hosts[place])
        return host is None or int(life.partition(".")[0]) < host.incarnation

    @property
    def all_leave(self) -> bool:
        """Whether no host stays: what the workers have in memory will be lost."""
        there = self._now() or {}
        return bool(there) and all(host.leaving for host in there.values())

    def _now(self) -> Mapping[str, HostThere] | None:
        hosts = self._file.now()
        return None if hosts is None else hosts.there
