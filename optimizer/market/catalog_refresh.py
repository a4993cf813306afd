"""Turns what AWS's public feeds say of a region, and its APIs to an account, into a catalogue folder like the bundled.

The public feeds say what machines cost and how often spot is taken back. The APIs add what machines are, which zones
offer them and what each zone costs. Neither says how fast a processor is (CoreMark), or what volumes and transfer cost:
that stays as it was bundled, and so does everything that was not asked for.
"""

from __future__ import annotations

import csv
import datetime
import io
import json
import re
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hetopt.catalogs.build import OTHER_ACCELERATORS, VENDORS, as_csv, canonical_accelerators, number
from hetopt.core.paths import inside
from hetopt.core.plain_text import one_line
from hetopt.core.reading import read_json, read_text
from hetopt.optimizer.market.instance_type import TYPE_COLUMNS
from hetopt.optimizer.market.zone_prices import COLUMNS, ZonePrice, zone_prices

Answer = Mapping[str, Any]
"""One item of an API's answer, as botocore parses it."""

SPECIFICATIONS = "describe-instance-types"
OFFERINGS = "describe-instance-type-offerings"
SPOT = "describe-spot-price-history"
PRICE_LIST = "public-price-list"
SPOT_FEED = "public-spot-prices"
ADVISOR = "public-spot-advisor"
API_FACTS = "facts of the AWS API, read with the user's own account"
PUBLIC_FACTS = "facts that AWS publishes"

LEAST_SPOT_SHARE = 0.02
LEAST_SPOT_USD = 0.0005
"""A spot price below this share of the on-demand price, or this figure, is none: no pool has ever been that cheap."""

REGION_COLUMNS = (
    "instance_type",
    "zones",
    "on_demand_usd_per_hour",
    "spot_usd_per_hour",
    "spot_saving_percent",
    "interruption_band",
)
_HEADLINE = re.compile(r"(?:(\d+)x\s+)?(?:up to\s+)?([\d.]+)\s+(giga|mega)bit", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class PublicPrices:
    """What the public feeds say of one region.

    Attributes:
        on_demand: USD an hour by type.
        published: the day of the price list that they are of.
        spot: USD an hour by type, one price for the region; absent: the feed could not be read, or has no such region.
        spot_day: when they were true.
        advice: saving in percent and interruption band by type; absent likewise.
        advice_day: when it was published.
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
class Answers:
    """Everything that the APIs were asked, item by item.

    Attributes:
        instance_types: of DescribeInstanceTypes.
        offerings: of DescribeInstanceTypeOfferings, by zone id.
        spot_prices: of DescribeSpotPriceHistory over some days until now.
        zones: of DescribeAvailabilityZones, to turn an account's zone names into zone ids.
    """

    instance_types: Sequence[Answer]
    offerings: Sequence[Answer]
    spot_prices: Sequence[Answer]
    zones: Sequence[Answer]


@dataclass(frozen=True, kw_only=True)
class Refreshed:
    """A new catalogue.

    Attributes:
        files: text by path inside the folder.
        types, on_demand, spot: how many types of the region have a specification and prices.
        zones: how many zones have prices of their own.
        left_out: types or prices that could not be used, and why, for the person to see.
    """

    files: Mapping[str, str]
    types: int
    on_demand: int
    spot: int
    zones: int
    left_out: tuple[str, ...]


def refreshed(
    prices: PublicPrices, answers: Answers | None, region: str, day: datetime.date, bundled: Path
) -> Refreshed:
    """The files of the catalogue that the feeds and the answers make together with the bundled one.

    Args:
        prices: of the public feeds.
        answers: of the APIs; absent: nobody with an account asked.
        region: that both are of.
        day: when they were read.
        bundled: folder of the bundled catalogue.
    """
    left_out = list(prices.left_out)
    types = {row["instance_type"]: row for row in _rows(bundled / "instance_types.csv")}
    zones: dict[str, set[str]] = {}
    by_zone: dict[str, dict[str, ZonePrice]] = {}
    if answers is None:
        told = prices.spot or {}
        spot = {name: usd for name, usd in told.items() if usd >= _least_spot(prices.on_demand.get(name))}
        left_out += [_impossible(name, usd, prices.on_demand) for name, usd in told.items() if name not in spot]
    else:
        left_out += _specify(types, answers.instance_types, canonical_accelerators(_rows(bundled / "accelerators.csv")))
        zones = offered_zones(answers.offerings)
        by_zone, odd = plausible(zone_prices(answers.spot_prices, answers.zones), prices.on_demand)
        left_out += odd
        # The middle of the zones: the cheapest one is not always the one that has machines.
        spot = {name: statistics.median(one.usd_per_hour for one in found.values()) for name, found in by_zone.items()}
    left_out += [
        f"{name}: spot at ${spot[name]:g} costs no less than ${prices.on_demand[name]:g} on demand, which is taken"
        for name in sorted(set(spot) & set(prices.on_demand))
        if spot[name] >= prices.on_demand[name]
    ]
    for name in set(spot) & set(types):  # what has a price is sold
        types[name] = {**types[name], "spot_supported": "1"}
    priced = set(prices.on_demand) | set(spot)
    left_out += [f"{name}: it has a price and no specification" for name in sorted(priced - set(types))]
    here = sorted((priced | set(zones)) & set(types))
    before = inside(bundled, f"regions/{region}.csv", what="region")
    rows = {row["instance_type"]: row for row in _rows(before)} if before.exists() else {}
    nothing: dict[str, str] = {}
    region_rows = []
    for name in here:
        known, advice = rows.get(name, nothing), (prices.advice or {}).get(name)
        unread = prices.spot is None and answers is None
        usd = known.get("spot_usd_per_hour", "") if unread else _usd(spot.get(name))
        saving, band = (str(advice[0]), advice[1]) if advice else ("", "")
        if prices.advice is None:
            saving, band = known.get("spot_saving_percent", ""), known.get("interruption_band", "")
        region_rows.append(
            {
                "instance_type": name,
                "zones": known.get("zones", "") if answers is None else str(len(zones.get(name, ()))),
                "on_demand_usd_per_hour": _usd(prices.on_demand.get(name)),
                "spot_usd_per_hour": usd,
                "spot_saving_percent": "" if usd else saving,
                "interruption_band": band,
            }
        )
    zone_rows = [
        {
            "instance_type": name,
            "zone": zone,
            "spot_usd_per_hour": _usd(price.usd_per_hour),
            "spot_log_sd": number(f"{price.log_sd:.4f}"),
        }
        for name, found in sorted(by_zone.items())
        for zone, price in sorted(found.items())
    ]
    kept = {
        f"regions/{path.name}": read_text(path) for path in (bundled / "regions").glob("*.csv") if path.stem != region
    } | {name: read_text(bundled / name) for name in ("accelerators.csv", "caveats.csv", "billing.json")}
    files = {
        **kept,
        "instance_types.csv": as_csv([{column: row[column] for column in TYPE_COLUMNS} for row in types.values()]),
        f"regions/{region}.csv": _csv(REGION_COLUMNS, region_rows),
        "sources.json": _sources(bundled, region, day, prices, answers is not None),
    } | ({f"zones/{region}.csv": _csv(COLUMNS, zone_rows)} if answers is not None else {})
    return Refreshed(
        files=files,
        types=len(here),
        on_demand=len(set(prices.on_demand) & set(here)),
        spot=sum(bool(row["spot_usd_per_hour"]) for row in region_rows),
        zones=len({row["zone"] for row in zone_rows}),
        left_out=tuple(left_out),
    )


def _specify(types: dict[str, dict[str, str]], told: Iterable[Answer], accelerators: Mapping[str, str]) -> list[str]:
    """Bring the types up to what the API says of them; the sentences are of those that stay as they were."""
    odd = []
    for answer in told:
        name = str(answer.get("InstanceType"))
        try:
            row = instance_row(answer, types.get(name), accelerators)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            odd.append(
                f"{one_line(name)[:40]}: its record cannot be read ({type(error).__name__}: {one_line(str(error))})"
            )
            continue
        if row is None:
            odd.append(f"{name}: its network rate is neither told nor known")
        else:
            types[name] = row
    return odd


def instance_row(
    answer: Answer, known: Mapping[str, str] | None, accelerators: Mapping[str, str]
) -> dict[str, str] | None:
    """One row of `instance_types.csv`; none where the network rate can be had from nowhere.

    What the API does not tell comes from the row that is ``known`` already.
    """
    name = str(answer["InstanceType"])
    before = known or {}
    network, processor = answer.get("NetworkInfo", {}), answer.get("ProcessorInfo", {})
    cards = network.get("NetworkCards", [])
    baseline = _network_gbps(network, cards, "BaselineBandwidthInGbps")
    if baseline is None:
        text = before.get("network_baseline_gbps") or _text(_headline_gbps(network))
        if not text:
            return None
        baseline = float(text)
    peak = _network_gbps(network, cards, "PeakBandwidthInGbps")
    disks = answer.get("InstanceStorageInfo", {}).get("TotalSizeInGB")
    ebs = answer.get("EbsInfo", {}).get("EbsOptimizedInfo", {}).get("BaselineBandwidthInMbps")
    architectures = [one for one in processor.get("SupportedArchitectures", []) if one in ("x86_64", "arm64")]
    vendor = str(processor.get("Manufacturer", ""))
    generation = re.match(r"[a-z]+(\d+)", name)
    vcpus = answer["VCpuInfo"]
    return {
        "instance_type": name,
        "generation": before.get("generation") or (generation.group(1) if generation else ""),
        "architecture": before.get("architecture", architectures[0] if architectures else ""),
        "vcpus": str(vcpus["DefaultVCpus"]),
        "cores": _text(vcpus.get("DefaultCores")),
        "clock_ghz": _text(processor.get("SustainedClockSpeedInGhz")),
        "cpu_vendor": VENDORS.get(vendor.casefold(), vendor),
        "cpu_model": before.get("cpu_model", ""),
        "memory_gib": number(f"{answer['MemoryInfo']['SizeInMiB'] / 1024:.3f}"),
        **_accelerator(answer, accelerators),
        "other_accelerators": "|".join(sorted(kind for key, kind in OTHER_ACCELERATORS.items() if key in answer)),
        "network_baseline_gbps": number(f"{baseline:.3f}"),
        "network_peak_gbps": _text(None if peak is None else max(peak, baseline)),
        "network_cards": str(len(cards)) if cards else "",
        "efa": _flag(network.get("EfaSupported")),
        "placement_group": _flag("cluster" in answer.get("PlacementGroupInfo", {}).get("SupportedStrategies", [])),
        "bare_metal": _flag(answer.get("BareMetal")),
        "burstable": _flag(answer.get("BurstablePerformanceSupported")),
        "spot_supported": _flag("spot" in answer.get("SupportedUsageClasses", [])),
        "local_nvme_gb": _text(disks),
        "ebs_baseline_mbps": _text(ebs),
        "coremark_iterations_per_s": before.get("coremark_iterations_per_s", ""),
        "source": SPECIFICATIONS,
    }


def offered_zones(offerings: Iterable[Answer]) -> dict[str, set[str]]:
    """Zones that offer each type."""
    found: dict[str, set[str]] = defaultdict(set)
    for offering in offerings:
        found[str(offering["InstanceType"])].add(str(offering["Location"]))
    return dict(found)


def plausible(
    spot: Mapping[str, Mapping[str, ZonePrice]], demand: Mapping[str, float]
) -> tuple[dict[str, dict[str, ZonePrice]], list[str]]:
    """The spot prices that can be, and a sentence for each type that loses some."""
    kept: dict[str, dict[str, ZonePrice]] = {}
    odd: list[str] = []
    for name, prices in spot.items():
        least = _least_spot(demand.get(name))
        good = {zone: price for zone, price in prices.items() if price.usd_per_hour >= least}
        if good:
            kept[name] = good
        if len(good) < len(prices):
            odd.append(_impossible(name, min(price.usd_per_hour for price in prices.values()), demand))
    return kept, odd


def _least_spot(on_demand: float | None) -> float:
    """The least that a spot price can be, in USD an hour."""
    return max(LEAST_SPOT_USD, LEAST_SPOT_SHARE * (on_demand or 0.0))


def _impossible(name: str, usd: float, demand: Mapping[str, float]) -> str:
    beside = f" beside ${demand[name]:g} on demand" if name in demand else ""
    return f"{name}: a spot price of ${usd:g}{beside} cannot be"


def _accelerator(answer: Answer, accelerators: Mapping[str, str]) -> dict[str, str]:
    columns = ("accelerator", "accelerator_manufacturer", "accelerator_count", "accelerator_fraction")
    gpus = answer.get("GpuInfo", {}).get("Gpus", [])
    if not gpus:
        return dict.fromkeys((*columns, "accelerator_memory_gib"), "")
    gpu = gpus[0]
    name, vendor = str(gpu["Name"]), str(gpu.get("Manufacturer", ""))
    memory_mib = gpu.get("MemoryInfo", {}).get("SizeInMiB")
    if memory_mib is None:
        memory_mib = answer["GpuInfo"]["TotalGpuMemoryInMiB"] / max(1, int(gpu.get("Count", 1)))
    values = (
        accelerators.get(name.casefold(), name),
        VENDORS.get(vendor.casefold(), vendor),
        # A fractional GPU is reported with a count of 0: the machine still sees one device.
        str(max(1, int(gpu.get("Count", 1)))),
        number(str(gpu.get("GpuPartitionSize") or 1)),
    )
    return dict(zip(columns, values, strict=True)) | {"accelerator_memory_gib": number(f"{memory_mib / 1024:.2f}")}


def _network_gbps(network: Answer, cards: Sequence[Answer], field: str) -> float | None:
    """Rate of all cards together, which sums to more than the headline where cards share it."""
    rates = [float(card[field]) for card in cards if card.get(field) is not None]
    if not rates or len(rates) < len(cards):
        return None
    headline = _headline_gbps(network)
    return sum(rates) if headline is None else min(sum(rates), headline)


def _headline_gbps(network: Answer) -> float | None:
    """'Up to 12.5 Gigabit', '4x 100 Gigabit' and '750 Megabit' in Gbit/s; none for 'Low' or 'Moderate'."""
    found = _HEADLINE.search(str(network.get("NetworkPerformance", "")))
    if found is None:
        return None
    return int(found.group(1) or 1) * float(found.group(2)) / (1000 if found.group(3).lower() == "mega" else 1)


def _flag(value: object) -> str:
    return "" if value is None else str(int(bool(value)))


def _text(value: float | None) -> str:
    return "" if value is None else number(str(value))


def _usd(value: float | None) -> str:
    return "" if value is None else number(f"{value:.6f}")


def _rows(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(read_text(path), newline="")))


def _csv(columns: Sequence[str], rows: Sequence[Mapping[str, str]]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _sources(bundled: Path, region: str, day: datetime.date, prices: PublicPrices, asked: bool) -> str:
    """The bundled sources, and those of today in the columns that they fill. ``asked``: the APIs were, too."""
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
    if asked:
        specified = describe(SPECIFICATIONS, "AWS DescribeInstanceTypes", day, API_FACTS)
        for column in ("*", "network_baseline_gbps"):
            fields["instance_types.csv"][column] = [*specified, *fields["instance_types.csv"][column]]
        columns["zones"] = describe(OFFERINGS, "AWS DescribeInstanceTypeOfferings", day, API_FACTS)
        columns["spot_usd_per_hour"] = describe(
            SPOT, "AWS DescribeSpotPriceHistory, the middle of the zones", day, API_FACTS
        )
    elif prices.spot is not None:
        columns["spot_usd_per_hour"] = describe(SPOT_FEED, "AWS spot price feed, Linux", prices.spot_day)
    fields[f"regions/{region}.csv"] = columns
    return json.dumps(data, indent=2, ensure_ascii=False) + "\n"
