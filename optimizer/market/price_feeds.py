"""AWS's public price feeds, which need no account: URLs, and parsers of their files.

=============== ============================================ ==========================================================
feed            file                                         holds
=============== ============================================ ==========================================================
regions         region_index.json of the price list          the newest version of each region's price list
price list      REGION/index.csv of that version             on-demand prices; 70 to 300 MB, most of it reservations
spot prices     spot.json                                    a price for each type and region, renewed by the hour
Spot Advisor    spot-advisor-data.json                       savings and interruption bands, renewed every few months
=============== ============================================ ==========================================================

Sources, read 2026-11-26: "Reading the price list files" in the AWS Billing user guide for the first two, and the header
of a file of 2025-09 that timfanda35/aws-pricing-list-loader shows; for the other two, which AWS does not document,
docs/data-sources.md of alexei-led/spotinfo, which reads them daily. The spot prices have no region of the Middle East.
China has a price list of its own, in CNY.
"""

from __future__ import annotations

import codecs
import csv
import datetime
import math
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

from hetopt.core.errors import BadInput
from hetopt.core.plain_text import one_line
from hetopt.optimizer.market.catalog import BANDS
from hetopt.optimizer.market.public_file import checked, is_page, json_of, web_page

MIRROR_VARIABLE = "HETOPT_PRICE_MIRROR"
"""Environment variable with the address of a mirror that has the feeds' files under the same paths."""

REGION_INDEX = "https://pricing.us-east-1.amazonaws.com/offers/v1.0/aws/AmazonEC2/current/region_index.json"
PRICE_LIST = "https://pricing.us-east-1.amazonaws.com/offers/v1.0/aws/AmazonEC2/{version}/{region}/index.csv"
SPOT_PRICES = "https://website.spot.ec2.aws.a2z.com/spot.json"
SPOT_ADVISOR = "https://spot-bid-advisor.s3.amazonaws.com/spot-advisor-data.json"

MOST_PRICE_LIST_BYTES = 4_000_000_000
MOST_JSON_BYTES = 64_000_000
MOST_USD_PER_HOUR = 10_000.0
_MOST_LINE_BYTES = 1 << 16

_REGION = re.compile(r"[a-z]{2}(-[a-z]{1,20}){1,3}-\d{1,2}")
_VERSION = re.compile(r"/offers/v1\.0/aws/AmazonEC2/(\d{8,20})/([a-z0-9-]{1,40})/index\.json")
_TYPE = re.compile(r"[a-z0-9-]{1,30}\.[a-z0-9-]{1,30}")

_NEEDED = ("TermType", "Unit", "PricePerUnit", "Currency", "Instance Type", "Operating System", "Tenancy")
_WANTED: Mapping[str, tuple[str, ...]] = {
    "TermType": ("OnDemand",),
    "Unit": ("Hrs",),
    "Currency": ("USD",),
    "Operating System": ("Linux",),
    "Tenancy": ("Shared",),
    "Pre Installed S/W": ("NA", ""),
    "CapacityStatus": ("Used",),
    "License Model": ("No License required", "NA", ""),
    "Location Type": ("AWS Region",),
    "MarketOption": ("OnDemand", "NA", ""),
}
"""Which rows are the price of an hour of a machine; of these columns those that a file has. A capacity block's hour is
not on demand, and a local zone's is not the region's."""


def feed_url(url: str) -> str:
    """Return the URL of a feed: ``url``, or its path on the mirror that the variable HETOPT_PRICE_MIRROR names.

    Raises:
        BadInput: the mirror is neither an https address nor one on this machine.
    """
    mirror = os.environ.get(MIRROR_VARIABLE)
    return url if not mirror else checked(mirror).rstrip("/") + urlsplit(url).path


def region_versions(pieces: Iterator[bytes], origin: str) -> dict[str, str]:
    """Parse AWS's region index, ``pieces`` of URL ``origin``; return the newest version of price lists by region.

    Raises:
        BadInput: the file is no region index, no JSON or a web page, or names no region.
    """
    versions: dict[str, str] = {}
    for region, entry in _object(_object(json_of(pieces, origin)).get("regions")).items():
        version = _VERSION.fullmatch(str(_object(entry).get("currentVersionUrl")))
        if _REGION.fullmatch(region) and version and version.group(2) == region:
            versions[region] = version.group(1)
    if not versions:
        raise _other(origin, "names no region")
    return versions


def on_demand_prices(pieces: Iterator[bytes], origin: str) -> dict[str, Any]:
    """Parse a streamed price list; return its day, on-demand USD an hour by type (Linux, shared), and remarks.

    Of several prices of a type the highest is taken, with a remark. A price of 0 is ignored.

    Args:
        pieces: pieces of the CSV file, in order; read to the end.
        origin: URL of the file, for errors.

    Returns:
        A dictionary. ``published``: the day of the price list, ISO 8601; ``usd_per_hour``: by type; ``left_out``: a
            sentence for each type whose price cannot be used or is not clear.

    Raises:
        BadInput: the file is no price list of EC2, is cut off, or has no prices in USD.
    """
    lines = _lines(pieces, origin)
    published, columns = _header(lines, origin)
    wanted = [(columns[name], values) for name, values in _WANTED.items() if name in columns]
    price, type_name = columns["PricePerUnit"], columns["Instance Type"]
    usd_per_hour: dict[str, float] = {}
    left_out: dict[str, str] = {}
    last = b""
    for line in lines:
        last = line
        if b"OnDemand" not in line or b"Linux" not in line:
            continue
        cells = _cells(line)
        if len(cells) != len(columns) or not all(cells[index] in values for index, values in wanted):
            continue
        if not _TYPE.fullmatch(cells[type_name]):
            continue
        name, usd = cells[type_name], _usd(cells[price])
        if usd is None:
            left_out[name] = f"{name}: its on-demand price is {one_line(cells[price][:40])!r}"
        elif usd > 0:
            if name in usd_per_hour and usd_per_hour[name] != usd:
                left_out[name] = (
                    f"{name}: on demand at ${usd_per_hour[name]:g} and ${usd:g}, of which the higher is taken"
                )
            usd_per_hour[name] = max(usd, usd_per_hour.get(name, 0.0))
    if last and len(_cells(last)) != len(columns):
        raise BadInput(f"{origin} is cut off.", hint="run it again; prices that were read before stay in use")
    if not usd_per_hour:
        raise _other(origin, "has no on-demand price in USD of Linux machines")
    sentences = [left_out[name] for name in sorted(left_out)]
    return {"published": published, "usd_per_hour": usd_per_hour, "left_out": sentences}


def spot_prices(pieces: Iterator[bytes], origin: str) -> dict[str, dict[str, float]]:
    """Parse AWS's spot feed, ``pieces`` of URL ``origin``; return Linux spot prices, USD an hour, by region and type.

    Entries that cannot be used are passed over.

    Raises:
        BadInput: the file is no spot feed, no JSON or a web page, has no prices in USD, or has no prices at all.
    """
    config = _object(_object(json_of(pieces, origin)).get("config"))
    if "USD" not in _list(config.get("currencies")):
        raise BadInput(f"{origin} has no prices in USD.", hint="look whether hetopt is the newest")
    by_region: dict[str, dict[str, float]] = {}
    for entry in _list(config.get("regions")):
        region = str(_object(entry).get("region"))
        if not _REGION.fullmatch(region):
            continue
        here = by_region.setdefault(region, {})
        for group in _list(entry.get("instanceTypes")):
            for size in _list(_object(group).get("sizes")):
                name, usd = str(_object(size).get("size")), _linux_usd(_object(size))
                if usd and _TYPE.fullmatch(name):
                    here[name] = max(usd, here.get(name, 0.0))
    if not any(by_region.values()):
        raise _other(origin, "has no prices")
    return by_region


def spot_advice(pieces: Iterator[bytes], origin: str) -> dict[str, dict[str, tuple[int, str]]]:
    """Parse Spot Advisor, and return (saving in percent of on-demand, interruption band) by region and type, for Linux.

    Args:
        pieces: pieces of the JSON file, in order.
        origin: URL of the file, for errors.

    Raises:
        BadInput: the file is not Spot Advisor's, no JSON or a web page, or has no savings. Single entries that cannot
            be used are passed over.
    """
    data = _object(json_of(pieces, origin))
    ranges = [_object(entry) for entry in _list(data.get("ranges"))]
    bands = {str(entry.get("index")): str(entry.get("label")) for entry in ranges}
    by_region: dict[str, dict[str, tuple[int, str]]] = {}
    for region, systems in _object(data.get("spot_advisor")).items():
        if not _REGION.fullmatch(region):
            continue
        for name, advice in _object(_object(systems).get("Linux")).items():
            advice = _object(advice)
            saving, band = advice.get("s"), bands.get(str(advice.get("r")), "")
            if isinstance(saving, int) and 0 < saving < 100 and band in BANDS and _TYPE.fullmatch(name):
                by_region.setdefault(region, {})[name] = saving, band
    if not by_region:
        raise _other(origin, "has no savings")
    return by_region


def _header(lines: Iterator[bytes], origin: str) -> tuple[str, dict[str, int]]:
    """Return the day of a price list, ISO 8601, and the index of each column; takes the lines up to the column names.

    Raises:
        BadInput: the file is a web page or no price list of EC2, or lacks a column or its date.
    """
    first = next((line for line in lines if line.removeprefix(codecs.BOM_UTF8).strip()), b"")
    if is_page(first):
        raise web_page(origin)
    facts: dict[str, str] = {}
    cells = _cells(first)
    while len(cells) == 2 and len(facts) < 20:
        facts[cells[0]] = cells[1]
        cells = _cells(next(lines, b""))
    if facts.get("FormatVersion") != "v1.0" or facts.get("OfferCode") != "AmazonEC2":
        raise _other(origin, "is no price list of EC2 in the format v1.0")
    columns = {name: index for index, name in enumerate(cells)}
    missing = [name for name in _NEEDED if name not in columns]
    if missing:
        raise _other(origin, f"lacks the column {missing[0]}")
    try:
        published = datetime.datetime.fromisoformat(facts.get("Publication Date", "")).date().isoformat()
    except ValueError:
        raise _other(origin, "has no date") from None
    return published, columns


def _lines(pieces: Iterator[bytes], origin: str) -> Iterator[bytes]:
    """Yield the lines of a file that comes in pieces, without empty ones and line ends; the last need not end.

    Raises:
        BadInput: a line is of immense length, as of a web page.
    """
    rest = b""
    for piece in pieces:
        lines = (rest + piece).split(b"\n")
        rest = lines.pop()
        if len(rest) > _MOST_LINE_BYTES:
            raise web_page(origin) if is_page(rest) and not lines else _other(origin, "has a line of immense length")
        yield from filter(None, lines)
    if rest:
        yield rest


def _cells(line: bytes) -> list[str]:
    """Return the cells of a line of CSV; empty: the line is damaged."""
    try:
        return next(csv.reader([line.decode("utf-8-sig").rstrip("\r")], strict=True), [])
    except (csv.Error, UnicodeDecodeError):
        return []


def _linux_usd(size: Mapping[str, Any]) -> float | None:
    """Return the Linux price of a spot feed's ``size`` entry, USD an hour; None: it has none, such as 'N/A*'."""
    for column in _list(size.get("valueColumns")):
        if _object(column).get("name") == "linux":
            return _usd(str(_object(column.get("prices")).get("USD")))
    return None


def _usd(text: str) -> float | None:
    """Return a price in USD an hour; None: the text is no number, or one that cannot be a price."""
    try:
        usd = float(text)
    except ValueError:
        return None
    return usd if math.isfinite(usd) and 0 <= usd <= MOST_USD_PER_HOUR else None


def _object(value: object) -> dict[str, Any]:
    """Return a JSON object as it is, and an empty one for any other value, so that one bad record stops no reader."""
    return value if isinstance(value, dict) else {}


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _other(origin: str, what: str) -> BadInput:
    """Return, not raise, the error of a file at URL ``origin`` with a fault, such as 'names no region'."""
    hint = "look whether a proxy answers in its place, and whether hetopt is the newest"
    return BadInput(f"{origin} {what}.", hint=hint)
