"""A host's place among the hosts of a run that spans several: what torchrun must know to find the others."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass

from hetopt.core.errors import BadInput
from hetopt.core.paths import HOST_PATTERN, is_name, shown
from hetopt.core.run_spec import RunSpec

MEETING_PORT = 29400
_FLAGS = ("--host", "--address", "--meeting")


@dataclass(frozen=True, kw_only=True)
class Node:
    """One host.

    Attributes:
        host: its name in the spec.
        address: its own address, by which the others reach it; nodes are ranked by it, as text.
        meeting: where all meet, ``address:port`` of the first host; of every host, with commas between them, where each
            stands alone.
    """

    host: str
    address: str
    meeting: str

    def __post_init__(self) -> None:
        """Refuse what is no host of a network: it comes from a bucket or a command line, and becomes arguments.

        Raises:
            BadInput: a name, an address or a port is none.
        """
        if not is_name(HOST_PATTERN, self.host):
            raise BadInput(
                f"a host name must be of letters, digits and ._-, got {shown(self.host)}.", hint="rename the host"
            )
        for address, port in ((self.address, "1"), *(one.rpartition(":")[::2] for one in self.meeting.split(","))):
            if not _is_address(address) or not re.fullmatch(r"[0-9]{1,5}", port) or not 0 < int(port) < 65536:
                raise BadInput(
                    f"a rendezvous must be an IP address and a port, got {shown(address)}, port {shown(port)}.",
                    hint="for example 10.0.0.1:29400",
                )

    @property
    def stands_alone(self) -> bool:
        """Whether it comes and goes without the others, and only its workers know of them."""
        return "," in self.meeting

    def to_arguments(self) -> list[str]:
        """The node on a command line."""
        return ["--host", self.host, "--address", self.address, "--meeting", self.meeting]

    @classmethod
    def of_arguments(cls, arguments: Sequence[str]) -> Node | None:
        """The node that `to_arguments` wrote; None when there are no arguments.

        Raises:
            BadInput: they are something else.
        """
        if not arguments:
            return None
        values = dict(zip(arguments[::2], arguments[1::2], strict=False))
        if len(arguments) != 2 * len(_FLAGS) or set(values) != set(_FLAGS):
            raise BadInput(f"{' '.join(arguments)!r} describes no node.", hint=f"give {', '.join(_FLAGS)}")
        return cls(host=values["--host"], address=values["--address"], meeting=values["--meeting"])


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def host_names(spec: RunSpec) -> list[str]:
    """The hosts of a run in the order of their workers' ranks."""
    return list(dict.fromkeys(worker.host for worker in spec.workers))


def first_rank(spec: RunSpec, host: str) -> int:
    """The rank of a host's first worker.

    Raises:
        BadInput: the run has no such host.
    """
    for rank, worker in enumerate(spec.workers):
        if worker.host == host:
            return rank
    raise BadInput(f"the run has no host called {host!r}.", hint=f"its hosts are {', '.join(host_names(spec))}")


def workers_on(spec: RunSpec, host: str) -> int:
    """Number of workers of a host."""
    return sum(worker.host == host for worker in spec.workers)
