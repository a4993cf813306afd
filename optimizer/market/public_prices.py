"""Asks AWS's public price feeds about a region: each file once, and only what has changed since it was read last."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from hetopt.core.errors import BadInput, HetoptError
from hetopt.core.plain_text import known
from hetopt.optimizer.market import price_feeds
from hetopt.optimizer.market.catalog_refresh import PublicPrices
from hetopt.optimizer.market.price_feeds import feed_url
from hetopt.optimizer.market.public_file import Fetched, PublicFiles

Told = Callable[[str, int, int | None], None]
"""Is told what is read, how many bytes of it are there, and of how many (absent: unknown)."""


@dataclass(frozen=True, kw_only=True)
class PublicFeeds:
    """The feeds, and where what was made of them is kept.

    Attributes:
        files: that are fetched through it.
        told: what is going on.
        note: a remark that is worth keeping.
    """

    files: PublicFiles
    told: Told
    note: Callable[[str], None]

    def versions(self) -> dict[str, str]:
        """The newest version of each region's price list.

        Raises:
            CloudRefused, BadInput: the index cannot be had or used.
        """
        url = feed_url(price_feeds.REGION_INDEX)
        made = self._fetch("regions", url, price_feeds.region_versions, price_feeds.MOST_JSON_BYTES, "regions").made
        return {str(region): str(version) for region, version in made.items()}

    def everywhere(self) -> Everywhere:
        """Spot prices and the advisor's data of all regions; what cannot be had is noted, and as it was last."""
        return Everywhere(
            spot=self._if_possible("spot-prices", price_feeds.SPOT_PRICES, price_feeds.spot_prices, "spot prices"),
            advice=self._if_possible("spot-advisor", price_feeds.SPOT_ADVISOR, price_feeds.spot_advice, "Spot Advisor"),
        )

    def of(self, region: str, versions: dict[str, str], everywhere: Everywhere) -> PublicPrices:
        """Today's prices of a region.

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
        listed = self._fetch(
            f"price-list-{region}", url, price_feeds.on_demand_prices, price_feeds.MOST_PRICE_LIST_BYTES, "price list"
        ).made
        spot, advice = everywhere.spot, everywhere.advice
        advised = advice.made.get(region) if advice else None
        return PublicPrices(
            on_demand=listed["usd_per_hour"],
            published=listed["published"],
            spot=spot.made.get(region) if spot else None,
            spot_day=spot.day if spot else None,
            advice=None if advised is None else {name: (saving, band) for name, (saving, band) in advised.items()},
            advice_day=advice.day if advice else None,
            left_out=tuple(listed["left_out"]),
        )

    def _if_possible(
        self, name: str, url: str, make: Callable[[Iterator[bytes], str], Any], what: str
    ) -> Fetched | None:
        url = feed_url(url)
        try:
            return self._fetch(name, url, make, price_feeds.MOST_JSON_BYTES, what)
        except HetoptError as error:
            kept = self.files.kept(name, url)
            stays = f"those of {kept.day} stay" if kept else "the bundled catalogue's stay"
            self.note(f"{what}: {stays}, because {error}")
            return kept

    def _fetch(
        self, name: str, url: str, make: Callable[[Iterator[bytes], str], Any], most_bytes: int, what: str
    ) -> Fetched:
        return self.files.fetch(
            name,
            url,
            lambda pieces: make(pieces, url),
            most_bytes=most_bytes,
            told=lambda done, total: self.told(what, done, total),
        )


@dataclass(frozen=True, kw_only=True)
class Everywhere:
    """What the feeds of all regions say; absent where they could never be read."""

    spot: Fetched | None
    advice: Fetched | None
