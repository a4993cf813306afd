"""Spot prices of each zone, now and how much they moved: from the provider's history, and in a refreshed catalogue."""

from __future__ import annotations

import datetime
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hetopt.core.paths import inside
from hetopt.optimizer.market.catalog_rows import read_rows

COLUMNS = ("instance_type", "zone", "spot_usd_per_hour", "spot_log_sd")


@dataclass(frozen=True, kw_only=True, slots=True)
class ZonePrice:
    """What one type costs on spot in one zone.

    Attributes:
        usd_per_hour: in effect when it was read.
        log_sd: standard deviation of the log of the price over the days that were read, each price counted for as long
            as it held; 0 where it did not move.
    """

    usd_per_hour: float
    log_sd: float


def zone_prices(
    history: Iterable[Mapping[str, Any]], zones: Iterable[Mapping[str, Any]]
) -> dict[str, dict[str, ZonePrice]]:
    """Prices by type and zone id, from entries of DescribeSpotPriceHistory and DescribeAvailabilityZones.

    An entry holds from its time until the next one of its type and zone. Zone names differ between accounts, so they
    are turned into zone ids where these are told.
    """
    ids = {str(zone["ZoneName"]): str(zone["ZoneId"]) for zone in zones if "ZoneId" in zone}
    entries: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    for entry in history:
        usd = float(entry["SpotPrice"])
        if usd <= 0 or not str(entry.get("ProductDescription", "Linux/UNIX")).startswith("Linux/UNIX"):
            continue
        name = str(entry.get("AvailabilityZone", ""))
        zone = str(entry.get("AvailabilityZoneId") or ids.get(name, name))
        entries[str(entry["InstanceType"]), zone].append((_instant(entry["Timestamp"]), usd))
    newest = max((when for found in entries.values() for when, _ in found), default=0.0)
    prices: dict[str, dict[str, ZonePrice]] = defaultdict(dict)
    for (instance_type, zone), found in entries.items():
        found.sort()
        ends = [when for when, _ in found[1:]] + [newest]
        held = [max(0.0, end - when) for (when, _), end in zip(found, ends, strict=True)]
        prices[instance_type][zone] = ZonePrice(
            usd_per_hour=found[-1][1], log_sd=_spread([math.log(usd) for _, usd in found], held)
        )
    return dict(prices)


def read_zone_prices(directory: Path, region: str) -> dict[str, dict[str, ZonePrice]]:
    """Prices by type and zone id of a refreshed catalogue; empty where it has none, as the bundled one.

    Raises:
        BadInput: the file cannot be used; names the line.
    """
    path = inside(directory, f"zones/{region}.csv", what="region")
    prices: dict[str, dict[str, ZonePrice]] = defaultdict(dict)
    for row in read_rows(path, required=COLUMNS) if path.exists() else ():
        usd = row.number("spot_usd_per_hour")
        if usd == 0:
            raise row.bad("spot_usd_per_hour is 0, but must be a number above 0")
        prices[row.required("instance_type")][row.required("zone")] = ZonePrice(
            usd_per_hour=usd, log_sd=row.number("spot_log_sd")
        )
    return dict(prices)


def _spread(logs: list[float], weights: list[float]) -> float:
    total = sum(weights)
    if total == 0:
        return 0.0
    mean = sum(weight * log for weight, log in zip(weights, logs, strict=True)) / total
    return math.sqrt(sum(weight * (log - mean) ** 2 for weight, log in zip(weights, logs, strict=True)) / total)


def _instant(value: object) -> float:
    """Seconds since the epoch, of a time or of its text."""
    moment = value if isinstance(value, datetime.datetime) else datetime.datetime.fromisoformat(str(value))
    return (moment if moment.tzinfo else moment.replace(tzinfo=datetime.UTC)).timestamp()
