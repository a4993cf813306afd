"""From answers of the AWS APIs to a catalogue folder: prices that count, types left out, and which folder is in use."""

from __future__ import annotations

import datetime
import json
import math
from pathlib import Path
from typing import Any

import pytest

from hetopt.core.errors import BadInput
from hetopt.optimizer.market.catalog import BUNDLED
from hetopt.optimizer.market.catalog_choice import catalog_in_use
from hetopt.optimizer.market.catalog_folder import refreshed_folders, write_catalog
from hetopt.optimizer.market.catalog_refresh import Answers, PublicPrices, instance_row, plausible, refreshed
from hetopt.optimizer.market.zone_prices import ZonePrice, zone_prices

NOW = datetime.datetime(2026, 11, 20, 12, tzinfo=datetime.UTC)


def test_the_latest_spot_price_of_each_zone_counts() -> None:
    def entry(zone: str, usd: str, hour: int, product: str = "Linux/UNIX") -> dict[str, Any]:
        return {
            "AvailabilityZone": zone,
            "InstanceType": "m5.large",
            "ProductDescription": product,
            "SpotPrice": usd,
            "Timestamp": NOW - datetime.timedelta(hours=hour),
        }

    history = [
        entry("us-east-1a", "0.04", 2),
        entry("us-east-1a", "0.05", 5),
        entry("us-east-1b", "0.03", 9),
        entry("us-east-1b", "0.9", 1, "Windows"),
    ]
    found = zone_prices(history, [{"ZoneName": "us-east-1a", "ZoneId": "use1-az4"}])
    assert {zone: price.usd_per_hour for zone, price in found["m5.large"].items()} == {
        "use1-az4": 0.04,
        "us-east-1b": 0.03,
    }
    assert found["m5.large"]["us-east-1b"].log_sd == 0
    good, bad = ZonePrice(usd_per_hour=0.04, log_sd=0.1), ZonePrice(usd_per_hour=1e-5, log_sd=0)
    kept, odd = plausible({"m5.large": {"a": good, "b": bad}, "new.large": {"a": bad}}, {"m5.large": 0.096})
    assert kept == {"m5.large": {"a": good}}
    assert len(odd) == 2


def test_a_price_counts_for_as_long_as_it_held() -> None:
    """A quarter of the time at 2 and the rest at 1: a standard deviation of sqrt(3) / 4 of the log of 2."""

    def entry(usd: float, hours_ago: float) -> dict[str, Any]:
        when = (NOW - datetime.timedelta(hours=hours_ago)).isoformat()
        return {"AvailabilityZone": "a", "InstanceType": "m5.large", "SpotPrice": str(usd), "Timestamp": when}

    found = zone_prices([entry(1.0, 6), entry(1.0, 0), entry(2.0, 8)], [])["m5.large"]["a"]
    assert found.usd_per_hour == 1.0
    assert found.log_sd == pytest.approx(3**0.5 / 4 * math.log(2))


def test_recorded_history_gives_a_price_for_each_zone(shared_data: Path) -> None:
    path = shared_data / "catalog" / "spot_history_m5_large.json"
    if not path.exists():
        pytest.skip("no recorded history")
    history = json.loads(path.read_text(encoding="utf-8"))["SpotPriceHistory"]
    found = zone_prices(history, [])
    assert len(found["m5.large"]) == 5
    assert all(0.0367 <= price.usd_per_hour <= 0.0437 for price in found["m5.large"].values())
    assert all(0 < price.log_sd < 0.1 for price in found["m5.large"].values())


def test_a_type_without_a_network_rate_is_left_out_and_named() -> None:
    odd = {
        "InstanceType": "zz9.large",
        "VCpuInfo": {"DefaultVCpus": 4},
        "MemoryInfo": {"SizeInMiB": 8192},
        "NetworkInfo": {"NetworkPerformance": "Moderate"},
    }
    assert instance_row(odd, None, {}) is None
    known = instance_row({**odd, "InstanceType": "c7i.xlarge"}, {"network_baseline_gbps": "1.5"}, {})
    assert known is not None
    assert known["network_baseline_gbps"] == "1.5"
    none = Answers(instance_types=[odd], offerings=[], spot_prices=[], zones=[])
    public = PublicPrices(on_demand={"zz9.large": 1.0}, published="2026-11-19")
    made = refreshed(public, none, "us-east-1", NOW.date(), BUNDLED)
    assert len([sentence for sentence in made.left_out if "zz9.large" in sentence]) == 2


def test_the_bundled_catalogue_is_in_use_until_there_is_another(tmp_path: Path) -> None:
    today = datetime.date(2026, 11, 20)
    first = catalog_in_use("us-east-1", None, today=today, home=tmp_path)
    assert first.bundled
    assert "on demand 123 days old (2026-07-20), spot 111 days old (2026-08-01)" in first.ages
    assert "estimates of spot 510 days old (2025-06-28)" in first.ages
    assert str(first.note).startswith("Prices are 111 to 510 days old: `hetopt catalog refresh --region us-east-1`")
    files = {
        str(path.relative_to(BUNDLED)): path.read_text(encoding="utf-8")
        for path in BUNDLED.rglob("*")
        if path.is_file()
    }
    write_catalog(tmp_path, "us-east-1", "2026-11-18", files)
    before, newest = (write_catalog(tmp_path, "us-east-1", "2026-11-19", files) for _ in range(2))
    assert newest.name == "2026-11-19.1"
    assert refreshed_folders(tmp_path, "us-east-1") == (newest, before)
    second = catalog_in_use("us-east-1", None, today=today, home=tmp_path)
    assert not second.bundled
    assert second.catalog.directory == newest
    assert catalog_in_use("eu-west-2", None, today=today, home=tmp_path).bundled
    assert catalog_in_use("us-east-1", BUNDLED, today=today, home=tmp_path).bundled


def test_a_folder_that_is_no_catalogue_never_takes_the_name(tmp_path: Path) -> None:
    with pytest.raises(BadInput):
        write_catalog(tmp_path, "us-east-1", "2026-11-20", {"sources.json": "{}"})
    assert list((tmp_path / "us-east-1").iterdir()) == []
