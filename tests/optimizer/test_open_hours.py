"""Laws of the hours in which machines may be used: how long work takes that only goes on in them."""

from __future__ import annotations

import datetime

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetopt.core.hosts import Host
from hetopt.optimizer.search.open_hours import DAY_S, OpenHours, elapsed_s

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


@given(works=st.lists(st.floats(0, 1e6), min_size=1, max_size=20), slots=SLOTS)
def test_who_may_always_be_used_takes_the_time_of_the_work(works: list[float], slots: tuple[float, ...]) -> None:
    assert elapsed_s(works, np.ones(len(slots)), slots) == pytest.approx(np.array(works), rel=1e-9, abs=1e-6)


def test_the_day_begins_now() -> None:
    hosts = [Host(name="desk", address="desk", hours="18:00-08:00"), Host(name="box", address="box")]
    noon = datetime.datetime(2026, 3, 1, 12, 30)
    found = OpenHours.of(hosts, noon)
    assert found is not None
    assert found.slots_s == (5.5 * 3600, 14 * 3600, 4.5 * 3600)
    assert found.of_host("desk") == (False, True, False)
    assert found.of_host("box") == (True, True, True)
    assert OpenHours.of(hosts[1:], noon) is None
