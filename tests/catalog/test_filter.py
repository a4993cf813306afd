"""Laws of filtering and sorting, over the bundled catalogue.

`hetopt gpus` and `hetopt.gpus`: each GPU of a region once, with its facts and the cheapest machine that has it.

`hetopt catalog` as a person sees it: recorded text, JSON with units, and refusals.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any, get_args

import pytest
from hypothesis import given, settings, strategies as st
from typer.testing import CliRunner

import hetopt
from hetopt.api.options import Listed
from hetopt.cli.catalog import app
from hetopt.cli.flags import in_flags
from hetopt.core.errors import BadInput
from hetopt.core.option import options_of
from hetopt.optimizer.market.catalog import Catalog, Listing, _bundled, load_catalog
from hetopt.optimizer.market.catalog_filter import (
    AnyMarket,
    RentableGpu,
    price_in,
    quantities,
    rentable_gpus,
    select,
    sort,
    why_none,
)
from hetopt.optimizer.market.instance_type import Architecture
from hetopt.optimizer.market.offer_filter import Wishes, of_listings
from tests.work import calls_of

CATALOG = load_catalog()
LISTINGS = tuple(CATALOG.listings.values())
KEYS = sorted(quantities("any"))

WISHES = st.fixed_dictionaries(
    {},
    optional={
        "types": st.lists(st.sampled_from(["c7i.*", "g5.*", "*.metal", "p4d.24xlarge"]), max_size=3).map(tuple),
        "exclude": st.sampled_from([("g5.*",), ("*.xlarge",)]),
        "gpus": st.lists(st.sampled_from(["A10G", "l4:4+", "a100-80gb", "any:8", "none"]), max_size=2).map(tuple),
        "architecture": st.sampled_from(get_args(Architecture)),
        "market": st.sampled_from(get_args(AnyMarket)),
        "max_hourly_usd": st.floats(0.01, 60),
    },
)


@settings(max_examples=40, deadline=None)
@given(WISHES)
def test_filters_are_a_conjunction(wishes: dict[str, Any]) -> None:
    """What all filters keep is what each of them keeps. The market decides which price is meant, so it goes along."""

    def kept(some: dict[str, Any]) -> set[str]:
        found = select(LISTINGS, of_listings(CATALOG, Wishes(**some)))
        return {listing.instance_type.name for listing in found}

    market = {"market": wishes["market"]} if "market" in wishes else {}
    alone = [kept({name: wishes[name], **market}) for name in wishes]
    assert kept(wishes) == kept({}).intersection(*alone)


@settings(max_examples=40, deadline=None)
@given(WISHES)
def test_an_empty_answer_is_explained_by_true_numbers(wishes: dict[str, Any]) -> None:
    filters = of_listings(CATALOG, Wishes(**wishes))
    if select(LISTINGS, filters):
        return
    reason = why_none(LISTINGS, filters)
    left = {one.setting: len(select(LISTINGS, [other for other in filters if other is not one])) for one in filters}
    most = max(left.values())
    if most:
        assert reason.startswith(f"{most:,} would without ")
        assert left[reason.split(" without ")[1].split(", ")[0]] == most
    else:
        assert "alone leaves" in reason


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("key", KEYS)
def test_sorting_orders_and_loses_nothing(key: str, reverse: bool) -> None:
    quantity = quantities("any")[key]
    ordered = sort(LISTINGS, quantity, reverse=reverse)
    assert sorted(id(one) for one in ordered) == sorted(id(one) for one in LISTINGS)
    values = [quantity(one) for one in ordered]
    known: list[Any] = [value for value in values if value is not None]
    assert values == known + [None] * (len(values) - len(known)), "the unknown is not last"
    assert known == sorted(known, reverse=reverse)


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(LISTINGS))
def test_any_market_means_the_lower_price(listing: Listing) -> None:
    prices = [price.usd_per_hour for market in ("spot", "on-demand") if (price := price_in(listing, market))]
    found = price_in(listing, "any")
    assert (found.usd_per_hour if found else None) == min(prices, default=None)


def test_the_options_are_those_of_the_library() -> None:
    assert set(options_of(Listed)["sort"].names) == set(KEYS)


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
    ],
)
def test_wishes(wish: dict[str, object], names: set[str]) -> None:
    assert {gpu.name for gpu in hetopt.gpus(**wish)} == names  # type: ignore[arg-type]  # from a table


Golden = Callable[[str, str], None]


@pytest.fixture(autouse=True)
def _plain_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")


def run(*arguments: str) -> tuple[str, str]:
    """stdout and stderr of a command that succeeds."""
    result = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout, result.stderr


def refused(*arguments: str) -> BadInput:
    result = CliRunner().invoke(app, list(arguments))
    assert isinstance(result.exception, BadInput), result.output
    assert result.stdout == ""
    return result.exception


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("list_a10g.txt", "list --gpus A10G --market spot"),
        ("list_eight_gpus.txt", "list --gpus any:8+ --sort price-per-gpu"),
        ("list_cpu.txt", "list --gpus none --sort price-per-coremark --limit 6"),
        ("list_without_prices.txt", "list --types c7i.* --region mx-central-1 --sort spot-saving --reverse -n 5"),
        ("list_fractions.txt", "list --types g6f.*,gr6f.* --sort memory --reverse"),
        ("show_g5.txt", "show g5.xlarge"),
        ("show_g7.txt", "show g7.2xlarge"),
        ("show_mac.txt", "show mac2.metal --region eu-west-2"),
    ],
)
def test_text(golden: Golden, name: str, arguments: str) -> None:
    text, _ = run(*arguments.split())
    assert max(len(line) for line in text.splitlines()) <= 80
    assert "…" not in text
    golden(name, "".join(f"{line.rstrip()}\n" for line in text.splitlines()))


@pytest.mark.parametrize(
    ("arguments", "said", "hint"),
    [
        ("show g5.xlrge", "no instance type called 'g5.xlrge'", "g5.xlarge"),
        ("list --region us-esat-1", "no region called 'us-esat-1'", "us-east-1"),
        ("show g5.xlarge --region mars", "no region called 'mars'", "us-east-1"),
        ("list --gpus A1OG", "no accelerator called 'A1OG'", "A10G"),
        ("list --types c7j.*", "--types 'c7j.*' matches no instance type", "g5.*"),
        ("list --max-hourly nan", "--max-hourly must be an amount in USD", "$20"),
        ("list --max-hourly -1", "--max-hourly must be a positive number", "--max-hourly"),
        ("list --region ca-west-1 --max-hourly 3", "no prices for ca-west-1", "refresh --region ca-west-1"),
        ("list --region ca-west-1 --market on-demand", "no prices for ca-west-1", "refresh --region ca-west-1"),
        ("list --sort beauty", "no sort called 'beauty'", "price-per-vcpu"),
        ("list --arch sparc", "no architecture called 'sparc'", "arm64"),
        ("list --catalog nowhere", "nowhere/sources.json does not exist", "--catalog"),
    ],
)
def test_bad_input_is_refused_in_a_sentence(arguments: str, said: str, hint: str) -> None:
    error = refused(*arguments.split())
    assert said in in_flags(error.message)
    assert hint in in_flags(error.hint or "")


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("hetopt.optimizer.market.catalog", {"numpy", "torch", "optuna", "rich", "typer", "boto3"}),
        (
            "hetopt.cli.catalog",
            {"numpy", "torch", "pydantic", "optuna", "boto3", "hetopt.optimizer.market.catalog"},
        ),
    ],
)
def test_importing_brings_nothing_heavy(module: str, absent: set[str]) -> None:
    code = f"import sys, {module}; sys.exit(' '.join({absent!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr.strip() == ""


def test_loading_is_quick_and_happens_once() -> None:
    _bundled.cache_clear()
    assert calls_of(load_catalog) < 500_000
    assert calls_of(load_catalog) < 10
