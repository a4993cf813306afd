"""What may be rented: filters are a conjunction, and an empty answer has one true reason."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetopt.core.errors import BadInput
from hetopt.optimizer.market.catalog import Catalog, load_catalog, offers
from hetopt.optimizer.market.offer_filter import Wishes, narrow
from hetopt.optimizer.market.quota import Bucket, bucket_of, most_machines, read_quotas

CATALOG = load_catalog()
EVERYTHING = offers(CATALOG)

WISHES: dict[str, st.SearchStrategy[Any]] = {
    "types": st.lists(st.sampled_from(["g5.*", "c7?.xlarge", "c7a.xlarge", "*.large", "p4d.*"]), max_size=2).map(tuple),
    "exclude": st.lists(st.sampled_from(["g5.xlarge", "c7a.*", "*"]), max_size=1).map(tuple),
    "gpus": st.lists(st.sampled_from(["A10G", "l4:4", "any", "none"]), max_size=2).map(tuple),
    "architecture": st.sampled_from(["x86_64", "arm64"]),
    "market": st.sampled_from(["spot", "on-demand", "any"]),
    "network_min_gbps": st.sampled_from([1.0, 12.5, 25.0]),
    "network_max_gbps": st.sampled_from([1.0, 12.5, 25.0]),
    "max_hourly_usd": st.floats(0.01, 10),
    "quotas": st.sampled_from([{}, read_quotas(["g=8"]), read_quotas(["standard=2", "g=0"])]),
}


@settings(max_examples=60)
@given(st.fixed_dictionaries({}, optional=WISHES))
def test_wishes_are_a_conjunction(wishes: dict[str, Any]) -> None:
    def kept(some: dict[str, Any]) -> set[tuple[str, str]]:
        try:
            found = narrow(CATALOG, Wishes(**{"market": "any", **some}))
        except BadInput:
            return set()
        return {(offer.instance_type.name, offer.price.market) for offer in found}

    everything = {(offer.instance_type.name, offer.price.market) for offer in EVERYTHING}
    assert kept(wishes) == everything.intersection(*(kept({name: wish}) for name, wish in wishes.items()))


@pytest.mark.parametrize(
    ("wishes", "said"),
    [
        ({"types": ("g5.*",), "exclude": ("g5.*",)}, r'fulfils .*`types="g5\.\*"` and `exclude="g5\.\*"`: of'),
        ({"gpus": ("A10G",), "architecture": "arm64"}, 'fulfils .*`gpus="A10G"` and `architecture="arm64"`: of'),
        ({"gpus": ("H100",), "max_hourly_usd": 0.5}, r'`gpus="H100"` and `max_hourly_usd=0\.5`'),
        ({"network_min_gbps": 25.0, "network_max_gbps": 1.0}, r"`network_min_gbps=25` and `network_max_gbps=1`"),
        ({"max_hourly_usd": 0.0001}, r"fulfils .*`max_hourly_usd=0\.0001`"),
        ({"quotas": read_quotas([f"{f}=0" for f in ("standard", "g", "p", "p5", "inf", "trn", "dl", "f", "x", "u",
                                                      "hpc", "mac")])}, "leaves nothing"),
        ({"types": ("c7a.*", "g5.*"), "gpus": ("A10G", "none"), "exclude": ("g5.*",), "max_hourly_usd": 0.01},
         "Nothing that can be rented"),
        ({"types": ("zz.*",)}, "matches no instance type"),
        ({"types": ("g5.xlrge",)}, "no instance type"),
        ({"gpus": ("A1OG",)}, "no accelerator"),
        ({"gpus": ("A10G:many",)}, "NAME:COUNT"),
        ({"zone": "us-west-2a"}, '`zone="us-west-2a"` and `region="us-east-1"` exclude'),
        ({"zone": "us-east-1"}, "no zone"),
    ],
)  # fmt: skip
def test_what_nothing_fulfils_is_said(wishes: dict[str, Any], said: str) -> None:
    with pytest.raises(BadInput, match=said) as refused:
        narrow(CATALOG, Wishes(**wishes))
    assert refused.value.hint


def test_gpus_by_name_number_and_absence(catalog: Catalog) -> None:
    four = narrow(catalog, Wishes(gpus=("a10g:4",)))
    assert four
    for offer in four:
        assert offer.instance_type.accelerator is not None
        assert offer.instance_type.accelerator.name == "A10G"
        assert offer.instance_type.cuda_devices >= 4
    assert all(offer.instance_type.accelerator is None for offer in narrow(catalog, Wishes(gpus=("none",))))
    assert all(offer.instance_type.cuda_devices for offer in narrow(catalog, Wishes(gpus=("any",))))


@pytest.mark.parametrize(
    ("name", "market", "family"),
    [
        ("c7a.xlarge", "spot", "standard"),
        ("g5.xlarge", "spot", "g"),
        ("g6f.large", "on-demand", "g"),
        ("gr6.4xlarge", "spot", "g"),
        ("p4d.24xlarge", "spot", "p"),
        ("p5.48xlarge", "spot", "p5"),
        ("p5.48xlarge", "on-demand", "p"),
        ("inf2.xlarge", "spot", "inf"),
        ("trn1.2xlarge", "spot", "trn"),
        ("x2gd.large", "spot", "x"),
        ("i4i.large", "spot", "standard"),
    ],
)
def test_families_count_against_their_bucket(name: str, market: str, family: str) -> None:
    offer = next(one for one in EVERYTHING if (one.instance_type.name, one.price.market) == (name, market))
    assert bucket_of(offer) == Bucket(market=offer.price.market, family=family)


def test_quotas_are_in_vcpus_and_by_market() -> None:
    quotas = read_quotas(["g=8", "spot:standard=32"])
    assert quotas == {
        Bucket(market="spot", family="g"): 8,
        Bucket(market="on-demand", family="g"): 8,
        Bucket(market="spot", family="standard"): 32,
    }
    g5, c7a = (
        next(one for one in EVERYTHING if (one.instance_type.name, one.price.market) == (name, "spot"))
        for name in ("g5.xlarge", "c7a.4xlarge")
    )
    assert most_machines(g5, quotas) == 2
    assert most_machines(c7a, quotas) == 2


@pytest.mark.parametrize("text", ["g", "g=", "g=-1", "g=8.5", "gg=8", "=3", "moon:g=8"])
def test_a_quota_that_means_nothing_is_refused(text: str) -> None:
    with pytest.raises(BadInput) as refused:
        read_quotas([text])
    assert refused.value.hint


def test_a_quota_given_twice_is_refused() -> None:
    with pytest.raises(BadInput, match="twice"):
        read_quotas(["g=8", "spot:g=4"])


def test_a_zone_is_a_name_or_an_id(catalog: Catalog) -> None:
    """Ids begin with the region's short name. Without prices by zone those of the region hold."""
    everywhere = narrow(catalog, Wishes())
    assert narrow(catalog, Wishes(zone="us-east-1a")) == narrow(catalog, Wishes(zone="use1-az1")) == everywhere
    for zone in ("use2-az1", "apne1-az4", "euc1-az2"):
        with pytest.raises(BadInput, match=f'`zone="{zone}"` and `region="us-east-1"` exclude each other'):
            narrow(catalog, Wishes(zone=zone))
    with pytest.raises(BadInput, match="There is no zone"):
        narrow(catalog, Wishes(zone="moon1-az1"))
