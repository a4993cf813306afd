"""Asks AWS's public price feeds about regions: each file once."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from hetopt.core.errors import BadInput, HetoptError
from hetopt.core.plain_text import known
from hetopt.optimizer.market import price_feeds
from hetopt.optimizer.market.catalog_refresh import PublicPrices
from hetopt.optimizer.market.price_feeds import feed_url
from hetopt.optimizer.market.public_file import fetched

Told = Callable[[str, int, int | None], None]
"""Is told what is read, how many bytes of it are there, and of how many (absent: unknown)."""

ByRegion = tuple[dict[str, Any] | None, datetime.date | None]
"""What a feed of all regions says of each, and the day that it is of; nothing where it could not be read."""


@dataclass(frozen=True, kw_only=True)
class PublicFeeds:
    """Readers of the public price feeds, region by region.

    Attributes:
        today: day of what does not say when it was changed.
        told: what is going on.
        note: a remark that is worth keeping.
    """

    today: datetime.date
    told: Told
    note: Callable[[str], None]

    def versions(self) -> dict[str, str]:
        """Return the newest version of each region's price list.

        Raises:
            CloudRefused, BadInput: the index cannot be had or used.
        """
        url, most_bytes = feed_url(price_feeds.REGION_INDEX), price_feeds.MOST_JSON_BYTES
        versions: dict[str, str] = self._read(url, price_feeds.region_versions, most_bytes, "regions")[0]
        return versions

    def everywhere(self) -> tuple[ByRegion, ByRegion]:
        """Return spot prices and the advisor's data of all regions; what cannot be had is noted."""
        return (
            self._if_possible(price_feeds.SPOT_PRICES, price_feeds.spot_prices, "spot prices"),
            self._if_possible(price_feeds.SPOT_ADVISOR, price_feeds.spot_advice, "Spot Advisor"),
        )

    def of(self, region: str, versions: dict[str, str], everywhere: tuple[ByRegion, ByRegion]) -> PublicPrices:
        """Return today's prices of a region.

        Raises:
            CloudRefused, BadInput: the price list cannot be had or used, or there is no such region.
        """
        if region not in versions and region.startswith("cn-"):
            raise BadInput(
                f"AWS's public price list does not have {region}: China's is apart, in CNY, and hetopt counts in USD.",
                hint="name another region",
            )
        version = versions[known(region, versions, "AWS region")]
        url = feed_url(price_feeds.PRICE_LIST.format(version=version, region=region))
        most_bytes = price_feeds.MOST_PRICE_LIST_BYTES
        listed, _ = self._read(url, price_feeds.on_demand_prices, most_bytes, "price list")
        (spot, spot_day), (advice, advice_day) = everywhere
        return PublicPrices(
            on_demand=listed["usd_per_hour"],
            published=listed["published"],
            spot=spot.get(region) if spot else None,
            spot_day=spot_day,
            advice=advice.get(region) if advice else None,
            advice_day=advice_day,
            left_out=tuple(listed["left_out"]),
        )

    def _if_possible(self, url: str, make: Callable[[Iterator[bytes], str], Any], what: str) -> ByRegion:
        try:
            return self._read(feed_url(url), make, price_feeds.MOST_JSON_BYTES, what)
        except HetoptError as error:
            self.note(f"{what}: the bundled catalogue's stay, because {error}")
            return None, None

    def _read(
        self, url: str, make: Callable[[Iterator[bytes], str], Any], most_bytes: int, what: str
    ) -> tuple[Any, datetime.date]:
        content, day = fetched(
            url,
            lambda pieces: make(pieces, url),
            most_bytes=most_bytes,
            told=lambda done, total: self.told(what, done, total),
        )
        return content, day or self.today
