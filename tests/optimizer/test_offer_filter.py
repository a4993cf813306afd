"""What may be rented: filters are a conjunction, and an empty answer has one true reason.

What a machine needs before its first step: seconds and disk, from dated figures; planner and launcher agree.
Laws of the hours in which machines may be used: how long work takes that only goes on in them.
"""

from __future__ import annotations

import datetime
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from hetopt.core.errors import BadInput
from hetopt.core.hosts import Host
from hetopt.optimizer.cost.provisioning import (
    Payload,
    disk_gb,
    measured_factors,
    provisioning_facts,
    startup_s,
)
from hetopt.optimizer.market.catalog import Catalog, load_catalog, offers
from hetopt.optimizer.market.offer_filter import Wishes, narrow
from hetopt.optimizer.market.quota import Bucket, bucket_of, read_quotas
from hetopt.optimizer.search.open_hours import DAY_S, OpenHours, elapsed_s

CATALOG = load_catalog()
EVERYTHING = offers(CATALOG)

WISHES: dict[str, st.SearchStrategy[Any]] = {
    "types": st.lists(st.sampled_from(["g5.*", "c7?.xlarge", "c7a.xlarge", "*.large", "p4d.*"]), max_size=2).map(tuple),
    "exclude": st.lists(st.sampled_from(["g5.xlarge", "c7a.*", "*"]), max_size=1).map(tuple),
    "gpus": st.lists(st.sampled_from(["A10G", "l4:4", "any", "none"]), max_size=2).map(tuple),
    "architecture": st.sampled_from(["x86_64", "arm64"]),
    "market": st.sampled_from(["spot", "on-demand", "any"]),
    "max_hourly_usd": st.floats(0.01, 10),
}


@settings(max_examples=20)
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
        ({"max_hourly_usd": 0.0001}, r"fulfils .*`max_hourly_usd=0\.0001`"),
        ({"types": ("c7a.*", "g5.*"), "gpus": ("A10G", "none"), "exclude": ("g5.*",), "max_hourly_usd": 0.01},
         "Nothing that can be rented"),
        ({"types": ("zz.*",)}, "matches no instance type"),
        ({"types": ("g5.xlrge",)}, "no instance type"),
        ({"gpus": ("A1OG",)}, "no accelerator"),
        ({"gpus": ("A10G:many",)}, "NAME:COUNT"),
        ({"zone": "us-west-2a"}, '`zone="us-west-2a"` and `region="us-east-1"` exclude'),
        ({"zone": "us-east-1"}, "exclude each other"),
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


@pytest.mark.parametrize("text", ["g", "g=", "g=-1", "g=8.5", "gg=8", "=3", "moon:g=8"])
def test_a_quota_that_means_nothing_is_refused(text: str) -> None:
    with pytest.raises(BadInput) as refused:
        read_quotas([text])
    assert refused.value.hint


def test_a_quota_given_twice_is_refused() -> None:
    with pytest.raises(BadInput, match="twice"):
        read_quotas(["g=8", "spot:g=4"])


def test_prices_of_a_zone_are_those_of_its_region(catalog: Catalog) -> None:
    assert narrow(catalog, Wishes(zone="us-east-1a")) == narrow(catalog, Wishes())


TYPES = load_catalog("us-east-1").instance_types
CPU, GPU, METAL = TYPES["c7i.xlarge"], TYPES["g5.xlarge"], TYPES["c7i.metal-24xl"]


def test_every_figure_is_dated_and_has_a_source() -> None:
    for name, term in provisioning_facts().items():
        assert term.source, name
        assert datetime.date(2019, 1, 1) < term.date <= datetime.date(2026, 11, 27)


def test_a_machine_without_a_gpu_begins_as_soon_as_others_were_seen_to() -> None:
    """SkyPilot's machines, with everything in their image, were ready in 73 s; those with a GPU unpack more."""
    assert startup_s(CPU, Payload()) == pytest.approx(75, rel=0.2)
    assert 150 < startup_s(GPU, Payload()) < 300
    assert startup_s(METAL, Payload()) > 600 + startup_s(CPU, Payload())


@given(more=st.floats(1e9, 1e13), name=st.sampled_from(["c7i.xlarge", "g5.xlarge", "p5.48xlarge", "t3.micro"]))
def test_data_takes_time_and_room(more: float, name: str) -> None:
    instance = TYPES[name]
    without, with_it = Payload(), Payload(data_bytes=more)
    assert startup_s(instance, with_it) - startup_s(instance, without) >= more / 125e6 * 0.999
    assert disk_gb(instance, with_it) - disk_gb(instance, without) >= more / 1e9 - 1


def test_what_is_asked_for_counts_alone() -> None:
    asked = Payload(startup_s=7.0, disk_gb=33, data_bytes=1e12)
    assert {startup_s(one, asked) for one in (CPU, GPU, METAL)} == {7.0}
    assert {disk_gb(one, asked) for one in (CPU, GPU, METAL)} == {33}


def test_what_launches_took_moves_their_kind_alone() -> None:
    slow = Payload(measured={"gpu": 2.0})
    assert startup_s(GPU, slow) == pytest.approx(2 * startup_s(GPU, Payload()))
    assert startup_s(CPU, slow) == startup_s(CPU, Payload())


def test_one_launch_is_believed_in_part_and_many_are() -> None:
    def after(launches: int) -> float:
        seen = [((CPU, GPU), 3 * startup_s(GPU, Payload()))] * launches
        return measured_factors(seen, Payload())["gpu"]

    assert measured_factors([], Payload()) == {}
    assert 1.5 < after(1) < after(4) < after(50) < 3
    assert after(50) == pytest.approx(3, rel=0.02)
    assert "cpu" not in measured_factors([((CPU, GPU), 100.0)], Payload()), "the last of the machines decides"


SLOTS = st.lists(st.floats(60, 40_000), min_size=1, max_size=6).map(
    lambda some: tuple(DAY_S * slot / sum(some) for slot in some)
)


@st.composite
def days(draw: st.DrawFn) -> tuple[tuple[float, ...], np.ndarray]:
    slots = draw(SLOTS)
    parts = st.sampled_from([0.0, 0.25, 0.5, 1.0])
    speed = draw(st.lists(parts, min_size=len(slots), max_size=len(slots)).filter(any))
    return slots, np.array(speed)


def walked_s(work_s: float, slots: tuple[float, ...], speed: np.ndarray) -> float:
    """Slot by slot."""
    now_s, place = 0.0, 0
    while True:
        slot, part = slots[place % len(slots)], float(speed[place % len(slots)])
        if part * slot >= work_s * (1 - 1e-12) and part > 0:
            return now_s + work_s / part
        work_s -= part * slot
        now_s, place = now_s + slot, place + 1


@given(day=days(), work_s=st.floats(0.1, 1e6))
def test_it_ends_when_a_walk_through_the_slots_does(day: tuple[tuple[float, ...], np.ndarray], work_s: float) -> None:
    slots, speed = day
    found = float(elapsed_s(work_s, speed, slots))
    assert found == pytest.approx(walked_s(work_s, slots, speed), rel=1e-6, abs=1e-3)
    assert found >= work_s * (1 - 1e-9)


@given(day=days(), works=st.lists(st.floats(0, 1e6), min_size=2, max_size=20))
def test_more_work_never_ends_sooner(day: tuple[tuple[float, ...], np.ndarray], works: list[float]) -> None:
    slots, speed = day
    found = elapsed_s(np.sort(works), speed, slots)
    assert (np.diff(found) >= -1e-6 * found[1:]).all()


def test_the_day_begins_now() -> None:
    hosts = [Host(name="desk", address="desk", hours="18:00-08:00"), Host(name="box", address="box")]
    noon = datetime.datetime(2026, 3, 1, 12, 30)
    found = OpenHours.of(hosts, noon)
    assert found is not None
    assert found.slots_s == (5.5 * 3600, 14 * 3600, 4.5 * 3600)
    assert found.of_host("desk") == (False, True, False)
    assert found.of_host("box") == (True, True, True)
    assert OpenHours.of(hosts[1:], noon) is None
