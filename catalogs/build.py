"""Cleans the raw AWS snapshots into the files that hetopt ships: `python -m hetopt.catalogs.build --from DIR`.

DIR holds `instances.csv` (specifications, us-east-1 prices, CoreMark) and `spot_advisor_linux.csv` (savings and
interruption bands for each region). Only `instance_types.csv` and `regions/*.csv` are written; the other files of the
catalogue are kept by hand. README.md says what is cleaned, and why.
"""

from __future__ import annotations

import argparse
import csv
import io
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from hetopt.profiler.artifact import write_atomically

Row = Mapping[str, str]

HERE = Path(__file__).parent / "aws"
PRICED_REGION = "us-east-1"
KARPENTER = "karpenter instance-types.md"
VENDORS = {"intel": "Intel", "aws": "AWS", "amd": "AMD", "nvidia": "NVIDIA"}
OTHER_ACCELERATORS = {"NeuronInfo": "Neuron", "InferenceAcceleratorInfo": "Inference", "FpgaInfo": "FPGA"}
# Published runs that are 1.56 and 0.62 times the family's other sizes.
IMPLAUSIBLE_COREMARK = {"m3.medium", "u-6tb1.112xlarge"}


def number(text: str) -> str:
    """The shortest spelling of a number; blank stays blank, because unknown is not zero."""
    if not text:
        return ""
    value = float(text)
    return str(int(value)) if value.is_integer() else repr(value)


def canonical_accelerators(accelerators: Iterable[Row]) -> dict[str, str]:
    """Every spelling of an accelerator, case-folded, to the name that the catalogue uses."""
    return {
        spelling.casefold(): row["name"]
        for row in accelerators
        for spelling in [row["name"], *row["aliases"].split("|")]
    }


def instance_type(raw: Row, accelerators: Mapping[str, str]) -> dict[str, str]:
    """One row of `instance_types.csv`."""
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
        "spot_supported": raw["spot_supported"],
        "local_nvme_gb": number(raw["local_nvme_gb"]),
        "ebs_baseline_mbps": number(raw["ebs_baseline_mbps"]),
        "coremark_iterations_per_s": "" if name in IMPLAUSIBLE_COREMARK else number(raw["coremark_iter_s"]),
        "source": "karpenter-instance-types" if raw["source"] == KARPENTER else "moto-instance-types",
    }


def regions(types: Sequence[Row], advisor: Iterable[Row]) -> dict[str, list[dict[str, str]]]:
    """The rows of each `regions/*.csv`, by region.

    Advisor rows without a positive saving are sentinels or stale and are dropped, as are those of retired types
    whose specifications are unknown.
    """
    known = {row["instance_type"] for row in types}
    spot: dict[str, dict[str, dict[str, str]]] = defaultdict(dict)
    for row in advisor:
        if row["instance_type"] in known and int(row["savings_pct"]) > 0:
            spot[row["region"]][row["instance_type"]] = {
                "spot_saving_percent": row["savings_pct"],
                "interruption_band": row["interrupt_band"],
            }
    none = {"spot_saving_percent": "", "interruption_band": ""}
    priced = []
    for row in types:
        name = row["instance_type"]
        zones = "" if row["source"] == KARPENTER else str(len(row["us_east_1_azs"]))
        price = number(row["on_demand_usd_hr_us_east_1"])
        if price or name in spot[PRICED_REGION] or zones not in ("", "0"):
            advised = spot[PRICED_REGION].get(name, none)
            priced.append({"instance_type": name, "zones": zones, "on_demand_usd_per_hour": price, **advised})
    rows = {region: [{"instance_type": name, **row} for name, row in found.items()] for region, found in spot.items()}
    return {**rows, PRICED_REGION: priced}


def as_csv(rows: Sequence[Row]) -> str:
    """The rows as CSV, sorted by instance type so that a new snapshot is a readable diff."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(sorted(rows, key=lambda row: row["instance_type"]))
    return text.getvalue()


def build(raw: Path, *, kept: Path = HERE) -> dict[str, str]:
    """The files to write, by path inside the catalogue. ``kept`` is the folder of those that are kept by hand."""

    def read(path: Path) -> list[dict[str, str]]:
        with path.open(encoding="utf-8", newline="") as stream:
            return list(csv.DictReader(stream))

    types = read(raw / "instances.csv")
    accelerators = canonical_accelerators(read(kept / "accelerators.csv"))
    by_region = regions(types, read(raw / "spot_advisor_linux.csv"))
    return {
        "instance_types.csv": as_csv([instance_type(row, accelerators) for row in types]),
        **{f"regions/{region}.csv": as_csv(rows) for region, rows in sorted(by_region.items())},
    }


def main() -> None:
    """Write the files."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--from", dest="raw", type=Path, required=True, help="folder of the raw snapshots")
    parser.add_argument("--to", type=Path, default=HERE, help="folder of the catalogue to write")
    options = parser.parse_args()
    (options.to / "regions").mkdir(parents=True, exist_ok=True)
    for name, text in build(options.raw).items():
        write_atomically(options.to / name, text)


if __name__ == "__main__":
    main()
