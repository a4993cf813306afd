"""Laws of the data that hetopt ships: every figure has date and source, and odd rows are treated as README.md says.

Hand-edited catalogues: each mistake becomes one sentence that names file and line.
"""

from __future__ import annotations

import csv
import datetime
import math
import statistics
from collections.abc import Callable
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from hetopt.catalogs.build import build
from hetopt.core.errors import BadInput
from hetopt.optimizer.cost.bill import load_billing
from hetopt.optimizer.market.catalog import BUNDLED, SAVING_LOG_SD, Catalog, load_catalog, offers

SNAPSHOT = datetime.date(2026, 7, 20)
ADVISOR = datetime.date(2025, 6, 28)
FEED = datetime.date(2026, 8, 1)
ELSEWHERE = datetime.date(2025, 11, 30)
UNPRICED = {"ap-east-2", "ap-southeast-4", "ap-southeast-7", "ca-west-1", "mx-central-1"}


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
    assert len(files) == 33 + 2
    for file in files:
        with (BUNDLED / file).open(encoding="utf-8", newline="") as stream:
            columns = next(csv.reader(stream))
        for column in columns[1:]:
            assert catalog.sources.of(file, column)
    for source in catalog.sources.by_name.values():
        assert source.licence in {"Apache-2.0", "MIT", "published figures"}
    used = {name for columns in catalog.sources.columns.values() for some in columns.values() for name in some}
    assert used == set(catalog.sources.by_name)


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


def test_what_a_source_does_not_say_is_unknown_and_not_zero(catalog: Catalog) -> None:
    found = catalog.instance_type("c9g.xlarge")
    assert (found.cores, found.efa, found.burstable, found.network_peak_gbps) == (None,) * 4
    assert catalog.listing("c9g.xlarge").zones is None
    assert any("headline" in caveat.note for caveat in catalog.caveats("c9g.xlarge"))
    assert catalog.instance_type("mac2.metal").architecture is None
    assert catalog.instance_type("u-6tb1.56xlarge").generation is None


def test_the_files_are_what_build_makes_of_the_snapshots(shared_data: Path) -> None:
    made = build(shared_data / "catalog")
    shipped = {
        path.relative_to(BUNDLED).as_posix(): path.read_text(encoding="utf-8")
        for path in [BUNDLED / "instance_types.csv", *(BUNDLED / "regions").iterdir()]
    }
    assert made == shipped


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


Edited = Callable[[str, str, str], Path]

TYPES = "instance_types.csv"
REGION = "regions/us-east-1.csv"

TABLE = [
    # file, what was there, what someone wrote, what is said
    (TYPES, "c7i.xlarge,7,x86_64,4,", "c7i.xlarge,7,x86_64,nan,", "line 2: vcpus must be a valid integer, got 'nan'"),
    (TYPES, "c7i.xlarge,7,x86_64,4,", "c7i.xlarge,7,x86_64,0,", "line 2: vcpus must be greater than 0, got '0'"),
    (TYPES, "c7i.xlarge,7,x86_64,4,", "c7i.xlarge,7,x86_64,,", "line 2: vcpus is missing"),
    (
        TYPES,
        "c7i.xlarge,7,x86_64,4,2,",
        "c7i.xlarge,7,x86_64,4,8,",
        "cores is 8, but must be between 1 and the 4",
    ),
    (TYPES, "c7i.xlarge,7,x86_64,", "c7i.xlarge,7,sparc,", "architecture must be 'x86_64' or 'arm64', got 'sparc'"),
    (TYPES, "c7i.xlarge,", ",", "instance_type: string should have at least 1 character"),
    (TYPES, "c7i.xlarge,", "g5.xlarge,", "line 3: g5.xlarge is listed twice"),
    (TYPES, "CPU @", "CPU, @", "line 6: has 28 cells where the header has 27"),
    (TYPES, "A10G,NVIDIA,1,1,", "A10G,NVIDIA,1,2,", "accelerator_fraction must be less than or equal to 1, got '2'"),
    (TYPES, "A10G,NVIDIA,1,1,", "A10G,NVIDIA,1,1,-", "accelerator_memory_gib must be greater than 0, got '-22.35'"),
    (TYPES, "1.562,12.5", "inf,12.5", "network_baseline_gbps must be a finite number, got 'inf'"),
    (TYPES, "1.562,12.5", "1.562,1", "network_peak_gbps is 1.0, below the baseline of 1.562"),
    (TYPES, "1.562,12.5,1,0", "1.562,12.5,1,maybe", "efa must be a valid boolean, got 'maybe'"),
    (TYPES, "moto-instance-types", "my-notes", "names the source 'my-notes'"),
    (TYPES, "vcpus,", "cpus,", "lacks the column vcpus"),
    (TYPES, "vcpus,", "vcpus,vcpus,", "names a column twice"),
    (TYPES, "vcpus,", "colour,vcpus,", "has the unknown column 'colour'"),
    (TYPES, "c7i.xlarge,7", 'c7i.xlarge,"7', "line "),
    (REGION, "0.1785", "0", "line 2: on_demand_usd_per_hour must be greater than 0, got '0'"),
    (REGION, "0.1785", "cheap", "line 2: on_demand_usd_per_hour must be a valid number, got 'cheap'"),
    (REGION, "21.5,,79", "21.5,,100", "spot_saving_percent must be less than 100, got '100'"),
    (REGION, "79,<5%", "79,often", "interruption_band must be '<5%', '5-10%'"),
    (REGION, "c7i.xlarge", "g5.xlarge", "g5.xlarge is listed twice"),
    (REGION, "c7i.xlarge", "c99.xlarge", "c99.xlarge is not in instance_types.csv"),
    (REGION, "instance_type,zones", "instance_type,zone", "has the unknown column 'zone'"),
    ("accelerators.csv", "35,35,70,600,medium", "0,35,70,600,medium", "fp32_tflops must be greater than 0, got '0'"),
    ("accelerators.csv", "A100,80,A100-80GB", "A100,40,A100-80GB", "A100 with 40 GiB is listed twice"),
    ("caveats.csv", "types,about,note", "types,note", "lacks the column about"),
    ("sources.json", '"schema_version": 1', '"schema_version": 2', "schema 2; this hetopt reads up to 1"),
    ("sources.json", '"schema_version": 1', '"schema_version": "one"', "schema 'one', which this hetopt cannot read"),
    ("sources.json", '"2026-07-20"', '"2026-13-20"', "date: it must look like 2026-07-20 or 2026-07"),
    ("sources.json", '"licence": "Apache-2.0",', "", "licence is missing"),
    ("sources.json", '["karpenter-prices"]', '["hearsay"]', "the source 'hearsay', which is not described"),
    ("sources.json", '["karpenter-prices"]', "[]", "must have at least 1 item, got 0"),
    ("sources.json", '"spot_saving_percent"', '"saving"', "names no source for spot_saving_percent"),
    ("sources.json", '"sources": {', '"sources": [', "is not complete JSON"),
]


@pytest.mark.parametrize(("file", "old", "new", "said"), TABLE, ids=[f"{row[0]}: {row[3]}" for row in TABLE])
def test_a_mistake_is_one_sentence(edited: Edited, file: str, old: str, new: str, said: str) -> None:
    folder = edited(file, old, new)
    with pytest.raises(BadInput) as refused:
        load_catalog("us-east-1", folder)
    message = refused.value.message
    assert said in message
    assert file.rpartition("/")[2] in message
    assert "\n" not in message
    assert message.endswith(".")
    assert refused.value.hint
    assert refused.value.exit_code == 2


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('"value": 60', '"value": -60', "minimum_billed_s.value must be greater than or equal to 0, got -60"),
        ('"value": 60', '"value": NaN', "minimum_billed_s.value must be a finite number, got nan"),
        ('"value": 60', '"value": true', "minimum_billed_s.value must be a valid number, got True"),
        ('"date": "2026-11-20"', '"date": "yesterday"', "minimum_billed_s.date must be a valid date"),
        ('"minimum_billed_s"', '"minimum_s"', "minimum_billed_s is missing"),
        ('"terms": {', '"terms": {"tea": {},', "tea is no field of it"),
        ('"terms": {', '"words": {', "terms is not a JSON object"),
        ('"schema_version": 1', '"schema_version": 9', "schema 9"),
    ],
)
def test_a_mistake_in_the_billing_terms_is_one_sentence(edited: Edited, old: str, new: str, said: str) -> None:
    with pytest.raises(BadInput) as refused:
        load_billing(edited("billing.json", old, new))
    assert said in refused.value.message
    assert "billing.json" in refused.value.message
    assert "\n" not in refused.value.message


@pytest.mark.parametrize("file", [TYPES, "sources.json", "caveats.csv", REGION])
def test_a_missing_file_is_named(small: Path, file: str) -> None:
    (small / file).unlink()
    with pytest.raises(BadInput, match=file.rpartition("/")[2] if file != REGION else "no region called 'us-east-1'"):
        load_catalog("us-east-1", small)


def test_a_region_is_no_path(small: Path) -> None:
    with pytest.raises(BadInput, match="no region"):
        load_catalog("../regions/us-east-1", small)
