"""Which quota a machine counts against: EC2 counts vCPUs by family and market, each with a code of its own.

Quotas of the P families have been divided before and may be again, so a quota is also recognised by its name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from hetopt.optimizer.market.catalog import Market
from hetopt.optimizer.market.quota import family_of

SEEN = (
    "codes and defaults: EC2 user guide, 'Spot Instance quotas' and 'On-Demand Instance quotas', and the answers of "
    "list-service-quotas in public repositories, read 2026-11-26"
)


@dataclass(frozen=True, kw_only=True)
class Quota:
    """A number of vCPUs that a region grants an account.

    Attributes:
        default: what a new account has; None where it is not published.
    """

    code: str
    name: str
    default: float | None = None


_FAMILIES: Mapping[str, tuple[Quota, Quota]] = MappingProxyType(
    {
        "g": (
            Quota(code="L-3819A6DF", name="All G and VT Spot Instance Requests", default=0),
            Quota(code="L-DB2E81BA", name="Running On-Demand G and VT instances", default=0),
        ),
        "p5": (
            Quota(code="L-C4BD4855", name="All P5 Spot Instance Requests", default=0),
            Quota(code="L-417A185B", name="Running On-Demand P instances", default=0),
        ),
        "p": (
            Quota(code="L-7212CCBC", name="All P4, P3 and P2 Spot Instance Requests", default=0),
            Quota(code="L-417A185B", name="Running On-Demand P instances", default=0),
        ),
        "inf": (
            Quota(code="L-B5D1601B", name="All Inf Spot Instance Requests"),
            Quota(code="L-1945791B", name="Running On-Demand Inf instances"),
        ),
        "trn": (
            Quota(code="L-6B0D517C", name="All Trn Spot Instance Requests"),
            Quota(code="L-2C3B7624", name="Running On-Demand Trn instances"),
        ),
        "dl": (
            Quota(code="L-85EED4F7", name="All DL Spot Instance Requests"),
            Quota(code="L-6E869C2A", name="Running On-Demand DL instances"),
        ),
        "f": (
            Quota(code="L-88CF9481", name="All F Spot Instance Requests"),
            Quota(code="L-74FC7D96", name="Running On-Demand F instances"),
        ),
        "x": (
            Quota(code="L-E3A00192", name="All X Spot Instance Requests"),
            Quota(code="L-7295265B", name="Running On-Demand X instances"),
        ),
    }
)
"""On the spot market and on demand, by the family of `hetopt.optimizer.market.quota`; all others count as standard."""

_STANDARD = (
    Quota(code="L-34B43A08", name="All Standard (A, C, D, H, I, M, R, T, Z) Spot Instance Requests", default=5),
    Quota(code="L-1216C47A", name="Running On-Demand Standard (A, C, D, H, I, M, R, T, Z) instances", default=5),
)


def quota_of(instance_type: str, market: Market) -> Quota:
    """The quota that machines of a type count against in a market."""
    spot, on_demand = _FAMILIES.get(family_of(instance_type, market), _STANDARD)
    return spot if market == "spot" else on_demand
