"""Turns what the AWS APIs answer about one region into a catalogue folder in the format of the bundled one.

The APIs say what machines are, where they are offered and what they cost now. They do not say how fast a processor is
(CoreMark), how often spot is taken back, or what volumes and transfer cost: that stays as it was bundled.
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
from hetopt.core.reading import read_json, read_text
from hetopt.optimizer.market.instance_type import TYPE_COLUMNS
from hetopt.optimizer.market.zone_prices import COLUMNS, ZonePrice, zone_prices

Answer = Mapping[str, Any]
"""One item of an API's answer, as botocore parses it."""

SPECIFICATIONS = "describe-instance-types"
OFFERINGS = "describe-instance-type-offerings"
SPOT = "describe-spot-price-history"
PRICE_LIST = "price-list-query"
LICENCE = "facts of the AWS API, read with the user's own account"

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
class Answers:
    """Everything that was asked, item by item.

    Attributes:
        instance_types: of DescribeInstanceTypes.
        offerings: of DescribeInstanceTypeOfferings, by zone id.
        spot_prices: of DescribeSpotPriceHistory over some days until now.
        zones: of DescribeAvailabilityZones, to turn an account's zone names into zone ids.
        price_list: of the price list's GetProducts: each item a JSON text.
    """

    instance_types: Sequence[Answer]
    offerings: Sequence[Answer]
    spot_prices: Sequence[Answer]
    zones: Sequence[Answer]
    price_list: Sequence[str]


@dataclass(frozen=True, kw_only=True)
class Refreshed:
    """A new catalogue.

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


def refreshed(answers: Answers, region: str, day: datetime.date, bundled: Path) -> Refreshed:
    """The files of the catalogue that the answers make together with the bundled one."""
    left_out: list[str] = []
    known = {row["instance_type"]: row for row in _rows(bundled / "instance_types.csv")}
    accelerators = canonical_accelerators(_rows(bundled / "accelerators.csv"))
    types = dict(known)
    for answer in answers.instance_types:
        name = str(answer["InstanceType"])
        row = instance_row(answer, known.get(name), accelerators)
        if row is None:
            left_out.append(f"{name}: its network rate is neither told nor known")
        else:
            types[name] = row
    zones = offered_zones(answers.offerings)
    demand = on_demand_prices(answers.price_list, region)
    by_zone = zone_prices(answers.spot_prices, answers.zones)
    by_zone, odd = plausible(by_zone, demand)
    left_out += odd
    before = inside(bundled, f"regions/{region}.csv", what="region")
    advised = {row["instance_type"]: row for row in _rows(before)} if before.exists() else {}
    here = sorted((set(zones) | set(demand) | set(by_zone)) & set(types))
    left_out += [
        f"{name}: it has a price and no specification" for name in sorted((set(demand) | set(by_zone)) - set(types))
    ]
    region_rows = [
        {
            "instance_type": name,
            "zones": str(len(zones.get(name, ()))),
            "on_demand_usd_per_hour": _usd(demand.get(name)),
            # The middle of the zones: the cheapest one is not always the one that has machines.
            "spot_usd_per_hour": _usd(_middle(by_zone.get(name, {}))),
            "spot_saving_percent": advised.get(name, {}).get("spot_saving_percent", ""),
            "interruption_band": advised.get(name, {}).get("interruption_band", ""),
        }
        for name in here
    ]
    zone_rows = [
        {
            "instance_type": name,
            "zone": zone,
            "spot_usd_per_hour": _usd(price.usd_per_hour),
            "spot_log_sd": number(f"{price.log_sd:.4f}"),
        }
        for name, prices in sorted(by_zone.items())
        for zone, price in sorted(prices.items())
    ]
    kept = {
        f"regions/{path.name}": read_text(path) for path in (bundled / "regions").glob("*.csv") if path.stem != region
    } | {name: read_text(bundled / name) for name in ("accelerators.csv", "caveats.csv", "billing.json")}
    files = {
        **kept,
        "instance_types.csv": as_csv([{column: row[column] for column in TYPE_COLUMNS} for row in types.values()]),
        f"regions/{region}.csv": _csv(REGION_COLUMNS, region_rows),
        f"zones/{region}.csv": _csv(COLUMNS, zone_rows),
        "sources.json": _sources(bundled, region, day),
    }
    return Refreshed(
        files=files,
        types=len(here),
        on_demand=len(set(demand) & set(here)),
        spot=len(set(by_zone) & set(here)),
        left_out=tuple(left_out),
    )


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


def on_demand_prices(price_list: Iterable[str], region: str) -> dict[str, float]:
    """USD an hour of each type: Linux, shared tenancy, no software, no reservation. Free dimensions are no prices."""
    found: dict[str, float] = {}
    for text in price_list:
        item = json.loads(text)
        attributes = item.get("product", {}).get("attributes", {})
        if attributes.get("regionCode", region) != region or attributes.get("operatingSystem", "Linux") != "Linux":
            continue
        for term in item.get("terms", {}).get("OnDemand", {}).values():
            for dimension in term.get("priceDimensions", {}).values():
                usd = float(dimension.get("pricePerUnit", {}).get("USD", "0"))
                if dimension.get("unit") == "Hrs" and usd > 0 and "instanceType" in attributes:
                    found[str(attributes["instanceType"])] = usd
    return found


def plausible(
    spot: Mapping[str, Mapping[str, ZonePrice]], demand: Mapping[str, float]
) -> tuple[dict[str, dict[str, ZonePrice]], list[str]]:
    """The spot prices that can be, and a sentence for each type that loses some."""
    kept: dict[str, dict[str, ZonePrice]] = {}
    odd: list[str] = []
    for name, prices in spot.items():
        least = max(LEAST_SPOT_USD, LEAST_SPOT_SHARE * demand.get(name, 0.0))
        good = {zone: price for zone, price in prices.items() if price.usd_per_hour >= least}
        if good:
            kept[name] = good
        if len(good) < len(prices):
            lowest = min(price.usd_per_hour for price in prices.values())
            beside = f" beside ${demand[name]:g} on demand" if name in demand else ""
            odd.append(f"{name}: a spot price of ${lowest:g}{beside} cannot be")
    return kept, odd


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


def _middle(prices: Mapping[str, ZonePrice]) -> float | None:
    return statistics.median(price.usd_per_hour for price in prices.values()) if prices else None


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


def _sources(bundled: Path, region: str, day: datetime.date) -> str:
    """The bundled sources, and those of this day in the columns that they fill."""
    data = read_json(bundled / "sources.json")
    titles = {
        SPECIFICATIONS: "AWS DescribeInstanceTypes",
        OFFERINGS: "AWS DescribeInstanceTypeOfferings",
        SPOT: "AWS DescribeSpotPriceHistory, the middle of the zones",
        PRICE_LIST: "AWS price list, GetProducts: Linux, shared tenancy",
    }
    for name, title in titles.items():
        data["sources"][name] = {"title": f"{title}, {region}", "licence": LICENCE, "date": day.isoformat()}
    fields = data["fields"]
    for column in ("*", "network_baseline_gbps"):
        fields["instance_types.csv"][column] = [SPECIFICATIONS, *fields["instance_types.csv"][column]]
    fields[f"regions/{region}.csv"] = {
        **fields["regions/*.csv"],
        **fields.get(f"regions/{region}.csv", {}),
        "zones": [OFFERINGS],
        "on_demand_usd_per_hour": [PRICE_LIST],
        "spot_usd_per_hour": [SPOT],
    }
    return json.dumps(data, indent=2, ensure_ascii=False) + "\n"
