"""What spot pools have cost: how EC2 is asked, by the renter and by its machines, and what it answers."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hetopt.backends.ec2 import facts

PRICES_EVERY_S = 600.0
"""Prices move over hours, and a machine is billed by the second: a look costs nothing, and tells little more often."""


@dataclass(frozen=True, kw_only=True)
class PriceChange:
    """From a moment on (seconds since the epoch) a pool costs so much, in USD an hour, without volume and address."""

    zone: str
    instance_type: str
    at_s: float
    usd_per_hour: float


def history_parameters(names: Sequence[str], from_s: float) -> dict[str, Any]:
    """Of DescribeSpotPriceHistory, for types in every zone.

    Args:
        names: of the types.
        from_s: seconds since the epoch. 'It also returns the last price change before the start time, which is the
            effective price as of the start time' (EC2 API reference, DescribeSpotPriceHistory): from now on, that is
            the price of now.
    """
    return {
        "InstanceTypes": list(names),
        "ProductDescriptions": [facts.SPOT_PRODUCT.value],
        "StartTime": datetime.datetime.fromtimestamp(from_s, datetime.UTC),
    }


def changes_of(answer: Mapping[str, Any]) -> list[PriceChange]:
    """What an answer tells, in the order in which it came about."""
    changes = (
        PriceChange(
            zone=one["AvailabilityZone"],
            instance_type=one["InstanceType"],
            at_s=one["Timestamp"].timestamp(),
            usd_per_hour=float(one["SpotPrice"]),
        )
        for one in answer.get("SpotPriceHistory", ())
    )
    return sorted(changes, key=lambda change: change.at_s)
