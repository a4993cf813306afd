"""What spot pools have cost, as a machine asks EC2 with the credentials of its role."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hetopt.backends.ec2.spot_history import PriceChange, changes_of, history_parameters

_WITHIN_S = 5
"""The agent waits for it, and heeds notices every five seconds."""


@dataclass(frozen=True, kw_only=True)
class SpotPrices:
    """Asks. Whoever may not, or reaches nobody, has no answer."""

    client: Any

    @classmethod
    def connect(cls, *, region: str) -> SpotPrices:
        """With the credentials of the machine's role."""
        import boto3
        from botocore.config import Config

        config = Config(retries={"total_max_attempts": 1}, connect_timeout=_WITHIN_S, read_timeout=_WITHIN_S)
        return cls(client=boto3.client("ec2", region_name=region, config=config))

    def __call__(self, types: Sequence[str], from_s: float) -> Sequence[PriceChange] | None:
        """See `hetopt.backends.ec2.renewal.AskPrices`."""
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            pages = self.client.get_paginator("describe_spot_price_history").paginate(
                **history_parameters(types, from_s)
            )
            told = [one for page in pages for one in page["SpotPriceHistory"]]
        except (ClientError, BotoCoreError):
            return None
        return changes_of({"SpotPriceHistory": told})
