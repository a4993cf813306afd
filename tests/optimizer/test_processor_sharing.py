"""Workers that share processors end when an event-by-event account says so, and the factor leaves its headroom."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetopt.backends.prediction.processor_sharing import finish_times_s, least_factor, rounded_up

WORK = st.lists(st.floats(0.001, 10.0), min_size=1, max_size=12)
PROCESSORS = st.integers(1, 8)


def account(work_s: list[float], processors: int) -> list[float]:
    """Processor sharing, one end at a time."""
    left = dict(enumerate(work_s))
    finish = [0.0] * len(work_s)
    now_s = 0.0
    while left:
        speed = min(1.0, processors / len(left))
        span_s = min(left.values()) / speed
        now_s += span_s
        for worker in list(left):
            left[worker] -= span_s * speed
            if left[worker] <= 1e-12:
                finish[worker] = now_s
                del left[worker]
    return finish


@given(WORK, PROCESSORS)
def test_ends_are_those_of_the_account(work_s: list[float], processors: int) -> None:
    assert finish_times_s(work_s, processors) == pytest.approx(account(work_s, processors), rel=1e-6)


@given(WORK, PROCESSORS)
def test_nobody_ends_before_its_work_and_no_work_is_lost(work_s: list[float], processors: int) -> None:
    finish = finish_times_s(work_s, processors)
    assert all(end >= work * (1 - 1e-12) for end, work in zip(finish, work_s, strict=True))
    assert sum(work_s) <= processors * max(finish) * (1 + 1e-9)


@given(WORK, PROCESSORS)
def test_a_processor_for_everybody_is_no_wait(work_s: list[float], processors: int) -> None:
    assert finish_times_s(work_s, len(work_s) + processors) == pytest.approx(work_s)


@given(st.data(), WORK, PROCESSORS)
def test_the_factor_leaves_its_headroom_and_no_more(data: st.DataObject, work_s: list[float], processors: int) -> None:
    wanted_s = [data.draw(st.floats(0.001, 10.0)) for _ in work_s]
    factor = least_factor(wanted_s, work_s, processors, 1.25)
    finish = finish_times_s(work_s, processors)
    used = max(end / (factor * wanted) for end, wanted in zip(finish, wanted_s, strict=True))
    assert used <= 0.8 * (1 + 1e-9)
    assert factor == 1 or used == pytest.approx(0.8)
    assert sum(work_s) <= 0.8 * processors * factor * max(wanted_s) * (1 + 1e-9)


@given(st.floats(1.0, 1e5))
def test_a_factor_is_rounded_up_to_two_digits(factor: float) -> None:
    up = rounded_up(factor)
    assert factor <= up * (1 + 1e-9)
    assert up <= factor * 1.1 + 1e-9
    assert float(f"{up:.2g}") == up


@pytest.mark.parametrize(("work_s", "processors"), [([-1.0], 1), ([float("nan")], 1), ([float("inf")], 1), ([1.0], 0)])
def test_impossible_work_is_refused(work_s: list[float], processors: int) -> None:
    with pytest.raises(ValueError, match="work must be finite"):
        finish_times_s(work_s, processors)
