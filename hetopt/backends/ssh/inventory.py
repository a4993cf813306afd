"""The hosts of a run, as they were when it began: a file in its folder, with the hash of the code that they run."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from hetopt.core.artifact import Artifact, HostName, Told
from hetopt.core.errors import BadInput
from hetopt.core.hosts import MOST_HOSTS, AddressAmongHosts, Host
from hetopt.core.names import known

INVENTORY_FILE = "inventory.json"


class Inventory(Artifact):
    """Which machines take part, by which address each that says none was reached (`Host.private`), and who cannot."""

    KIND: ClassVar[str] = "inventory"
    VERSION: ClassVar[int] = 1
    MADE_BY: ClassVar[str] = "hetopt launch PLAN --on ssh"

    hosts: tuple[Host, ...] = Field(min_length=1, max_length=MOST_HOSTS)
    addresses: dict[HostName, AddressAmongHosts] = Field(default_factory=dict)
    left_out: dict[HostName, Told] = Field(default_factory=dict, description="why a host takes no part")
    bundle_sha256: str = Field(pattern=r"^[0-9a-f]{64}$")

    def host(self, name: str) -> Host:
        """The host of that name.

        Raises:
            BadInput: there is none.
        """
        by_name = {host.name: host for host in self.hosts}
        return by_name[known(name, by_name, "host")]

    def fit(self) -> tuple[Host, ...]:
        """Return the hosts that can take part."""
        return tuple(host for host in self.hosts if host.name not in self.left_out)

    def address(self, name: str) -> str:
        """By which the others reach it.

        Raises:
            BadInput: nobody knows.
        """
        found = self.host(name).private or self.addresses.get(name)
        if found is None:
            raise BadInput(f"{name} has no address among the others.", hint="say it: private = 192.168.1.20")
        return found
