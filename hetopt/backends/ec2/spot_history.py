"""What spot pools have cost: how EC2 is asked, by the renter and by its machines, and what it answers."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hetopt.backends.ec2 import facts
from hetopt.backends.ec2.objects import failures

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


_WITHIN_S = 5
"""The agent waits for it, and heeds notices every five seconds."""


@dataclass(frozen=True, kw_only=True)
class PriceHistory:
    """Asks EC2 with the credentials of a machine's role. Whoever may not, or reaches nobody, has no answer."""

    client: Any

    @classmethod
    def connect(cls, *, region: str) -> PriceHistory:
        """With the credentials of the machine's role."""
        import boto3
        from botocore.config import Config

        config = Config(retries={"total_max_attempts": 1}, connect_timeout=_WITHIN_S, read_timeout=_WITHIN_S)
        return cls(client=boto3.client("ec2", region_name=region, config=config))

    def __call__(self, types: Sequence[str], from_s: float) -> Sequence[PriceChange] | None:
        """See `hetopt.backends.ec2.renewal.AskPrices`."""
        try:
            pages = self.client.get_paginator("describe_spot_price_history").paginate(
                **history_parameters(types, from_s)
            )
            told = [one for page in pages for one in page["SpotPriceHistory"]]
        except failures():
            return None
        return changes_of({"SpotPriceHistory": told})
