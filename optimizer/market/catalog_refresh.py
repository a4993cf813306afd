"""A region's catalogue files made from AWS's public price feeds, and the reader of the feeds.

Prices and interruption bands are the feeds'; specifications, CoreMark, and prices of volumes and transfer stay as
bundled.
"""

from __future__ import annotations

import csv
import datetime
import io
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hetopt.catalogs.build import as_csv, number
from hetopt.core.errors import BadInput, HetoptError
from hetopt.core.paths import inside, read_json, read_text
from hetopt.core.plain_text import known
from hetopt.optimizer.market import price_feeds
from hetopt.optimizer.market.instance_type import TYPE_COLUMNS
from hetopt.optimizer.market.price_feeds import feed_url
from hetopt.optimizer.market.public_file import fetched

PRICE_LIST = "public-price-list"
SPOT_FEED = "public-spot-prices"
ADVISOR = "public-spot-advisor"
PUBLIC_FACTS = "facts that AWS publishes"

LEAST_SPOT_SHARE = 0.02
LEAST_SPOT_USD = 0.0005
"""Least spot price, USD an hour, that is believed, beside `LEAST_SPOT_SHARE` of the on-demand price: no pool has ever
been as cheap as less than either."""


@dataclass(frozen=True, kw_only=True)
class PublicPrices:
    """Prices, USD an hour, spot savings and interruption bands of one region by type, from AWS's public feeds.

    Attributes:
        on_demand: USD an hour by type.
        published: day of the price list, ISO 8601.
        spot: USD an hour by type, one price for the region; None: the feed could not be read, or has no such region.
        spot_day: day of the spot prices; None: the feed could not be read.
        advice: (saving in percent of on demand, interruption band) by type; None: as of ``spot``.
        advice_day: day that the advice was published; None: the feed could not be read.
        left_out: a sentence for each price that could not be used.
    """

    on_demand: Mapping[str, float]
    published: str
    spot: Mapping[str, float] | None = None
    spot_day: datetime.date | None = None
    advice: Mapping[str, tuple[int, str]] | None = None
    advice_day: datetime.date | None = None
    left_out: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Refreshed:
    """Text of a refreshed catalogue's files, not written yet, and counts of its types and prices.

    Attributes:
        files: text by path inside the folder.
        types, on_demand, spot: how many types of the region have a specification and prices.
        left_out: types or prices that could not be used, and why, for the person to see.
    """

    files: Mapping[str, str]
    types: int
    on_demand: int
    spot: int
    left_out: tuple[str, ...]


def refreshed(prices: PublicPrices, region: str, day: datetime.date, bundled: Path) -> Refreshed:
    """Return, unwritten, a catalogue's files: a region's ``prices`` read on ``day``, the rest from folder ``bundled``.

    Types of the region are those with a price and a specification in the bundled catalogue. Figures of a feed that is
    None in ``prices``, and zones, stay as bundled. Spot prices that are too low to be true are left out.

    Args:
        prices: prices of the public feeds, for ``region``.
        region: whose file is made anew.
        day: when the feeds were read.
        bundled: folder of the bundled catalogue.

    Raises:
        BadInput: the region cannot be the name of a file, or a bundled file cannot be read.
    """
    left_out = list(prices.left_out)
    types = {row["instance_type"]: row for row in _rows(bundled / "instance_types.csv")}
    spot_feed = prices.spot or {}
    spot = {
        name: usd
        for name, usd in spot_feed.items()
        if usd >= max(LEAST_SPOT_USD, LEAST_SPOT_SHARE * prices.on_demand.get(name, 0.0))
    }
    left_out += [f"{name}: a spot price of ${usd:g} cannot be" for name, usd in spot_feed.items() if name not in spot]
    left_out += [
        f"{name}: spot at ${spot[name]:g} costs no less than ${prices.on_demand[name]:g} on demand, which is taken"
        for name in sorted(set(spot) & set(prices.on_demand))
        if spot[name] >= prices.on_demand[name]
    ]
    for name in set(spot) & set(types):  # what has a price is sold
        types[name] = {**types[name], "spot_supported": "1"}
    priced = set(prices.on_demand) | set(spot)
    left_out += [f"{name}: it has a price and no specification" for name in sorted(priced - set(types))]
    here = sorted(priced & set(types))
    before = inside(bundled, f"regions/{region}.csv", what="region")
    rows = {row["instance_type"]: row for row in _rows(before)} if before.exists() else {}
    nothing: dict[str, str] = {}
    region_rows = []
    for name in here:
        known, advice = rows.get(name, nothing), (prices.advice or {}).get(name)
        usd = known.get("spot_usd_per_hour", "") if prices.spot is None else _usd(spot.get(name))
        saving, band = (str(advice[0]), advice[1]) if advice else ("", "")
        if prices.advice is None:
            saving, band = known.get("spot_saving_percent", ""), known.get("interruption_band", "")
        region_rows.append(
            {
                "instance_type": name,
                "zones": known.get("zones", ""),
                "on_demand_usd_per_hour": _usd(prices.on_demand.get(name)),
                "spot_usd_per_hour": usd,
                "spot_saving_percent": "" if usd else saving,
                "interruption_band": band,
            }
        )
    kept = {
        f"regions/{path.name}": read_text(path) for path in (bundled / "regions").glob("*.csv") if path.stem != region
    } | {name: read_text(bundled / name) for name in ("caveats.csv", "billing.json")}
    files = {
        **kept,
        "instance_types.csv": as_csv([{column: row[column] for column in TYPE_COLUMNS} for row in types.values()]),
        f"regions/{region}.csv": as_csv(region_rows),
        "sources.json": _sources(bundled, region, day, prices),
    }
    return Refreshed(
        files=files,
        types=len(here),
        on_demand=len(set(prices.on_demand) & set(here)),
        spot=sum(bool(row["spot_usd_per_hour"]) for row in region_rows),
        left_out=tuple(left_out),
    )


def _usd(value: float | None) -> str:
    return "" if value is None else number(f"{value:.6f}")


def _rows(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(read_text(path), newline="")))


def _sources(bundled: Path, region: str, day: datetime.date, prices: PublicPrices) -> str:
    """Return the text of sources.json: the bundled sources, and the feeds' with their days for their columns.

    Columns whose feed gave nothing keep the bundled source.

    Raises:
        BadInput: the bundled file cannot be read.
    """
    data = read_json(bundled / "sources.json")
    fields = data["fields"]
    columns = {**fields["regions/*.csv"], **fields.get(f"regions/{region}.csv", {})}

    def describe(name: str, title: str, true_on: datetime.date | None, licence: str = PUBLIC_FACTS) -> list[str]:
        data["sources"][name] = {
            "title": f"{title}, {region}",
            "licence": licence,
            "date": (true_on or day).isoformat(),
        }
        return [name]

    columns["on_demand_usd_per_hour"] = describe(
        PRICE_LIST, f"AWS price list of {prices.published}, Linux, shared tenancy", day
    )
    if prices.advice is not None:
        columns["spot_saving_percent"] = describe(ADVISOR, "AWS Spot Advisor, Linux", prices.advice_day)
        columns["interruption_band"] = [ADVISOR]
    if prices.spot is not None:
        columns["spot_usd_per_hour"] = describe(SPOT_FEED, "AWS spot price feed, Linux", prices.spot_day)
    fields[f"regions/{region}.csv"] = columns
    return json.dumps(data, indent=2, ensure_ascii=False) + "\n"


Progress = Callable[[str, int, int | None], None]
"""Callback with the feed's name, the bytes received so far, and the bytes in all (None: unknown)."""

ByRegion = tuple[dict[str, Any] | None, datetime.date | None]
"""What a feed says of all regions, by region, and the day that it is of; (None, None) where it could not be read."""


@dataclass(frozen=True, kw_only=True)
class PublicFeeds:
    """Reader of AWS's public price feeds; every method downloads.

    Attributes:
        today: day of a feed whose server does not say when it was changed.
        progress: is called with the feed's name, the bytes received, and the bytes in all (None: unknown).
        note: is called with a remark for the person, such as that a feed could not be read.
    """

    today: datetime.date
    progress: Progress
    note: Callable[[str], None]

    def versions(self) -> dict[str, str]:
        """Download AWS's region index, and return the newest version of each region's price list, by region.

        Raises:
            CloudRefused: the index cannot be reached, or the server refuses it.
            BadInput: what came is no region index, or HETOPT_PRICE_MIRROR names no https address.
        """
        url, most_bytes = feed_url(price_feeds.REGION_INDEX), price_feeds.MOST_JSON_BYTES
        versions: dict[str, str] = self._read(url, price_feeds.region_versions, most_bytes, "regions")[0]
        return versions

    def everywhere(self) -> tuple[ByRegion, ByRegion]:
        """Download spot prices and Spot Advisor of all regions; return each with its day, (None, None) on failure.

        A feed that cannot be downloaded or used is reported to ``note``; nothing is raised for it.
        """
        return (
            self._if_possible(price_feeds.SPOT_PRICES, price_feeds.spot_prices, "spot prices"),
            self._if_possible(price_feeds.SPOT_ADVISOR, price_feeds.spot_advice, "Spot Advisor"),
        )

    def of(self, region: str, versions: dict[str, str], everywhere: tuple[ByRegion, ByRegion]) -> PublicPrices:
        """Download a region's price list (newest of ``versions``); return its prices, and its part of ``everywhere``.

        Args:
            region: region of AWS.
            versions: newest version of each region's price list, as `versions` returns them.
            everywhere: spot prices and Spot Advisor of all regions, as `everywhere` returns them; a feed without the
                region counts as one that gave nothing.

        Raises:
            CloudRefused: the price list cannot be reached, or the server refuses it.
            BadInput: ``versions`` has no such region (China's have a list of their own), the price list cannot be used,
                or HETOPT_PRICE_MIRROR names no https address.
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
        """Download and parse a feed; return its figures by region and its day, or (None, None) and call `note`."""
        try:
            return self._read(feed_url(url), make, price_feeds.MOST_JSON_BYTES, what)
        except HetoptError as error:
            self.note(f"{what}: the bundled catalogue's stay, because {error}")
            return None, None

    def _read(
        self, url: str, make: Callable[[Iterator[bytes], str], Any], most_bytes: int, what: str
    ) -> tuple[Any, datetime.date]:
        """Download a feed; return the result of ``make``, and the feed's day (else `today`); errors are `fetched`'s.

        ``what`` is the feed's name in reports of progress.
        """
        content, day = fetched(
            url,
            lambda pieces: make(pieces, url),
            most_bytes=most_bytes,
            progress=lambda done, total: self.progress(what, done, total),
        )
        return content, day or self.today
