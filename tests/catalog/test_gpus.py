"""`hetopt gpus` and `hetopt.gpus`: each GPU of a region once, with its facts and the cheapest machine that has it."""

from __future__ import annotations

import json
from typing import get_args

import pytest
from typer.testing import CliRunner

import hetopt
from hetopt.cli.main import app
from hetopt.core.errors import BadInput
from hetopt.optimizer.market.catalog import Catalog, Listing, load_catalog
from hetopt.optimizer.market.catalog_filter import AnyMarket, price_in
from hetopt.optimizer.market.gpus import RentableGpu, rentable_gpus
from tests.work import counted_command

CATALOG = load_catalog()
REGIONS = ("us-east-1", "eu-west-3", "mx-central-1", "sa-east-1")
"""Both prices, on demand alone, none, and few GPUs."""


def carriers(catalog: Catalog, gpu: RentableGpu) -> list[Listing]:
    """Every machine of a region with whole GPUs of that kind."""
    return [
        listing
        for listing in catalog.listings.values()
        if (has := listing.instance_type.accelerator) is not None
        and (has.name, has.memory_gib, has.fraction) == (gpu.name, gpu.memory_gib, 1)
        and listing.zones != 0
    ]


@pytest.mark.parametrize("region", REGIONS)
@pytest.mark.parametrize("market", get_args(AnyMarket))
def test_each_gpu_comes_once_with_the_cheapest_machine(region: str, market: AnyMarket) -> None:
    catalog = CATALOG.in_region(region)
    found = rentable_gpus(catalog, market=market)
    assert len({(gpu.name, gpu.memory_gib) for gpu in found}) == len(found)
    for gpu in found:
        prices = [price.usd_per_hour for one in carriers(catalog, gpu) if (price := price_in(one, market))]
        assert gpu.usd_per_hour(market) == min(prices, default=None)
        assert gpu.machine in carriers(catalog, gpu)
    if market == "any":
        names = {gpu.name for gpu in found}
        for listing in catalog.listings.values():
            has = listing.instance_type.accelerator
            if has is not None and has.is_cuda and has.whole and listing.zones != 0:
                assert has.name in names


@pytest.mark.parametrize(
    ("wish", "names"),
    [
        ({"only": "l4,A10g"}, {"L4", "A10G"}),
        ({"only": ("A100-80GB",)}, {"A100"}),
        ({"memory_min_gib": 100}, {"H200", "B200"}),
        ({"price_max_usd_per_hour": "$0.6"}, {"T4", "T4G", "A10G", "L4"}),
    ],
)
def test_wishes(wish: dict[str, object], names: set[str]) -> None:
    assert {gpu.name for gpu in hetopt.gpus(**wish)} == names  # type: ignore[arg-type]  # from a table


@pytest.mark.parametrize(
    ("wish", "said"),
    [
        ({"only": "A11"}, "no accelerator called 'A11'"),
        ({"region": "us-eat-1"}, "us-eat-1"),
        ({"sort": "speed"}, "no sort called 'speed'"),
        ({"memory_min_gib": -1}, "must be a positive number of GiB"),
    ],
)
def test_bad_wishes(wish: dict[str, object], said: str) -> None:
    with pytest.raises(BadInput, match=said):
        hetopt.gpus(**wish)  # type: ignore[arg-type]  # from a table


def test_json_has_units_and_nulls() -> None:
    told = json.loads(CliRunner().invoke(app, ["gpus", "T4", "--json"], catch_exceptions=False).stdout)
    [t4] = told
    assert t4["bf16_tflops"] is None
    assert t4["fp16_tflops"] == 65
    assert {price["market"] for price in t4["cheapest_type"]["prices"]} == {"spot", "on-demand"}
    assert all(price["date"] for price in t4["cheapest_type"]["prices"])


def test_it_needs_no_torch_and_little_work() -> None:
    command = counted_command("gpus")
    assert "torch" not in command.modules
    assert command.calls < 1_000_000


def test_any_region_has_the_cheapest_machine_of_all() -> None:
    everywhere = {(gpu.name, gpu.memory_gib): gpu for gpu in hetopt.gpus(region="any")}
    for region in ("us-east-1", "eu-north-1"):
        for gpu in hetopt.gpus(region=region):
            here, best = gpu.usd_per_hour(), everywhere[gpu.name, gpu.memory_gib].usd_per_hour()
            assert here is None or (best is not None and best <= here)
    assert len({gpu.region for gpu in everywhere.values()}) > 1
