"""Laws of reading AWS's public price feeds: what is a price, and what is refused whatever it looks like."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import cache
from itertools import pairwise

import pytest
from hypothesis import given, strategies as st

from hetopt.core.errors import BadInput
from hetopt.optimizer.market.price_feeds import (
    PRICE_LIST,
    REGION_INDEX,
    feed_url,
    on_demand_prices,
    region_versions,
    spot_advice,
    spot_prices,
)
from tests.catalog.price_server import advisor, others, price_list, row, rows_of, spot_feed, usd_of

FEW = ("c7i.xlarge", "g5.xlarge", "p4d.24xlarge")


@cache
def few() -> bytes:
    return price_list(rows_of(FEW))


@given(st.lists(st.integers(0, len(few())), max_size=12))
def test_a_price_list_is_read_alike_however_its_bytes_arrive(cuts: list[int]) -> None:
    places = [0, *sorted(cuts), len(few())]
    pieces = (few()[begin:end] for begin, end in pairwise(places))
    found = on_demand_prices(pieces, "it")
    assert found == {
        "published": "2026-11-25",
        "usd_per_hour": {name: pytest.approx(usd_of(name)) for name in FEW},
        "left_out": [],
    }


@given(st.integers(0, len(few()) - 2))
def test_a_price_list_that_ends_anywhere_is_refused_or_ends_with_a_whole_row(end: int) -> None:
    content = few()[:end]
    try:
        found = on_demand_prices(iter([content]), "it")
    except BadInput:
        return
    assert content.endswith((b'"', b'"\n', b'",')), "the last field of a row may be empty"
    assert found["usd_per_hour"].items() <= on_demand_prices(iter([few()]), "it")["usd_per_hour"].items()


@given(st.binary(max_size=400))
def test_what_is_no_feed_is_refused_by_each_reader(content: bytes) -> None:
    for read in (on_demand_prices, region_versions, spot_prices, spot_advice):
        with pytest.raises(BadInput):
            read(iter([content]), "it")


INDEX = {
    "regions": {"eu-west-1": {"currentVersionUrl": PRICE_LIST.format(version="20261125174521", region="eu-west-1")}}
}
URL = PRICE_LIST.replace("https://pricing.us-east-1.amazonaws.com", "").replace("index.csv", "index.json")
PLACES = {"index": "regions", "advice": "spot_advisor"}
READERS = {
    "price list": (on_demand_prices, few),
    "index": (
        region_versions,
        lambda: (
            json.dumps(INDEX)
            .replace("https://pricing.us-east-1.amazonaws.com", "")
            .replace("index.csv", "index.json")
            .encode()
        ),
    ),
    "spot prices": (spot_prices, lambda: spot_feed({"eu-west-1": {"c7i.xlarge": "0.07"}})),
    "advice": (spot_advice, lambda: advisor({"eu-west-1": {"c7i.xlarge": (62, 1)}})),
}
"""By feed: who reads it, and a small one."""


@pytest.mark.parametrize("feed", READERS)
@pytest.mark.parametrize(
    "page", [b"<!DOCTYPE html><title>Sign in</title>", b"\xef\xbb\xbf\n <html>", b"<?xml version='1.0'?>"]
)
def test_a_login_page_is_called_one_by_each_reader(feed: str, page: bytes) -> None:
    read, _ = READERS[feed]
    with pytest.raises(BadInput, match="login page") as refused:
        read(iter([page]), "it")
    assert "sign in" in str(refused.value.hint)


@pytest.mark.parametrize("feed", READERS)
@given(data=st.data())
def test_a_feed_that_is_cut_off_is_refused_by_each_reader(feed: str, data: st.DataObject) -> None:
    read, make = READERS[feed]
    content = make().rstrip()
    assert read(iter([content]), "it")
    end = data.draw(st.integers(0, len(content) - 1))
    last, whole = (one.rsplit(b"\n", 1)[-1] for one in (content[:end], content))
    has_all_columns = last.count(b'",') == whole.count(b'",')
    if feed == "price list" and (has_all_columns or content[:end].endswith((b'"', b'"\n'))):
        return  # after a whole row: who compares it with the prices of before finds out
    with pytest.raises(BadInput) as refused:
        read(iter([content[:end]]), "it")
    assert refused.value.hint


def test_a_price_of_zero_is_none_on_spot() -> None:
    feed = spot_feed({"eu-west-1": {"c7i.xlarge": "0.0000", "g5.xlarge": "0.4", "c7g.xlarge": "-0.1"}})
    assert spot_prices(iter([feed]), "it") == {"eu-west-1": {"g5.xlarge": 0.4}}
    with pytest.raises(BadInput, match="has no prices"):
        spot_prices(iter([spot_feed({"eu-west-1": {"c7i.xlarge": "0"}})]), "it")


KEYS = ("config", "currencies", "regions", "region", "instanceTypes", "sizes", "valueColumns", "ranges", "spot_advisor")
JSON = st.recursive(
    st.none() | st.integers(-(2**63), 2**63 - 1) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=4),
    max_leaves=20,
)


REGIONS = ("eu-west-1", "eu-west-2")


@pytest.mark.parametrize("feed", ["index", "spot prices", "advice"])
@given(data=st.data())
def test_a_bad_record_costs_what_it_holds_and_no_other(feed: str, data: st.DataObject) -> None:
    """Anything anywhere below the first region leaves the second as it was."""
    made: dict[str, Callable[[], str | bytes]] = {
        "index": lambda: json.dumps(
            {"regions": {one: {"currentVersionUrl": URL.format(version=20261125, region=one)} for one in REGIONS}}
        ),
        "spot prices": lambda: spot_feed({one: {"c7i.xlarge": "0.07", "g5.xlarge": "0.4"} for one in REGIONS}),
        "advice": lambda: advisor({one: {"c7i.xlarge": (62, 1), "g5.xlarge": (50, 2)} for one in REGIONS}),
    }
    read: Callable[[Iterator[bytes], str], dict[str, object]] = READERS[feed][0]
    whole = json.loads(made[feed]())
    right = read(iter([json.dumps(whole).encode()]), "it")
    holder, key = (whole["config"]["regions"], 0) if feed == "spot prices" else (whole[PLACES[feed]], REGIONS[0])
    while holder[key] and isinstance(holder[key], dict | list) and data.draw(st.booleans()):
        holder = holder[key]
        key = data.draw(st.sampled_from(sorted(holder) if isinstance(holder, dict) else range(len(holder))))
    holder[key] = data.draw(JSON)
    found = read(iter([json.dumps(whole).encode()]), "it")
    assert found[REGIONS[1]] == right[REGIONS[1]]


@given(st.binary(max_size=60))
def test_a_broken_line_of_a_price_list_costs_no_other(broken: bytes) -> None:
    head, *last = few().rsplit(b"\n", 2)
    damaged = b'"OnDemand","Linux' + broken.replace(b"\n", b"")
    found = on_demand_prices(iter([b"\n".join([head, damaged, *last])]), "it")
    assert found == on_demand_prices(iter([few()]), "it")


@given(JSON)
def test_json_of_another_form_is_refused_by_each_reader(value: object) -> None:
    for read in (region_versions, spot_prices, spot_advice):
        with pytest.raises(BadInput):
            read(iter([json.dumps(value).encode()]), "it")


@pytest.mark.parametrize("number", range(7))
def test_no_other_row_is_a_price_on_demand(number: int) -> None:
    other = list(others("c7i.xlarge"))[number]
    found = on_demand_prices(iter([price_list(iter([row("g5.xlarge", 1.006), other]))]), "it")
    assert found["usd_per_hour"] == {"g5.xlarge": 1.006}


def test_prices_in_another_currency_are_refused() -> None:
    with pytest.raises(BadInput, match="no on-demand price in USD"):
        on_demand_prices(iter([price_list(iter([row("c7i.xlarge", 1.2, Currency="CNY")]))]), "it")
    with pytest.raises(BadInput, match="USD"):
        spot_prices(iter([spot_feed({"eu-west-1": {"c7i.xlarge": "0.1"}}, currencies=("CNY",))]), "it")


@pytest.mark.parametrize(
    ("prices", "kept", "says"),
    [
        (["0.0000000000"], {}, None),
        (["0.0000000000", "0.2"], {"c7i.xlarge": 0.2}, None),
        (["0.2", "0.3"], {"c7i.xlarge": 0.3}, "the higher is taken"),
        (["-1"], {}, "is '-1'"),
        (["1e300"], {}, "is '1e300'"),
        (["nan"], {}, "is 'nan'"),
    ],
)
def test_a_price_that_cannot_be_is_left_out_and_said(prices: list[str], kept: dict[str, float], says: str) -> None:
    rows = [row("g5.xlarge", 1.006), *(row("c7i.xlarge", usd) for usd in prices)]
    found = on_demand_prices(iter([price_list(iter(rows))]), "it")
    assert found["usd_per_hour"] == {"g5.xlarge": 1.006, **kept}
    assert (says in " ".join(found["left_out"])) if says else found["left_out"] == []


def test_names_that_are_none_never_get_in() -> None:
    hostile = ("../../x", "a.b/../c", "c7i.xlarge\x1b[2J", "", "A.B", "x" * 99 + ".large")
    found = on_demand_prices(iter([price_list(row(name, 1.0) for name in (*hostile, "g5.xlarge"))]), "it")
    assert set(found["usd_per_hour"]) == {"g5.xlarge"}
    spot = spot_prices(iter([spot_feed({"eu-west-1": dict.fromkeys((*hostile, "g5.xlarge"), "1"), "../..": {}})]), "it")
    assert {region: set(here) for region, here in spot.items()} == {"eu-west-1": {"g5.xlarge"}}


@pytest.mark.parametrize(
    "address",
    [
        "https://elsewhere.example/offers/v1.0/aws/AmazonEC2/20261125174521/eu-west-1/index.json",
        "/offers/v1.0/aws/AmazonEC2/20261125174521/us-east-1/index.json",
        "/offers/v1.0/aws/AmazonEC2/../../eu-west-1/index.json",
        "",
    ],
)
def test_an_index_gives_versions_and_no_addresses(address: str) -> None:
    good = "/offers/v1.0/aws/AmazonEC2/20261125174521/eu-west-2/index.json"
    index = {
        "eu-west-1": {"currentVersionUrl": address},
        "eu-west-2": {"currentVersionUrl": good},
        "us-east-1-atl-1": {"currentVersionUrl": "/offers/v1.0/aws/AmazonEC2/1/us-east-1-atl-1/index.json"},
        "../x": {"currentVersionUrl": "/offers/v1.0/aws/AmazonEC2/12345678/../x/index.json"},
    }
    assert region_versions(iter([json.dumps({"regions": index}).encode()]), "it") == {"eu-west-2": "20261125174521"}


def test_spot_prices_have_many_spellings() -> None:
    feed = spot_feed({"eu-west-1": {"t4g.nano": "9.0E-4", "c7i.xlarge": "0.07", "p5.48xlarge": "N/A*"}})
    assert spot_prices(iter([feed]), "it") == {"eu-west-1": {"t4g.nano": 0.0009, "c7i.xlarge": 0.07}}


def test_a_saving_of_nothing_is_no_advice() -> None:
    data = advisor({"eu-west-1": {"a1.large": (0, 4), "c7i.xlarge": (62, 1), "p5.48xlarge": (-62, 2)}})
    assert spot_advice(iter([data]), "it") == {"eu-west-1": {"c7i.xlarge": (62, "5-10%")}}


def test_a_mirror_has_the_same_paths_and_is_https(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HETOPT_PRICE_MIRROR")
    assert feed_url(REGION_INDEX) == REGION_INDEX
    monkeypatch.setenv("HETOPT_PRICE_MIRROR", "https://mirror.example/aws/")
    path = "/offers/v1.0/aws/AmazonEC2/1/eu-west-1/index.csv"
    assert feed_url(PRICE_LIST.format(version=1, region="eu-west-1")) == f"https://mirror.example/aws{path}"
    for bad in (
        "http://mirror.example",
        "file:///etc",
        "https://user:secret@mirror.example",
        "ftp://127.0.0.1",
        "https://",
    ):
        monkeypatch.setenv("HETOPT_PRICE_MIRROR", bad)
        with pytest.raises(BadInput, match="no https address"):
            feed_url(REGION_INDEX)


def test_a_line_without_end_is_refused_while_it_is_read() -> None:
    def endless() -> Iterator[bytes]:
        while True:
            yield b"x" * 65_536

    with pytest.raises(BadInput, match="immense"):
        on_demand_prices(endless(), "it")
