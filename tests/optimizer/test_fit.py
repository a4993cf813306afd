"""Planted parameters are found again; what the data cannot tell is frozen and says so."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetopt.core.errors import BadInput
from hetopt.core.profile import GainPoint
from hetopt.optimizer.fit import SPREAD_FLOOR, SPREAD_ONE_BATCH_SIZE, fit, fit_device, fit_gain, fit_step_time

from .profiles import SIZES, make_device, make_profile

seconds = st.floats(1e-5, 1.0)


@given(fixed=seconds, per_sample=st.floats(1e-6, 0.1))
def test_a_line_is_recovered(fixed: float, per_sample: float) -> None:
    a, c, floor, log_sd = fit_step_time(SIZES, [fixed + per_sample * b for b in SIZES])
    assert floor == 0
    assert [a + c * b for b in SIZES] == pytest.approx([fixed + per_sample * b for b in SIZES], rel=1e-6)
    assert log_sd == pytest.approx(SPREAD_FLOOR)


def test_a_floor_is_recovered_and_only_taken_where_it_explains_more() -> None:
    sizes = (1, 2, 4, 8, 16, 32, 64, 128)
    times = [max(0.010, 0.002 + 0.0005 * b) for b in sizes]
    a, c, floor, _ = fit_step_time(sizes, times)
    assert (a, c, floor) == pytest.approx((0.002, 0.0005, 0.010), rel=1e-6)


def test_one_disturbed_point_hardly_moves_the_line() -> None:
    times = [0.004 + 0.0004 * b for b in SIZES]
    times[3] *= 3
    a, c, _, log_sd = fit_step_time(SIZES, times)
    assert a + c * 64 == pytest.approx(0.0296, rel=0.05)
    assert log_sd > 0.3


def test_slow_points_do_not_decide_alone() -> None:
    """Errors are relative: 10 % on a millisecond counts as much as 10 % on a second."""
    times = [(0.001 + 0.0001 * b) * (1.1 if b == 4 else 1.0) for b in SIZES]
    a, c, _, _ = fit_step_time(SIZES, times)
    assert a + c * 4 == pytest.approx(0.0014, rel=0.1)


@given(st.lists(st.floats(1e-4, 10), min_size=1, max_size=8))
def test_any_times_give_a_usable_line(times: list[float]) -> None:
    a, c, floor, log_sd = fit_step_time(range(1, len(times) + 1), times)
    assert a >= 0
    assert c > 0
    assert floor >= 0
    assert all(math.isfinite(x) for x in (a, c, floor, log_sd))


def test_one_batch_size_splits_evenly_and_is_uncertain() -> None:
    a, c, floor, log_sd = fit_step_time([32], [0.1])
    assert (a, c, floor, log_sd) == pytest.approx((0.05, 0.05 / 32, 0.0, SPREAD_ONE_BATCH_SIZE))


def test_the_mean_of_the_steps_is_what_a_run_pays() -> None:
    quiet, noisy = fit_device(make_device()), fit_device(make_device(noise=0.2))
    assert quiet.step_time.jitter == 0
    assert noisy.step_time.jitter == pytest.approx(0.2, rel=0.35)
    # exp of a normal has its mean above its median
    assert noisy.step_time.time_s(64) > 0.99 * quiet.step_time.time_s(64)


def test_memory_bounds_the_batch() -> None:
    assert fit_device(make_device()).largest_batch == 4 * 1024 - 400


def test_links_give_latency_and_bandwidth_of_one_hop() -> None:
    model = fit(make_profile())
    # two workers: all-reduce is two messages and the payload once; all-gather is half of both
    assert model.host_links["all_reduce"].latency_s == pytest.approx(1e-4)
    assert model.host_links["all_reduce"].bytes_per_s == pytest.approx(8e8)
    assert model.host_links["all_gather"].latency_s == pytest.approx(2e-4)
    assert model.host_links["all_gather"].bytes_per_s == pytest.approx(8e8)
    assert not model.network_links


def test_the_reference_is_the_least_divided_device() -> None:
    assert fit(make_profile()).reference.device.workers_per_host == 1


@given(st.lists(st.tuples(st.floats(1e-4, 1), st.floats(0, 1)), min_size=1, max_size=12, unique_by=lambda p: p[0]))
def test_gain_never_falls_when_more_is_sent(points: list[tuple[float, float]]) -> None:
    curve = fit_gain([GainPoint(ratio=r, gain=g, gain_low=g) for r, g in points])
    smallest = min(r for r, _ in points)
    gains = [curve.gain(r) for r in np.geomspace(smallest, 1, 30)]
    assert all(0 < gain <= 1 for gain in gains)
    assert gains == sorted(gains)
    assert curve.gain(1) == 1


def test_gain_is_not_guessed_below_what_was_measured() -> None:
    with pytest.raises(BadInput, match="has no retained energy"):
        fit(make_profile()).gain.gain(1e-5)
