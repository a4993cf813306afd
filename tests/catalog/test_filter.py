"""Laws of filtering and sorting, over the bundled catalogue."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetopt.api.options import Listed
from hetopt.core.errors import BadInput
from hetopt.core.option import options_of
from hetopt.optimizer.market.catalog import Catalog, Listing, load_catalog
from hetopt.optimizer.market.catalog_filter import AnyMarket, Criteria, price_in, quantities, select, sort, why_none
from hetopt.optimizer.market.instance_type import Architecture

CATALOG = load_catalog()
LISTINGS = tuple(CATALOG.listings.values())
KEYS = sorted(quantities("any"))

WISHES: dict[str, st.SearchStrategy[Any]] = {
    "accelerator": st.sampled_from(["A10G", "l4", "A100", "a100-80gb", "RTX-PRO-4500", "T4g", "Gaudi"]),
    "accelerators_min": st.integers(1, 8),
    "vcpus_min": st.integers(1, 256),
    "vcpus_max": st.integers(1, 256),
    "memory_min_gib": st.floats(0.5, 4096),
    "network_min_gbps": st.floats(0.1, 400),
    "architecture": st.sampled_from(get_args(Architecture)),
    "families": st.lists(st.sampled_from(["c7i", "g5", "G6", "m6i", "p4d"]), min_size=1, max_size=3).map(tuple),
    "market": st.sampled_from(get_args(AnyMarket)),
    "price_max_usd_per_hour": st.floats(0.01, 60),
    "interruption_max": st.sampled_from([0.03, 0.05, 0.10, 0.12, 0.15, 0.20, 1.0]),
}
CRITERIA = st.fixed_dictionaries({}, optional=WISHES)
RAISE = ("accelerators_min", "vcpus_min", "memory_min_gib", "network_min_gbps")
LOWER = ("vcpus_max", "price_max_usd_per_hour", "interruption_max")


def kept(wishes: dict[str, Any]) -> list[Listing]:
    return select(LISTINGS, Criteria(**wishes).filters(CATALOG))


@settings(max_examples=40, deadline=None)
@given(CRITERIA)
def test_filters_are_a_conjunction(wishes: dict[str, Any]) -> None:
    """What all filters keep is what each of them keeps. The market decides which price is meant, so it goes along."""
    market = {"market": wishes["market"]} if "market" in wishes else {}
    alone = [{listing.instance_type.name for listing in kept({name: wishes[name], **market})} for name in wishes]
    everything = {listing.instance_type.name for listing in LISTINGS}
    assert {listing.instance_type.name for listing in kept(wishes)} == everything.intersection(*alone)


@settings(max_examples=40, deadline=None)
@given(CRITERIA, st.sampled_from(RAISE + LOWER), st.floats(0, 1))
def test_a_stricter_wish_never_adds_anything(wishes: dict[str, Any], name: str, by: float) -> None:
    if name not in wishes:
        return
    stricter = wishes[name] * (1 + by) if name in RAISE else wishes[name] * (1 - by / 2)
    if isinstance(wishes[name], int):
        stricter = max(1, round(stricter))
    assert {id(one) for one in kept({**wishes, name: stricter})} <= {id(one) for one in kept(wishes)}


@settings(max_examples=25, deadline=None)
@given(CRITERIA)
def test_what_is_kept_has_what_was_wished_for(wishes: dict[str, Any]) -> None:
    for listing in kept(wishes):
        found = listing.instance_type
        price = price_in(listing, wishes.get("market", "any"))
        assert found.vcpus >= wishes.get("vcpus_min", 0)
        assert found.vcpus <= wishes.get("vcpus_max", 1000)
        assert found.memory_gib >= wishes.get("memory_min_gib", 0)
        assert found.network_baseline_gbps >= wishes.get("network_min_gbps", 0)
        assert "accelerator" not in wishes or found.accelerator is not None
        assert "architecture" not in wishes or found.architecture == wishes["architecture"]
        assert "families" not in wishes or found.family in {family.lower() for family in wishes["families"]}
        if "price_max_usd_per_hour" in wishes:
            assert price is not None
            assert price.usd_per_hour <= wishes["price_max_usd_per_hour"]
        if "interruption_max" in wishes:
            assert listing.band is not None
            assert listing.band.high <= wishes["interruption_max"]


@settings(max_examples=40, deadline=None)
@given(CRITERIA)
def test_an_empty_answer_is_explained_by_true_numbers(wishes: dict[str, Any]) -> None:
    filters = Criteria(**wishes).filters(CATALOG)
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


@pytest.mark.parametrize("key", KEYS)
def test_sorting_does_not_depend_on_the_order_before(key: str) -> None:
    quantity = quantities("spot")[key]
    assert sort(LISTINGS, quantity) == sort(tuple(reversed(LISTINGS)), quantity)


def test_equals_go_by_family_and_size() -> None:
    ordered = sort(CATALOG.listings.values(), quantities("any")["name"])
    names = [one.instance_type.name for one in ordered if one.instance_type.family == "c6g"]
    assert names[:5] == ["c6g.medium", "c6g.large", "c6g.xlarge", "c6g.2xlarge", "c6g.4xlarge"]


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(LISTINGS))
def test_any_market_means_the_lower_price(listing: Listing) -> None:
    prices = [price.usd_per_hour for market in ("spot", "on-demand") if (price := price_in(listing, market))]
    found = price_in(listing, "any")
    assert (found.usd_per_hour if found else None) == min(prices, default=None)


def test_the_options_are_those_of_the_library() -> None:
    offered = options_of(Listed)
    assert set(offered["sort"].names) == set(KEYS)
    assert {one.name for one in fields(Criteria)} <= offered.keys()


def test_a_partition_is_no_whole_accelerator() -> None:
    assert all(one.instance_type.family != "g6f" for one in kept({"accelerator": "L4", "accelerators_min": 1}))
    assert any(one.instance_type.family == "g6f" for one in kept({"accelerator": "L4"}))


def test_a_region_without_prices_still_knows_what_can_be_spot(catalog: Catalog) -> None:
    there = catalog.in_region("mx-central-1")
    found = select(there.listings.values(), Criteria(market="spot", families=("c7i",)).filters(there))
    assert found
    assert all(one.spot is None and one.spot_saving for one in found)


@pytest.mark.parametrize(
    ("wishes", "said", "hint"),
    [
        ({"accelerator": "A1OG"}, "no accelerator called 'A1OG'", "did you mean 'A10G'"),
        ({"accelerator": "TPU"}, "no accelerator called 'TPU'", "choose one of: "),
        ({"families": ("c7j",)}, "no family called 'c7j'", "c7i"),
        ({"families": ("c7i", "nonsense")}, "no family called 'nonsense'", "hetopt catalog list"),
    ],
)
def test_an_unknown_name_is_refused_with_what_is_close(wishes: dict[str, Any], said: str, hint: str) -> None:
    with pytest.raises(BadInput, match=said) as refused:
        Criteria(**wishes).filters(CATALOG)
    assert hint in (refused.value.hint or "")


def test_lookups_suggest_close_names(catalog: Catalog) -> None:
    with pytest.raises(BadInput, match=r"no instance type called 'g5\.xlrge'") as refused:
        catalog.instance_type("g5.xlrge")
    assert "g5.xlarge" in (refused.value.hint or "")
    with pytest.raises(BadInput, match="no region called 'us-esat-1'") as refused:
        catalog.in_region("us-esat-1")
    assert refused.value.hint == "did you mean 'us-west-1' or 'us-east-1'?"
