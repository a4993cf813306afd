"""What a machine needs before its first step: seconds and disk, from dated figures; planner and launcher agree."""

from __future__ import annotations

import datetime
from dataclasses import fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetopt.optimizer.cost.provisioning import (
    Payload,
    ProvisioningFacts,
    disk_gb,
    measured_factors,
    provisioning_facts,
    startup_s,
)
from hetopt.optimizer.market.catalog import load_catalog

TYPES = load_catalog("us-east-1").instance_types
CPU, GPU, METAL = TYPES["c7i.xlarge"], TYPES["g5.xlarge"], TYPES["c7i.metal-24xl"]


def test_every_figure_is_dated_and_has_a_source() -> None:
    for one in fields(ProvisioningFacts):
        term = getattr(provisioning_facts(), one.name)
        assert term.source, one.name
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


def test_a_disk_holds_its_image() -> None:
    assert disk_gb(GPU, Payload()) > 75 > disk_gb(CPU, Payload()) > 8


def test_a_machine_reaches_one_of_its_network_cards() -> None:
    several = TYPES["p5.48xlarge"]
    assert several.network_baseline_gbps == 3200
    assert several.network_bytes_per_s == pytest.approx(100e9 / 8)
    assert TYPES["g5.xlarge"].network_bytes_per_s == pytest.approx(TYPES["g5.xlarge"].network_baseline_gbps * 1e9 / 8)
