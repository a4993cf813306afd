"""What a network ACL lets through, by its rules: the first that matches decides, and the last denies. Pure."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Self

from hetopt.backends.ec2 import facts
from hetopt.backends.ec2.renter.request import Answer


def acl_of(subnet_id: str, acls: Iterable[Answer]) -> Answer | None:
    """The one that a subnet has; None where none is told."""
    return next((acl for acl in acls for one in acl["Associations"] if one.get("SubnetId") == subnet_id), None)


@dataclass(frozen=True, kw_only=True)
class Rules:
    """Those of one direction, by their numbers: what matters to TCP of IPv4 with the internet.

    Attributes:
        rules: for TCP with public addresses, as (number, allows, first port, last port).
        numbers: of all.
    """

    rules: tuple[tuple[int, bool, int, int], ...]
    numbers: frozenset[int]

    @classmethod
    def of(cls, acl: Answer | None, *, egress: bool) -> Self:
        """Those of an ACL; none where it is not known.

        What is for some public addresses alone counts where it allows, as nobody knows which these are, and not where
        it denies.
        """
        mine: Sequence[Answer] = [] if acl is None else [one for one in acl["Entries"] if one["Egress"] == egress]
        found = []
        for one in mine:
            addresses = one.get("CidrBlock", "")
            allows = one["RuleAction"] == facts.ACL_ALLOWS.value
            public = addresses != "" and not ipaddress.ip_network(addresses).is_private
            matches = addresses == facts.ANYWHERE.value or (allows and public)
            if matches and str(one["Protocol"]) in facts.ACL_TCP.value:
                ports = one.get("PortRange") or {"From": 0, "To": 65535}
                found.append((int(one["RuleNumber"]), allows, int(ports["From"]), int(ports["To"])))
        return cls(rules=tuple(sorted(found)), numbers=frozenset(int(one["RuleNumber"]) for one in mine))

    def denying(self, first: int, last: int) -> int | None:
        """The number of a rule that keeps a port from the first to the last out; None where all of them pass.

        It is enough to ask for ports at which some rule begins or ends.
        """
        edges = {port for _, _, low, high in self.rules for port in (low - 1, low, high, high + 1)}
        for port in sorted({first, last, *(one for one in edges if first <= one <= last)}):
            rule = next((one for one in self.rules if one[2] <= port <= one[3]), None)
            if rule is not None and not rule[1]:
                return rule[0]
        return None

    def free_before(self, number: int) -> int:
        """A number for a rule that is asked before that one."""
        return next((one for one in range(number - 1, 0, -1) if one not in self.numbers), 1)
