"""Laws of the data that hetopt ships: every figure has date and source, and odd rows are treated as README.md says."""

from __future__ import annotations

import csv
import datetime
import math
import statistics
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from hetopt.catalogs.build import build
from hetopt.core.errors import BadInput
from hetopt.optimizer.cost.billing import load_billing
from hetopt.optimizer.market.catalog import BUNDLED, SAVING_LOG_SD, Catalog, load_catalog, offers

SNAPSHOT = datetime.date(2026, 7, 20)
ADVISOR = datetime.date(2025, 6, 28)
FEED = datetime.date(2026, 8, 1)
ELSEWHERE = datetime.date(2025, 11, 30)
UNPRICED = {"ap-east-2", "ap-southeast-4", "ap-southeast-7", "ca-west-1", "mx-central-1"}


def test_counts(catalog: Catalog, everywhere: dict[str, Catalog]) -> None:
    assert len(catalog.instance_types) == 1373
    assert len(everywhere) == 33
    assert sum(listing.on_demand is not None for listing in catalog.listings.values()) == 1346
    spot = [listing.spot for listing in catalog.listings.values() if listing.spot is not None]
    assert sum(not price.is_estimate for price in spot) == 1112  # 72 - 3 GPU types and 1,043 others
    assert sum(price.is_estimate for price in spot) == 153
    assert sum(found.accelerator is not None for found in catalog.instance_types.values()) == 71
    assert sum(path.stat().st_size for path in BUNDLED.rglob("*") if path.is_file()) < 1_000_000


def test_every_price_is_positive_and_has_date_and_source(everywhere: dict[str, Catalog]) -> None:
    for region, there in everywhere.items():
        for listing in there.listings.values():
            for market in ("spot", "on-demand"):
                price = listing.price(market)
                if price is not None:
                    assert price.usd_per_hour > 0
                    assert price.market == market
                    assert price.region == region
                    listed = SNAPSHOT if region == "us-east-1" else ELSEWHERE
                    assert price.date == (ADVISOR if price.is_estimate else FEED if market == "spot" else listed)
                    assert price.source
            if listing.band is not None:
                assert listing.band.date == (FEED if region == "us-east-1" else ADVISOR)
                assert listing.band.region == region
                assert 0 <= listing.band.low < listing.band.high <= 1


def test_spot_never_costs_more_than_on_demand(catalog: Catalog) -> None:
    for listing in catalog.listings.values():
        if listing.spot is not None:
            assert listing.on_demand is not None
            assert listing.spot.usd_per_hour < listing.on_demand.usd_per_hour
            assert listing.spot_saving == pytest.approx(1 - listing.spot.usd_per_hour / listing.on_demand.usd_per_hour)


def test_a_spot_price_says_how_far_it_may_be_off_and_an_estimate_further(catalog: Catalog) -> None:
    """One price for a region is not that of the zone in which machines will be rented; a list price is what is paid."""
    for listing in catalog.listings.values():
        if listing.on_demand is not None:
            assert listing.on_demand.log_sd == 0
        if listing.spot is not None:
            gpu = listing.instance_type.accelerator is not None
            assert listing.spot.log_sd == ((0.33 if gpu else 0.27) if listing.spot.is_estimate else 0.19)


def test_prices_are_known_in_most_regions_and_never_invented(everywhere: dict[str, Catalog]) -> None:
    for region, there in everywhere.items():
        assert there.has_prices == (region not in UNPRICED)
        priced = {listing.instance_type for listing in there.listings.values() if listing.on_demand}
        # Elsewhere those of machines with accelerators are known.
        assert region == "us-east-1" or all(found.accelerator or found.other_accelerators for found in priced)
    assert sum(any(listing.on_demand for listing in there.listings.values()) for there in everywhere.values()) == 28
    with pytest.raises(BadInput, match="no spot prices for ca-west-1") as refused:
        offers(everywhere["ca-west-1"], "spot")
    assert "`hetopt catalog refresh --region ca-west-1`" in (refused.value.hint or "")


def test_spot_at_the_price_of_on_demand_is_not_offered(everywhere: dict[str, Catalog]) -> None:
    dear = {(r, name) for r, there in everywhere.items() for name, one in there.listings.items() if one.spot_is_dearer}
    assert dear == {("ap-northeast-1", "p5.4xlarge")}
    offered = {
        one.price.market for one in offers(everywhere["ap-northeast-1"]) if one.instance_type.name == "p5.4xlarge"
    }
    assert offered == {"on-demand"}


def test_every_column_of_every_file_has_a_described_source(catalog: Catalog) -> None:
    files = [path.relative_to(BUNDLED).as_posix() for path in BUNDLED.rglob("*.csv")]
    assert len(files) == 33 + 3
    for file in files:
        with (BUNDLED / file).open(encoding="utf-8", newline="") as stream:
            columns = next(csv.reader(stream))
        for column in columns[1:]:
            assert catalog.sources.of(file, column)
    for source in catalog.sources.by_name.values():
        assert source.licence in {"Apache-2.0", "MIT", "published figures"}
    used = {source for columns in catalog.sources.columns.values() for some in columns.values() for source in some}
    assert {source.name for source in used} == set(catalog.sources.by_name)


def test_caveats_name_instance_types_that_exist(catalog: Catalog) -> None:
    for caveat in catalog.all_caveats:
        for pattern in caveat.types:
            assert any(fnmatchcase(name, pattern) for name in catalog.instance_types), pattern


def test_accelerators_have_rates_of_a_model_of_their_size(catalog: Catalog) -> None:
    for found in catalog.instance_types.values():
        if found.accelerator is None:
            continue
        model = found.accelerator.model
        assert model is not None, found.name
        assert model.memory_bandwidth_gb_per_s
        assert found.accelerator.memory_gib / found.accelerator.fraction == pytest.approx(model.memory_gib, rel=0.1)
        if model.fp32_tflops and model.fp16_tensor_tflops:
            assert model.fp32_tflops < model.fp16_tensor_tflops
    memory = {name: catalog.instance_types[name].accelerator for name in ("p4d.24xlarge", "p4de.24xlarge")}
    assert [a.memory_bandwidth_bytes_per_s for a in memory.values() if a] == [1555e9, 2039e9]


def test_units_are_converted_once(catalog: Catalog) -> None:
    found = catalog.instance_type("g5.xlarge")
    assert found.network_bytes_per_s == 2.5e9 / 8
    assert found.memory_bytes == 16 * 2**30
    assert found.accelerator is not None
    assert found.accelerator.fp32_flops_per_s == 35e12


@pytest.mark.parametrize(
    ("name", "fraction"),
    [
        ("g6f.large", 1 / 8),
        ("g6f.xlarge", 1 / 8),
        ("g6f.2xlarge", 1 / 4),
        ("g6f.4xlarge", 1 / 2),
        ("gr6f.4xlarge", 1 / 2),
    ],
)
def test_a_fractional_gpu_is_one_device_of_less(catalog: Catalog, name: str, fraction: float) -> None:
    accelerator = catalog.instance_type(name).accelerator
    assert accelerator is not None
    assert (accelerator.name, accelerator.count, accelerator.fraction, accelerator.whole) == ("L4", 1, fraction, 0)
    assert accelerator.fp32_flops_per_s == 30.3e12 * fraction
    assert catalog.instance_type(name).cuda_devices == 1


def test_what_a_source_does_not_say_is_unknown_and_not_zero(catalog: Catalog) -> None:
    found = catalog.instance_type("c9g.xlarge")
    assert (found.cores, found.efa, found.burstable, found.network_peak_gbps) == (None,) * 4
    assert catalog.listing("c9g.xlarge").zones is None
    assert any("headline" in caveat.note for caveat in catalog.caveats("c9g.xlarge"))
    assert catalog.instance_type("mac2.metal").architecture is None
    assert catalog.instance_type("u-6tb1.56xlarge").generation is None


def test_billing_terms_have_unit_date_and_source() -> None:
    billing = load_billing()
    assert billing.minimum_billed_s.value == 60
    assert billing.spot_free_if_interrupted_within_s.value == 3600
    assert billing.ebs_gp3_usd_per_gb_month.value == 0.08
    assert billing.public_ipv4_usd_per_hour.value == 0.005
    assert billing.hours_per_month.date >= SNAPSHOT
    # 100 GB of gp3 cost about a cent an hour.
    hourly = 100 * billing.ebs_gp3_usd_per_gb_month.value / billing.hours_per_month.value
    assert hourly == pytest.approx(0.011, abs=5e-4)


def test_the_files_are_what_build_makes_of_the_snapshots(shared_data: Path) -> None:
    made = build(shared_data / "catalog")
    shipped = {
        path.relative_to(BUNDLED).as_posix(): path.read_text(encoding="utf-8")
        for path in [BUNDLED / "instance_types.csv", *(BUNDLED / "regions").iterdir()]
    }
    assert made == shipped


def test_figures_agree_with_the_snapshots(shared_data: Path, catalog: Catalog) -> None:
    with (shared_data / "catalog" / "instances.csv").open(encoding="utf-8", newline="") as stream:
        for row in csv.DictReader(stream):
            found = catalog.instance_type(row["instance_type"])
            rates = [float(row[name]) for name in ("net_baseline_gbps", "karpenter_baseline_gbps") if row[name]]
            assert found.network_baseline_gbps == min(rates)
            assert (found.vcpus, found.memory_gib) == (int(row["vcpus"]), float(row["memory_gib"]))
            spot = catalog.price(found.name, "spot")
            if spot is not None:
                estimate = float(row["spot_usd_hr_est_us_east_1"] or "nan")
                assert not spot.is_estimate or spot.usd_per_hour == pytest.approx(estimate, abs=1e-5)


def test_spot_prices_are_those_of_the_feed(shared_data: Path, everywhere: dict[str, Catalog]) -> None:
    found = 0
    for path in (shared_data / "catalog").glob("spot_prices_*.csv"):
        there = everywhere[path.stem.split("_")[3]]
        with path.open(encoding="utf-8", newline="") as stream:
            for row in csv.DictReader(stream):
                if row["instance_type"] in there.instance_types:
                    price = there.price(row["instance_type"], "spot")
                    assert price is not None
                    assert (price.usd_per_hour, price.is_estimate) == (float(row["spot_usd_per_hour"]), False)
                    found += 1
    assert found == 1490 - 16  # without p3.2xlarge to p3.16xlarge, which are retired


def test_the_spread_of_an_estimate_is_what_the_feed_showed(shared_data: Path, catalog: Catalog) -> None:
    """The saving of 2025 on the list price, against what AWS asked in August 2026."""
    off: dict[str, list[float]] = {"gpu": [], "cpu": []}
    with (shared_data / "catalog" / "instances.csv").open(encoding="utf-8", newline="") as stream:
        for row in csv.DictReader(stream):
            price = catalog.price(row["instance_type"], "spot") if row["instance_type"] in catalog.listings else None
            if price and not price.is_estimate and row["spot_usd_hr_est_us_east_1"] and row["family"] != "a1":
                kind = "gpu" if catalog.instance_type(row["instance_type"]).accelerator else "cpu"
                off[kind].append(math.log(price.usd_per_hour / float(row["spot_usd_hr_est_us_east_1"])))
    for kind, logs in off.items():
        assert statistics.pstdev(logs) == pytest.approx(SAVING_LOG_SD[kind], abs=0.01)


def test_on_demand_agrees_with_an_independent_sample(shared_data: Path, catalog: Catalog) -> None:
    with (shared_data / "catalog" / "spot_az_samples.csv").open(encoding="utf-8", newline="") as stream:
        rows = [row for row in csv.DictReader(stream) if row["region"] == "us-east-1"]
    assert rows
    for row in rows:
        price = catalog.price(row["instance_type"], "on-demand")
        assert price is not None
        assert price.usd_per_hour == pytest.approx(float(row["on_demand_usd_hr"]))


def test_another_folder_loads_alike(small: Path) -> None:
    other = load_catalog("us-east-1", small)
    bundled = load_catalog()
    assert other.regions == ("eu-west-2", "us-east-1")
    assert set(other.instance_types) < set(bundled.instance_types)
    for name, listing in other.listings.items():
        assert listing == bundled.listings[name]


def test_a_measured_spot_price_replaces_the_estimate(small: Path) -> None:
    """A folder may give spot prices; they need a source of their own."""
    path = small / "regions" / "us-east-1.csv"
    header, *rows = path.read_text(encoding="utf-8").splitlines()
    lines = [header, *(row.replace(",21.5,,79", ",21.5,0.31,79") for row in rows)]
    assert lines[1:] != rows
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    sources = small / "sources.json"
    text = sources.read_text(encoding="utf-8")
    sources.write_text(text.replace('"spot_usd_per_hour": ["spot-feed"],', ""), encoding="utf-8")
    with pytest.raises(BadInput, match="no source for spot_usd_per_hour"):
        load_catalog("us-east-1", small)
    sources.write_text(text.replace('"spot-feed"]', '"karpenter-prices"]'), encoding="utf-8")
    found = load_catalog("us-east-1", small)
    measured, estimated = found.price("trn1.32xlarge", "spot"), load_catalog().price("trn1.32xlarge", "spot")
    assert measured is not None
    assert estimated is not None
    assert (measured.usd_per_hour, measured.is_estimate, measured.date) == (0.31, False, SNAPSHOT)
    assert estimated.is_estimate
