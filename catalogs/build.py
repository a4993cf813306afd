"""Cleans the raw AWS snapshots into the files that hetopt ships: `python -m hetopt.catalogs.build --from DIR`.

DIR holds `instances.csv` (specifications, us-east-1 on-demand prices, CoreMark), `spot_prices_*_REGION_DAY.csv` (spot
prices of August 2026), `spot_advisor_linux.csv` (savings and interruption bands of June 2025 for each region) and
`spot_advisor_us-east-1_linux_DAY.csv` (newer bands of one region). On-demand prices of other regions are those of
`snapshots/on_demand_accelerators_MONTH.csv` here. Only `instance_types.csv` and `regions/*.csv` are written; the other
files of the catalogue are kept by hand. README.md says what is cleaned, and why.
"""

from __future__ import annotations

import argparse
import csv
import io
from collections import defaultdict
from collections.abc import Container, Iterable, Mapping, Sequence
from pathlib import Path

from hetopt.core.artifact import write_atomically

Row = Mapping[str, str]

HERE = Path(__file__).parent / "aws"
SNAPSHOTS = Path(__file__).parent / "snapshots"
"""What is too small or too scattered to be a download, and is not shipped."""
PRICED_REGION = "us-east-1"
KARPENTER = "karpenter instance-types.md"
VENDORS = {"intel": "Intel", "aws": "AWS", "amd": "AMD", "nvidia": "NVIDIA"}
OTHER_ACCELERATORS = {"NeuronInfo": "Neuron", "InferenceAcceleratorInfo": "Inference", "FpgaInfo": "FPGA"}
# Published runs that are 1.56 and 0.62 times the family's other sizes.
IMPLAUSIBLE_COREMARK = {"m3.medium", "u-6tb1.112xlarge"}


def number(text: str) -> str:
    """Return the shortest spelling of a number; blank stays blank, because unknown is not zero."""
    if not text:
        return ""
    value = float(text)
    return str(int(value)) if value.is_integer() else repr(value)


def canonical_accelerators(accelerators: Iterable[Row]) -> dict[str, str]:
    """Return the catalogue's name of an accelerator by each of its case-folded spellings."""
    return {
        spelling.casefold(): row["name"]
        for row in accelerators
        for spelling in [row["name"], *row["aliases"].split("|")]
    }


def instance_type(raw: Row, accelerators: Mapping[str, str], on_spot: Container[str]) -> dict[str, str]:
    """Return a raw row as a row of `instance_types.csv`; ``on_spot``: types with a spot price, so sold on spot."""
    name = raw["instance_type"]
    gpu = raw["gpu_name"]
    # A fractional GPU is reported with a count of 0: the machine still sees one device.
    count = max(1, int(raw["gpu_count"])) if gpu else ""
    baselines = [float(raw[column]) for column in ("net_baseline_gbps", "karpenter_baseline_gbps") if raw[column]]
    return {
        "instance_type": name,
        "generation": raw["generation"],
        "architecture": raw["arch"],
        "vcpus": raw["vcpus"],
        "cores": raw["cores"],
        "clock_ghz": number(raw["clock_ghz"]),
        "cpu_vendor": VENDORS.get(raw["cpu_vendor"].casefold(), raw["cpu_vendor"]),
        "cpu_model": raw["cpu_model"].replace("(R)", ""),
        "memory_gib": number(raw["memory_gib"]),
        "accelerator": accelerators[gpu.casefold()] if gpu else "",
        "accelerator_manufacturer": VENDORS.get(raw["gpu_manufacturer"].casefold(), raw["gpu_manufacturer"]),
        "accelerator_count": str(count),
        "accelerator_fraction": number(raw["gpu_partition"] or "1") if gpu else "",
        "accelerator_memory_gib": number(raw["gpu_mem_gib"]),
        "other_accelerators": "|".join(OTHER_ACCELERATORS[flag] for flag in raw["other_accel"].split("|") if flag),
        # Where two sources disagree the smaller is planned on.
        "network_baseline_gbps": number(str(min(baselines))),
        "network_peak_gbps": number(raw["net_peak_gbps"]),
        "network_cards": raw["network_cards"],
        "efa": raw["efa"],
        "placement_group": raw["placement_cluster"],
        "bare_metal": raw["bare_metal"],
        "burstable": raw["burstable"],
        "spot_supported": "1" if name in on_spot else raw["spot_supported"],
        "local_nvme_gb": number(raw["local_nvme_gb"]),
        "ebs_baseline_mbps": number(raw["ebs_baseline_mbps"]),
        "coremark_iterations_per_s": "" if name in IMPLAUSIBLE_COREMARK else number(raw["coremark_iter_s"]),
        "source": "karpenter-instance-types" if raw["source"] == KARPENTER else "moto-instance-types",
    }


def spot_prices(rows: Iterable[Row], known: Container[str]) -> dict[str, str]:
    """Return spot prices in USD per hour by instance type, without retired types, whose specifications are unknown."""
    return {row["instance_type"]: number(row["spot_usd_per_hour"]) for row in rows if row["instance_type"] in known}


def bands(rows: Iterable[Row], known: Container[str]) -> dict[str, str]:
    """Return interruption bands by instance type, of known types whose saving is positive (others are placeholders)."""
    return {
        row["instance_type"]: row["interruption_band"]
        for row in rows
        if row["instance_type"] in known and int(row["saving_percent"]) > 0
    }


def regions(
    types: Sequence[Row],
    advisor: Iterable[Row],
    spot: Mapping[str, Mapping[str, str]],
    newer_bands: Mapping[str, Mapping[str, str]],
    on_demand: Mapping[str, Mapping[str, str]],
) -> dict[str, list[dict[str, str]]]:
    """Return the rows of each `regions/*.csv`, by region; a type that nothing is known of there has no row.

    A saving is kept only where no spot price is known, and a band of June 2025 only in regions without newer ones.
    Advisor rows without a positive saving are sentinels or stale and are dropped, as are those of retired types
    whose specifications are unknown.

    Args:
        types: of `instances.csv`.
        advisor: of `spot_advisor_linux.csv`.
        spot: USD per hour, by region and instance type.
        newer_bands: by region and instance type.
        on_demand: USD per hour, by region and instance type, but for the region that ``types`` has prices of.
    """
    known = {row["instance_type"]: row for row in types}
    advised: dict[str, dict[str, Row]] = defaultdict(dict)
    for row in advisor:
        if row["instance_type"] in known and int(row["savings_pct"]) > 0:
            advised[row["region"]][row["instance_type"]] = row
    by_region: dict[str, list[dict[str, str]]] = {}
    for region in sorted({*advised, *spot, *on_demand}):
        priced, old, new = spot.get(region, {}), advised.get(region, {}), newer_bands.get(region)
        rows = []
        for name, facts in known.items():
            here = {}
            if region == PRICED_REGION:
                here["zones"] = "" if facts["source"] == KARPENTER else str(len(facts["us_east_1_azs"]))
                here["on_demand_usd_per_hour"] = number(facts["on_demand_usd_hr_us_east_1"])
            elif region in on_demand:
                here["on_demand_usd_per_hour"] = on_demand[region].get(name, "")
            if priced:
                here["spot_usd_per_hour"] = priced.get(name, "")
            here["spot_saving_percent"] = "" if name in priced or name not in old else old[name]["savings_pct"]
            band = old[name]["interrupt_band"] if name in old else ""
            here["interruption_band"] = band if new is None else new.get(name, "")
            if any(value not in ("", "0") for value in here.values()):
                rows.append({"instance_type": name, **here})
        by_region[region] = rows
    return by_region


def as_csv(rows: Sequence[Row]) -> str:
    """Return the rows as CSV, sorted by instance type so that a new snapshot is a readable diff."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(sorted(rows, key=lambda row: row["instance_type"]))
    return text.getvalue()


def build(raw: Path, *, kept: Path = HERE) -> dict[str, str]:
    """Return the texts of the catalogue's generated files, by path; ``kept`` is the folder of those edited by hand."""

    def read(path: Path) -> list[dict[str, str]]:
        with path.open(encoding="utf-8", newline="") as stream:
            return list(csv.DictReader(stream))

    types = read(raw / "instances.csv")
    known = {row["instance_type"] for row in types}
    accelerators = canonical_accelerators(read(kept.parent / "accelerators.csv"))
    spot: dict[str, dict[str, str]] = defaultdict(dict)
    for path in sorted(raw.glob("spot_prices_*_*_*.csv")):
        spot[path.stem.split("_")[3]] |= spot_prices(read(path), known)
    newer = {
        path.stem.split("_")[2]: bands(read(path), known) for path in sorted(raw.glob("spot_advisor_*_linux_*.csv"))
    }
    on_demand: dict[str, dict[str, str]] = defaultdict(dict)
    for row in read(SNAPSHOTS / "on_demand_accelerators_2025-11.csv"):
        on_demand[row["region"]][row["instance_type"]] = number(row["on_demand_usd_per_hour"])
    by_region = regions(types, read(raw / "spot_advisor_linux.csv"), spot, newer, on_demand)
    return {
        "instance_types.csv": as_csv([instance_type(row, accelerators, set().union(*spot.values())) for row in types]),
        **{f"regions/{region}.csv": as_csv(rows) for region, rows in by_region.items()},
    }


def main() -> None:
    """Write the bundled catalogue from the raw snapshots named on the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--from", dest="raw", type=Path, required=True, help="folder of the raw snapshots")
    parser.add_argument("--to", type=Path, default=HERE, help="folder of the catalogue to write")
    options = parser.parse_args()
    (options.to / "regions").mkdir(parents=True, exist_ok=True)
    for name, text in build(options.raw).items():
        write_atomically(options.to / name, text)


if __name__ == "__main__":
    main()
